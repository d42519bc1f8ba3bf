"""Run minimha from a checkout: ``python cli.py example --tokens 3``."""

import sys

from minimha.cli import main

if __name__ == "__main__":
    sys.exit(main())
