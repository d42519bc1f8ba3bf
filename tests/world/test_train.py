"""The training of the small world's model runs, and writes what the shipped file holds."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minimha.models import world

SCRIPT = Path(__file__).with_name("train.py")


def test_two_steps_write_a_file_like_the_one_that_ships(tmp_path):
    pytest.importorskip("torch", reason="the training needs torch: pip install -e '.[training]'")
    output = tmp_path / "world.npz"
    paths = {"PYTHONPATH": str(SCRIPT.parents[2])}
    command = [sys.executable, SCRIPT, "--steps", "2", "--output", output]
    subprocess.run(command, check=True, timeout=120, env=os.environ | paths)
    with np.load(output) as trained, np.load(world.WEIGHTS) as shipped:
        assert trained.files == shipped.files
        for name in trained.files:
            assert trained[name].shape == shipped[name].shape
            assert trained[name].dtype == shipped[name].dtype
        for name in ("config", "vocabulary"):
            np.testing.assert_array_equal(trained[name], shipped[name])
