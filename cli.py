"""Run minimha from a checkout: ``python cli.py example --tokens 3``."""

import sys

try:
    from minimha.cli import main
except ModuleNotFoundError as missing:
    sys.exit(f"minimha: {missing.name} is not installed for {sys.executable}: pip install .")
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main())
