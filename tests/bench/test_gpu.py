"""The GPU's bench on a CPU, where all of it but the events is the same."""

import pytest

from minimha import BackendUnavailable, backends, cli
from minimha.bench import gpu
from minimha.bench.report import OURS
from minimha.bench.shapes import Shape

SMALL = [
    Shape(1, 2, 2, 40, 40, 16),
    Shape(2, 4, 2, 40, 40, 16, "causal"),
    Shape(2, 4, 2, 1, 64, 16),
]


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_minimha_and_torch_s_backends_pass_the_gate_and_are_timed(shape):
    pytest.importorskip("torch", reason="torch, to compare with, is not installed")
    report = gpu.against_torch([shape], 0.01, device="cpu")
    records = {record.candidate: record for record in report.records}
    assert {OURS, "torch MATH", "torch, its own choice"} <= set(records)
    assert all(record.runs >= 3 for record in records.values())
    assert records["torch MATH"].error == 1
    assert records[OURS].ratio == 1


def test_wrong_numbers_are_not_timed(monkeypatch):
    pytest.importorskip("torch", reason="torch, to compare with, is not installed")
    right = gpu.attention

    def wrong(*arrays, backend, **options):
        output = right(*arrays, backend=backend, **options)
        return output if backend == "dense" else output * 1.01

    monkeypatch.setattr(gpu, "attention", wrong)
    report = gpu.against_torch(SMALL[:1], 0.01, device="cpu")
    ours = next(record for record in report.records if record.candidate == OURS)
    assert (ours.runs, ours.error > 5) == (0, True)


@pytest.mark.skipif(not backends()["cuda"], reason="a GPU is here")
def test_without_a_gpu_it_says_why(capsys):
    with pytest.raises(BackendUnavailable, match=r"torch, which the bench|backend 'cuda': "):
        gpu.against_torch(SMALL[:1], 0.01)
    assert cli.main(["bench", "--backend", "cuda"]) == 2
    assert capsys.readouterr().err.startswith("minimha: ")


def test_a_torch_that_finds_no_gpu_is_named(monkeypatch):
    torch = pytest.importorskip("torch", reason="torch, to compare with, is not installed")
    monkeypatch.setattr(gpu, "backends", lambda: {"cuda": None})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match=r"torch \S+, which .* finds no GPU: install one"):
        gpu.against_torch(SMALL[:1], 0.01)


def test_masks_that_not_every_backend_of_torch_supports_are_refused():
    with pytest.raises(ValueError, match="40 window: on a GPU the mask must be none or causal"):
        gpu.against_torch([Shape(1, 1, 1, 40, 40, 40, "window")], 0.01)


def test_options_of_the_cpu_s_bench_are_refused(capsys):
    assert cli.main(["bench", "--backend", "cuda", "--ladder"]) == 2
    assert "--ladder, --crowded and --threads are for the CPU" in capsys.readouterr().err


def test_the_default_shapes():
    shapes = [str(shape) for shape in gpu.SHAPES]
    assert shapes == [
        "4,16,16,4096,4096,128 bfloat16",
        "4,16,16,4096,4096,128 causal bfloat16",
        "4,16,16,4096,4096,64 bfloat16",
        "4,16,16,4096,4096,64 causal bfloat16",
        "2,16,16,4096,4096,64",
        "16,32,8,1,8192,128 bfloat16",
    ]
