"""Every test of ``check`` draws the same problems; ``--hypothesis-seed`` draws others."""

import pytest

from minimha.check import search


@pytest.fixture(autouse=True)
def same_problems(request, monkeypatch):
    seed = int(request.config.getoption("hypothesis_seed", None) or 0)
    monkeypatch.setattr("minimha.check.drawn_seed", lambda: seed)


@pytest.fixture(autouse=True, scope="module")
def little_is_kept(request):
    """Forget what each bug answers to each problem, a GiB of it, after the files that ask that."""
    yield
    if request.path.name in ("test_verdict.py", "test_delta_rule.py"):
        search.forget()
