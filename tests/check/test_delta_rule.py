"""`check` of gated delta rules: ours, transformers' and wrong ones."""

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from check.mutants import answers
from thorough import in_turn, thorough_after

import minimha
from minimha.check import check, page
from minimha.check.catalogue import DEVIATIONS
from minimha.check.catalogue_delta import CLEARING, NAN_LEAKS, OF_DELTA
from minimha.check.problems_delta import delta_problems
from minimha.check.verdict import judge
from minimha.check.wrong_delta import PreparedDelta, deviate_delta

NAMES = [one.identifier for one in OF_DELTA]
SPEAKS, SEED = "gated_delta_rule", 5


def judged(deviations):
    problems = delta_problems(SEED)
    return judge(problems, answers(problems, deviations))


def test_without_deviations_it_is_the_rule():
    for problem in delta_problems(SEED):
        if not problem.chunks:
            exact = {name: np.float64(x) for name, x in problem.arguments.items() if name in "qkv"}
            given = {**problem.arguments, **exact}
            expected = minimha.gated_delta_rule(**given, backend="recurrent")
            found = deviate_delta(PreparedDelta(problem), {}).output
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", thorough_after(10, in_turn(NAMES)))
def test_one_deviation_is_named(name):
    """In its usual form; ``python -m tests.check.measure`` tries all forms."""
    found = judged({name: DEVIATIONS[name].values[0]})
    assert found.deviations == (name,)
    assert found.alternatives == ()
    assert found.verdict == ("differs" if name in NAN_LEAKS + CLEARING else "wrong")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "names",
    [
        {"delta_heads_tiled": "qk", "delta_norm_epsilon": "max"},
        {"delta_decay_after_error": 1, "delta_scale_missing": 1},
        {"delta_beta_ignored": 1, "delta_state_returned_transposed": 1},
        {"delta_rule_missing": 1, "delta_decay_in_base_2": 1},
        {"delta_chunks_apart": 64, "delta_lengths_ignored": 1},
    ],
)
def test_two_deviations_are_named(names):
    assert set(judged(names).deviations) == set(names)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("backend", ["recurrent", "chunked", "cpu"])
def test_ours_is_right_on_each_backend(backend, dtype):
    def rule(*arrays, **options):
        return minimha.gated_delta_rule(*arrays, **options, backend=backend)

    report = check(rule, SPEAKS, dtype)
    assert report.verdict == "right", report
    assert report.refused == ()


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_transformers_rule_ignores_the_scale(form):
    pytest.importorskip("torch", reason="torch is not installed")
    name = "transformers.models.qwen3_next.modeling_qwen3_next"
    module = pytest.importorskip(name, reason="transformers is not installed")
    report = check(getattr(module, f"torch_{form}_gated_delta_rule"), "fla")
    leaks = () if form == "recurrent" else NAN_LEAKS + CLEARING
    assert report.deviations == ("delta_scale_ignored", *leaks)
    assert report.verdict == "right"  # by the library's conventions, which the report names
    assert "scale is ignored, as functions of transformers do" in str(report)


def decay_last(q, k, v, g, beta, *, return_state=False, initial_state=None):
    """A port in the layout (B, H, L, D): the state decays after the token is stored."""
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q = q / np.sqrt(q.shape[-1])
    S = (
        np.zeros((*v.shape[:2], q.shape[-1], v.shape[-1]))
        if initial_state is None
        else initial_state
    )
    rows = []
    for t in range(v.shape[2]):
        u = beta[:, :, t, None] * (v[:, :, t] - np.einsum("bhde,bhd->bhe", S, k[:, :, t]))
        S = S + k[:, :, t, :, None] * u[:, :, None]
        rows.append(np.einsum("bhde,bhd->bhe", S, q[:, :, t]))
        S = S * np.exp(g[:, :, t])[..., None, None]
    output = np.stack(rows, 2).astype(np.float32)
    return (output, S) if return_state else output


def test_a_port_is_named_with_what_it_refuses():
    report = check(decay_last, SPEAKS)
    assert report.deviations == ("delta_decay_last",)
    assert {"kv_lengths", "cu_seqlens", "scale", "normalize"} <= set(report.refused)
    text = page.as_text(report)
    assert "the state decays after the token is stored" in text
    assert "Decay the state first, then correct and read it." in text
    assert "beta" not in [row["option"] for row in report.conformance()]


def token_by_token(
    q, k, v, g, beta, *, cu_seqlens=None, initial_state=None, over_heads=False, late=0
):
    """A port; sequences begin ``late`` tokens too late."""
    axes = (1, 3) if over_heads else 3
    q, k = (x / np.sqrt((x * x).sum(axes, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat(v.shape[1] // x.shape[1], 1) for x in (q / np.sqrt(q.shape[-1]), k))
    output, L = np.zeros(v.shape, np.float32), v.shape[2]
    starts = np.array([0, L]) if cu_seqlens is None else np.array(cu_seqlens)
    starts[1:-1] += late
    g = g[..., None] if g.ndim == 3 else g
    for s, (first, end) in enumerate(pairwise(starts)):
        S = np.zeros((len(q), v.shape[1], q.shape[-1], v.shape[-1]))
        if initial_state is not None:
            S = S + initial_state[s : s + 1 if cu_seqlens is not None else None]
        for t in range(first, end):
            S = S * np.exp(g[:, :, t])[..., None]
            u = v[:, :, t] - np.einsum("bhde,bhd->bhe", S, k[:, :, t])
            S = S + k[:, :, t, :, None] * (beta[:, :, t, None] * u)[:, :, None]
            output[:, :, t] = np.einsum("bhde,bhd->bhe", S, q[:, :, t])
    return output


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({}, ()),
        ({"over_heads": True}, ("delta_norm_over_heads",)),
        ({"late": 1}, ("delta_sequences_border_moved",)),
    ],
)
def test_ports_token_by_token_are_named(how, named):
    def port(q, k, v, g, beta, *, cu_seqlens=None, initial_state=None):
        return token_by_token(
            q, k, v, g, beta, cu_seqlens=cu_seqlens, initial_state=initial_state, **how
        )

    assert check(port, SPEAKS).deviations == named


def test_the_command_names_it_too(tmp_path):
    (tmp_path / "port.py").write_text(
        "from minimha import gated_delta_rule\n\n\n"
        "def rule(q, k, v, g, beta, **options):\n"
        "    return gated_delta_rule(q, k, v, g, beta**2, **options)\n"
    )
    command = [sys.executable, "-m", "minimha", "check", "port.py:rule", "--speaks", SPEAKS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "beta is applied twice" in done.stdout


def test_shapes_are_declared_for_attention_alone():
    with pytest.raises(ValueError, match="for attention functions, not for layers and delta rules"):
        check(minimha.gated_delta_rule, SPEAKS, head_dims=[64])
    with pytest.raises(ValueError, match="gated_delta_rule has a layout of its own"):
        check(minimha.gated_delta_rule, SPEAKS, layout="BLHD")
