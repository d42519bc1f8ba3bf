"""attend over a store of zarr: here, on a cluster, and what is refused before a number is read."""

import json
import subprocess
import sys
import warnings

import numpy as np
import pytest

from minimha import attention
from minimha.cli import main

zarr = pytest.importorskip("zarr", reason="zarr is not installed (extra zarr)")
RNG = np.random.default_rng(0)
Q, K, V = (
    RNG.normal(size=(1, 4, 2, 8)),
    RNG.normal(size=(1, 2, 50, 8)),
    RNG.normal(size=(1, 2, 50, 8)),
)
MASK = RNG.random((2, 50)) < 0.8
LIMITED = """
import resource, sys
import minimha.cli.attend, minimha.cli.stores, zarr
from minimha import attention
from minimha.cli import main
attention([[1.0]], [[1.0]], [[1.0]])
room, *line = sys.argv[1:]
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (int(room) << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
print(main(line))
"""
OPTIONS = {"attn_mask": MASK, "softcap": 3.0, "is_causal": True, "q_offset": 40}


def write(path, arrays=None, **attributes):
    """A problem's store, k and v in chunks of 16 keys of one head."""
    group = zarr.open_group(path, mode="w")
    for name, x in ({"q": Q, "k": K, "v": V} if arrays is None else arrays).items():
        chunks = (1, 1, 16, 8) if name in ("k", "v") and x.ndim == 4 else x.shape
        group.create_array(name, data=x, chunks=chunks, config={"write_empty_chunks": True})
    group.attrs.update(attributes)
    return group


def attend(capsys, *line):
    status = main(["attend", *map(str, line)])
    return status, *capsys.readouterr()


def assert_written(path, name, exact):
    """The steps of this name, one for each head, are what is exact."""
    steps = json.loads(path.read_text())["steps"]
    found = np.stack([step["value"] for step in steps if step["name"] == name])
    np.testing.assert_allclose(found.reshape(exact.shape), exact, rtol=1e-12)


def test_a_store_is_computed_here(tmp_path, capsys):
    write(
        tmp_path / "p.zarr",
        {"q": Q, "k": K, "v": V, "attn_mask": MASK},
        softcap=3.0,
        return_lse=True,
    )
    line = [tmp_path / "p.zarr", "--causal", "--q-offset", 40, "--output", tmp_path / "o.json"]
    status, _, err = attend(capsys, *line)
    assert (status, err) == (0, "")
    expected = attention(Q, K, V, **OPTIONS, return_lse=True)
    for name, exact in zip(("output", "lse"), expected, strict=True):
        assert_written(tmp_path / "o.json", name, exact)


def test_a_store_is_computed_on_a_cluster(tmp_path, capsys, monkeypatch):
    deploy = pytest.importorskip("distributed.deploy", reason="dask is not installed (extra dask)")
    write(tmp_path / "p.zarr", is_causal=True, q_offset=40, softcap=3.0)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ports in use
        with deploy.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster:  # fmt: skip
            address = f"--cluster={cluster.scheduler_comm.address}"
            status, _, err = attend(capsys, "p.zarr", address, "--output", "o.json")
    assert (status, err) == (0, "")
    exact = attention(Q, K, V, is_causal=True, q_offset=40, softcap=3.0)
    assert_written(tmp_path / "o.json", "output", exact)


def test_a_cluster_that_cannot_be_reached_leaves_nothing_behind(tmp_path, capsys, monkeypatch):
    pytest.importorskip("distributed.client", reason="dask is not installed (extra dask)")
    monkeypatch.setattr("minimha.cli.stores.PATIENCE", 0.3)
    write(tmp_path / "p.zarr")
    line = [tmp_path / "p.zarr", "--cluster=tcp://127.0.0.1:9", "--output", tmp_path / "o.json"]
    status, out, err = attend(capsys, *line)
    assert (status, out) == (2, "")
    assert err.startswith("minimha: the cluster tcp://127.0.0.1:9 cannot be reached: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "o.json").exists()


def unwritten(path):
    zarr.open_group(path, mode="w").create_array(
        "k", shape=(1, 2, 50, 8), chunks=(1, 1, 16, 8), dtype="f4"
    )


DELTA = {"id": "delta", "dtype": "<f8"}  # numcodecs has some that unpickle, too


def undecodable(path):
    group = zarr.open_group(path, mode="w", zarr_format=2)
    for name, x in (("q", Q), ("k", K), ("v", V)):
        group.create_array(name, data=x, config={"write_empty_chunks": True})
    file = path / "k" / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"filters": [DELTA]}))


def huge(path, name="q", shape=(1, 4, 2**37, 8)):
    write(path)
    file = path / name / "zarr.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"shape": shape}))


