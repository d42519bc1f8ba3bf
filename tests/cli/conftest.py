"""What the tests of the command line share."""

import pytest

from minimha.cli import main


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Run a command line in an empty folder; return its exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(line, *more):
        status = main([*line.split(), *more])
        return status, *capsys.readouterr()

    return run
