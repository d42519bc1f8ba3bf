"""The bench measures what it says: checked numbers, counted work, all candidates in one run."""

import json
import time

import numpy as np
import pytest
from thorough import thorough_after

from minimha import cli
from minimha.bench import cpu as bench
from minimha.bench import peers
from minimha.bench.bandwidth import read_memory
from minimha.bench.peers import Peer
from minimha.bench.report import (
    OURS,
    Record,
    Report,
    as_json,
    as_rows,
    best_peers,
    geometric_mean,
)
from minimha.bench.shapes import MASKS, Shape
from minimha.cli.bench import as_result
from minimha.kernels.cpu.simd.vector import panel_width

SMALL = Shape(1, 2, 2, 40, 40, 16)
MASKED = [Shape(1, 2, 2, 40, 40, 16, mask) for mask in MASKS]


def test_a_wrong_candidate_is_never_timed():
    inputs = SMALL.inputs()
    right = peers.numpy_peers(inputs)["NumPy"]
    calls = []

    def wrong():
        calls.append(1)
        return right.run() * np.float32(1.0001)

    candidates = {"right": right, "wrong": Peer(wrong, np.asarray)}
    records = bench.compare(SMALL, inputs, candidates, 0.01, "right")
    assert [(r.candidate, r.runs > 0) for r in records] == [("right", True), ("wrong", False)]
    assert records[1].error > bench.GATE
    assert len(calls) == 1
    assert "refused" in as_rows(records)[1]["error"]


def test_a_candidate_that_returns_nan_is_wrong():
    inputs = SMALL.inputs()
    nan = Peer(lambda: np.full_like(inputs.q, np.nan), np.asarray)
    (record,) = bench.compare(SMALL, inputs, {"nan": nan}, 0.01, "nan")
    assert record.runs == 0


def test_the_gate_checks_the_last_rows_too():
    inputs = SMALL.inputs()
    right = peers.numpy_peers(inputs)["NumPy"]

    def wrong_at_the_end():
        output = right.run().copy()
        output[0, 1, -1, -1] += 0.01
        return output

    (record,) = bench.compare(SMALL, inputs, {"x": Peer(wrong_at_the_end, np.asarray)}, 0.01, "x")
    assert record.runs == 0


def test_candidates_take_turns():
    order = []
    runs = {name: lambda name=name: (order.append(name), time.sleep(0.03)) for name in "ab"}
    times = bench.interleaved(runs, 0.01)
    # A first call and three trials; then turns of one call to wake and one that is timed.
    assert "".join(order) == "aaaabbbb" + 3 * "aabb"
    assert all(seconds >= 0.03 for measured in times.values() for seconds in measured)


@pytest.mark.parametrize(
    ("shape", "pairs"),
    [
        (Shape(1, 1, 1, 600, 600, 1), 600 * 600),
        (Shape(2, 3, 1, 600, 600, 1, "causal"), 6 * 600 * 600 / 2),
        (Shape(1, 1, 1, 600, 600, 1, "window"), sum(min(i + 1, 512) for i in range(600))),
    ],
)
def test_operations_are_four_for_each_visible_pair(shape, pairs):
    assert shape.operations == 4 * pairs


def test_a_decode_shape_counts_the_bytes_of_keys_and_values():
    shape = Shape(2, 8, 2, 1, 100, 16)
    assert shape.is_decode
    assert shape.bytes_read == sum(array.nbytes for array in shape.inputs()[1:3])


@pytest.mark.parametrize("shape", thorough_after(2, [Shape(1, 4, 2, 1, 64, 16), *MASKED]), ids=str)
def test_every_installed_peer_passes_the_gate(shape):
    report = bench.against_peers([shape], 0.01)
    assert report.records[0].candidate == OURS
    assert all(record.runs for record in report.records)
    assert set(report.missing) <= set(peers.LIBRARIES)


def test_the_ladder_times_every_rung():
    report = bench.ladder([Shape(1, 2, 2, 64, 64, 16)], 0.01)
    names = [record.candidate for record in report.records]
    assert names == ["dense", "tiled", *bench.LADDER]
    assert all(record.runs for record in report.records)
    (norm,) = (r for r in report.records if r.candidate == bench.LADDER_NORM)
    assert norm.ratio == 1


