"""Runs, metrics, gates, notebooks and packets. Nothing in here knows of drones or cars."""