def broken(path):
    write(path)
    (path / "k" / "c" / "0" / "1" / "2" / "0").write_bytes(b"too short")


def nothing(path):
    path.mkdir()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: None, "p.zarr cannot be read: no such folder"),
        (nothing, "p.zarr is refused: expected a group of zarr"),
        (lambda path: write(path, {"q": Q, "k": K}), "p.zarr lacks the key 'v': q, k and v are"),
        (lambda path: write(path, softcaps=1), "the key 'softcaps': did you mean 'softcap'?"),
        (
            lambda path: write(path, {"q": Q, "k": K, "v": V[:, :, :40]}),
            "v has Lk=40 but k has Lk=50",
        ),
        (lambda path: write(path, softcap="big"), "softcap is 'big': expected a number"),
        (lambda path: write(path, {"q": Q.astype("U3"), "k": K, "v": V}), "expected numbers"),
        (unwritten, "p.zarr lacks the key 'q'"),
        (undecodable, "p.zarr, k is encoded by 'delta': expected one of blosc, bytes"),
        (huge, "p.zarr, q has 4,398,046,511,104 numbers: expected at most 134,217,728"),
        (
            lambda path: huge(path, "k", (1, 2, 2**60, 8)),
            "p.zarr, k has 144,115,188,075,855,872 chunks",
        ),
        (broken, "k cannot be read, keys 0 to 50"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # zarr's, of a data type that its format 3 lacks
def test_bad_stores_get_a_sentence(tmp_path, capsys, monkeypatch, make, sentence):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "p.zarr")
    status, out, err = attend(capsys, "p.zarr")
    assert (status, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"zarr_format": 3, "node_type": "array"}'])
def test_metadata_that_cannot_be_read_is_one_sentence(tmp_path, text):
    """zarr reads arrays in tasks of asyncio, which prints the errors of all but the first."""
    write(tmp_path / "p.zarr")
    for file in (tmp_path / "p.zarr").glob("*/zarr.json"):
        file.write_text(text)
    line = [sys.executable, "-m", "minimha", "attend", str(tmp_path / "p.zarr")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("minimha: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["k", "v"])
def test_chunks_that_were_never_written_are_refused(tmp_path, capsys, name):
    group = write(tmp_path / "p.zarr")
    (tmp_path / "p.zarr" / name / "c" / "0" / "1" / "3" / "0").unlink()
    assert group[name].nchunks == 8
    status, _, err = attend(capsys, tmp_path / "p.zarr")
    assert status == 2
    assert f"{name} has 7 of its 8 chunks: the store was not written to its end" in err


def test_more_chunks_than_can_be_counted_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("minimha.cli.stores.MOST_CHUNKS", 7)
    write(tmp_path / "p.zarr")
    assert "k has 8 chunks: expected at most 7" in attend(capsys, tmp_path / "p.zarr")[2]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (["p.npz", "--cluster", "tcp://a"], "--cluster computes over a store of zarr"),
        (["p.zarr", "--only", "weights"], "a store keeps no steps, so --only can name only output"),
    ],
)
def test_what_cannot_be_shown_of_a_store(tmp_path, capsys, monkeypatch, line, sentence):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "p.zarr")
    status, _, err = attend(capsys, *line)
    assert status == 2
    assert sentence in err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS is Linux's")
@pytest.mark.parametrize("room", [16, 90, 400])
def test_a_store_that_does_not_fit_into_memory_is_a_sentence(tmp_path, room):
    """Within so many MiB more than are there once all is imported; a chunk has 128."""
    group = zarr.open_group(tmp_path / "p.zarr", mode="w")
    for name, length in (("q", 1), ("k", 2**18), ("v", 2**18)):
        shape = (1, 1, length, 64)
        x = np.zeros(shape)
        group.create_array(name, data=x, chunks=shape, config={"write_empty_chunks": True})
    line = ["attend", str(tmp_path / "p.zarr"), "--output", str(tmp_path / "o.json")]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(room), *line],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "2\n"
    assert "memory" in done.stderr or "cannot be read" in done.stderr or "thread" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("minimha: ") == 1


def test_an_array_of_another_option_that_cannot_be_read_is_a_sentence(tmp_path, capsys):
    write(tmp_path / "p.zarr")
    (chunk,) = (path for path in (tmp_path / "p.zarr" / "q" / "c").rglob("*") if path.is_file())
    chunk.write_bytes(b"too short")
    status, out, err = attend(capsys, tmp_path / "p.zarr")
    assert (status, out) == (2, "")
    assert "p.zarr, q cannot be read: " in err
    assert err.count("\n") == 1
