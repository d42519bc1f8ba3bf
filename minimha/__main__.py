"""Run the command line as ``python -m minimha``, the same as ``minimha`` or ``python cli.py``."""

import sys

from minimha.cli import main

if __name__ == "__main__":
    sys.exit(main())
