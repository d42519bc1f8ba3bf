"""Stored cases of others, with their expected values: one test per case and backend."""

import importlib.util
from pathlib import Path

import pytest
from conformance import adaptor

from minimha.api import BackendUnavailable

FOLDER = Path(__file__).parents[3] / "shared" / "conformance"
PATHS = sorted(FOLDER.glob("data/**/*.npz"))

pytestmark = pytest.mark.skipif(not PATHS, reason=f"no stored cases in {FOLDER}")


@pytest.fixture(scope="module")
def score():
    """The scorer that is stored beside the cases: it calls the adaptor and has the tolerances."""
    spec = importlib.util.spec_from_file_location("score", FOLDER / "score.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("backend", ["dense", "cpu"])
@pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])
def test_stored_case(path, backend, score, monkeypatch):
    monkeypatch.setattr(adaptor, "BACKEND", backend)
    inputs, wanted, meta = score.load_case(str(path))
    kind = score.kind_of(meta)
    try:
        results = score.runs(adaptor, kind, inputs, meta)
    except BackendUnavailable as reason:
        pytest.skip(str(reason))
    results = [got for _, got in results if got is not None]
    if not results:
        pytest.skip(f"the adaptor has no function for {kind}")
    compared = 0
    for got in results:
        for name, want in wanted.items():
            if got.get(name) is None:  # an output that this function does not produce
                continue
            tolerance = score.LOW.get(want.dtype.name)
            is_close, worst = score.close(
                got[name], want, tolerance or meta["rtol"], tolerance or meta["atol"]
            )
            assert is_close, f"{name}: {worst}"
            compared += 1
    assert compared
