"""Every test of ``check`` draws the same problems; ``--hypothesis-seed`` draws others."""

import pytest


@pytest.fixture(autouse=True)
def same_problems(request, monkeypatch):
    seed = int(request.config.getoption("hypothesis_seed", None) or 0)
    monkeypatch.setattr("minimha.check.drawn_seed", lambda: seed)
