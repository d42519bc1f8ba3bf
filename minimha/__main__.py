"""``python -m minimha`` is the command line, as ``minimha`` and ``python cli.py`` are."""

import sys

from minimha.cli import main

if __name__ == "__main__":
    sys.exit(main())
