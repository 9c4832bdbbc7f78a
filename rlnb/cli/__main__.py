"""`python -m rlnb.cli`."""
import sys

from rlnb.cli.main import main

sys.exit(main())
