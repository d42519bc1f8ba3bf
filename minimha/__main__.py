"""Run the command line by ``python -m minimha``, like ``minimha`` and ``python cli.py``."""

import sys

from minimha.cli import main

if __name__ == "__main__":
    sys.exit(main())
