"""Hypothesis draws new examples at each run, but always the same ones in CI."""

import os

from hypothesis import settings

settings.register_profile("fresh", deadline=None)
settings.register_profile("same", deadline=None, derandomize=True)
settings.load_profile("same" if os.environ.get("CI") else "fresh")

# A program that switches numba's simulator on, for good, when it is imported.
collect_ignore = ["kernels/cuda/simulator.py"]
