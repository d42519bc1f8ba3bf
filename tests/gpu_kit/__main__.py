"""``python -m tests.gpu_kit build FOLDER``."""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Parse the command line and build the kit."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_kit", description="Build a GPU kit.")
    add = parser.add_subparsers(required=True).add_parser("build").add_argument
    add("folder", type=Path)
    about_arch = "compute capability without its dot (default 90, an H200)"
    add("--arch", type=int, default=90, help=about_arch)
    add("--sample", action="store_true", help="a few kernels of each rung, for a first look")
    add("--stand-in", action="store_true", help="for the tests' stand-in for a GPU, not for a GPU")
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from gpu_kit import build

    build.build(args.folder, divmod(args.arch, 10), args.sample, args.stand_in)


if __name__ == "__main__":
    main()