def test_scores_count_as_extra_memory_and_tiles_do_not():
    shape = Shape(1, 1, 1, 3000, 3000, 16)
    inputs = shape.inputs()
    bench.compile_seconds(shape)
    if bench.extra_memory(peers.numpy_peers(inputs)["NumPy"].run) is None:
        pytest.skip("the system does not report a process's peak memory")

    def most(run):  # a crowded system takes other pages away meanwhile, which hides what is added
        return max(bench.extra_memory(run) for _ in range(3))

    dense = most(peers.numpy_peers(inputs)["NumPy"].run)
    tiles = most(lambda: bench._ours(inputs).run())
    assert dense > 3000 * 3000 * 4
    assert tiles < 4 << 20


def test_json_has_null_for_what_was_not_measured():
    wrong = Record("1,1,1,1,1,1", "x", float("inf"))
    record = as_json(Report([wrong], 0.5, {"threads": 2}, ["torch"]))["records"][0]
    json.dumps(record, allow_nan=False)
    assert record["median"] is record["error"] is None
    assert record["runs"] == 0


def test_a_report_becomes_bars_of_ratios_to_peers_or_of_the_rates_of_rungs():
    def record(name, ratio, runs=3):
        return Record("a", name, 1.0, median=1, runs=runs, rate=2e9, ratio=ratio)

    beside_peers = [record(OURS, 1), record("x", 3), record("y", 2, runs=0)]
    (bars,) = as_result(Report(beside_peers, 0.5, {"threads": 2}, [])).figures
    assert (bars.names, list(bars.series.values())) == (("a: x",), [(3,)])
    rungs = [record("cpu.rung1", 1), record("cpu.rung2", 3), record("wrong", 1, runs=0)]
    (bars,) = as_result(Report(rungs, 0.5, {"threads": 2}, [])).figures
    assert (bars.names, list(bars.series.values())) == (("cpu.rung1", "cpu.rung2"), [(2, 2)])


def test_the_fastest_peer_is_taken_row_by_row():
    def record(shape, name, median):
        return Record(shape, name, 1.0, median=median, runs=3, ratio=median)

    records = [
        record("a", OURS, 1), record("a", "x", 3), record("a", "y", 2),
        record("b", OURS, 1), record("b", "x", 8), record("b", "y", 9),
    ]  # fmt: skip
    found = [peer.candidate for _, peer in best_peers(records)]
    assert found == ["y", "x"]
    assert geometric_mean([2, 8]) == pytest.approx(4)


def run(*arguments):
    return cli.main(["bench", "--shape", "1,2,2,40,40,16", "--seconds", "0.01", *arguments])


def test_the_command_prints_a_table(capsys):
    assert run("--shape", "1,4,2,1,64,16") == 0
    out = capsys.readouterr().out
    assert out.startswith("1,2,2,40,40,16\n")
    assert "minimha" in out
    assert "NumPy" in out
    assert "compiling or loading" in " ".join(out.split())
    for table in out.split("\n\n")[:2]:
        assert max(map(len, table.splitlines())) <= 80


def test_the_command_says_which_extra_is_missing_and_goes_on(capsys, monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert run() == 0
    out, err = capsys.readouterr()
    assert "torch and onnxruntime and onnx are not installed" in err
    assert "pip install 'minimha[bench]'" in err
    assert "NumPy" in out


def test_the_command_writes_json(tmp_path):
    path = tmp_path / "bench.json"
    assert run("--output", str(path), "--threads", "1") == 0
    written = json.loads(path.read_text())
    assert written["machine"]["threads"] == 1
    assert {record["shape"] for record in written["records"]} == {"1,2,2,40,40,16"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "1,2,2"], "expected B,H,Hkv,Lq,Lk,D"),
        (["--shape", "1,3,2,8,8,8"], "multiple of Hkv"),
        (["--shape", "1,2,2,8,9,8,causal"], "needs Lq = Lk"),
        (["--shape", "1,2,2,8,8,8,diagonal"], "expected one of none, causal, window, mask"),
        (["--seconds", "0"], "positive number of seconds"),
        (["--threads", "4096"], "expected 1 to"),
        (["--output", "."], "is a folder"),
    ],
)
def test_the_command_refuses_in_a_sentence(arguments, words, capsys):
    assert cli.main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert out == ""
    assert err.count("\n") == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_reading_memory_reads_all_of_it(dtype):
    x = np.random.default_rng(2).permutation(1000 * panel_width(np.dtype(dtype).itemsize))
    lanes_of_threads = read_memory(x.astype(dtype))
    expected = x.reshape(-1, lanes_of_threads.shape[1]).max(axis=0)
    np.testing.assert_array_equal(lanes_of_threads.max(axis=0), expected)
