"""The command line: where the lab meets the tracker."""
