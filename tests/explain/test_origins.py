"""Every step says what it is computed from, and every cell of it can be written out."""

import numpy as np
import pytest

from minimha import attention
from minimha.equations import tiled
from minimha.examples import EXAMPLES, blocks, sentences
from minimha.explain import Trace
from minimha.explain.catalogue import base_of
from minimha.explain.entry import FORMULA
from minimha.explain.origins import INTERLEAVED, OPERATIONS, Origins
from minimha.explain.page import page
from minimha.explain.trace import token_labels
from minimha.explain.written import WRITERS, cell
from minimha.layers.feed_forward import FeedForward
from minimha.layers.multihead import MultiHeadAttention
from minimha.layers.norms import layer_norm
from minimha.layers.rope import RoPE
from minimha.models import world

RNG = np.random.default_rng(0)
OPTIONS = {
    "is_causal": True, "softcap": 2.0, "alibi_slopes": [0.5] * 4, "sinks": [0.5, -1, 2, 0],
    "return_lse": True,
}  # fmt: skip


def traced(backend="dense", dtype=np.float64, **options):
    """Four query heads on two key/value heads, in a batch of two."""
    trace = Trace(blocks=(128, 128))
    shapes = (2, 4, 5, 6), (2, 2, 5, 6), (2, 2, 5, 3)
    q, k, v = (RNG.normal(size=shape).astype(dtype) for shape in shapes)
    attention(q, k, v, tap=trace, backend=backend, **options)
    return trace


def layer(**settings):
    trace, options = Trace(), {"value_dim": 2, "head_dim": 4, "num_kv_heads": 2} | settings
    made = MultiHeadAttention(6, 4, dtype=np.float64, **options)
    made(RNG.normal(size=(2, 5, 6)), RNG.normal(size=(2, 3, 6)), tap=trace)
    return trace


def model():
    """A whole model: what one layer puts out is what the next one takes in."""
    trace, small = Trace(), world.load()
    small.logits([1, 2, 3], backend="dense", tap=trace)
    return trace


TRACES = {name: example.trace() for name, example in EXAMPLES.items()}
TRACES |= {
    "flash": blocks.of_length(6).trace(),
    "ragged blocks": blocks.of_length(5, B_r=3, B_c=2).trace(is_causal=False),
    "grouped": sentences.of_length(4, num_heads=4, num_kv_heads=2, d_model=8, rope=True).trace(),
    "cross": sentences.of_length(4, context=["a", "b"]).trace(),
    "options": traced(**OPTIONS),
    "ALiBi on a bias": traced(alibi_slopes=[0.5, 1, 2, 3], attn_bias=RNG.normal(size=(5, 5))),
    "float32": traced(dtype=np.float32),
    "a row sees nothing": traced(kv_lengths=0),
    "layer": layer(gate="elementwise", rope=RoPE(4, interleaved=True)),
    "normed": layer(qk_norm="head", epsilon=0),
}
GIVEN = {
    "x", "context", "wte", "wpe", "c_attn", "c_attn_bias", "W_q", "W_k", "W_v", "W_o", "W_g", "b_q",
    "b_k", "b_v", "b_o", "b_g", "g_q", "g_k", "W_q_hidden", "W_k_hidden", "w", "q", "k", "v", "Q",
    "K", "V", "sqrt_d_k", "cos", "sin", "softcap", "attn_bias", "slopes", "distances", "sinks",
    "skipped", "difference", "kept", "concat[assumed]", "W_vocab", "W_in", "b_in", "W_out", "b_out",
    "W_gate", "b_gate", "q_length", "k_length", "angle", "W_dq", "W_uq", "W_dkv", "W_kr", "W_uk",
    "W_uv", "W_iq", "W_ik", "W_iw", "W_qkv", "conv", "W_b", "W_a", "dt_bias", "A_log", "W_z", "g_o",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in TRACES if name != "shapes"])
def test_every_step_that_is_not_given_says_what_it_is_computed_from(name):
    trace = TRACES[name]
    silent = {s.name for s in trace.steps if trace.origins[s] is None and s.made != FORMULA}
    assert not {
        name for name in silent
        if not {name, base_of(name)} & GIVEN and not base_of(name).endswith(("_gain", "_bias"))
    }  # fmt: skip
    if "x" in trace and name != "the-cat-sat":
        assert not silent & {"q", "k", "v"}


@pytest.mark.parametrize("name", TRACES)
def test_every_cell_is_written_out_with_its_own_value(name):
    trace = TRACES[name]
    for step in trace.steps:
        for at in np.ndindex(step.value.shape):
            written = cell(trace, step, at, 6)
            assert written.cell.value == step.value[at] or np.isnan(step.value[at])
            assert written.text.startswith(step.symbol)
            if written.operation in ("product", "dot"):
                terms = [
                    a.value * b.value for a, b in zip(written.row, written.column, strict=True)
                ]
                np.testing.assert_allclose(
                    sum(terms) + sum(p.value for p in written.others), step.value[at],
                    rtol=1e-4, atol=1e-6,
                )  # fmt: skip


def test_origins_are_found_once_for_all_that_a_page_shows(monkeypatch):
    trace, calls = EXAMPLES["gpt2"].trace(), []
    monkeypatch.setattr(
        Origins, "_candidates", lambda self, step, of=Origins._candidates: (
            calls.append(step.title) or of(self, step)
        ),
    )  # fmt: skip
    page(trace, 3)
    assert len(calls) == len(set(calls)) == len(trace.steps)


def test_every_operation_of_the_catalogue_can_be_computed_and_written():
    used = {s.made[0] for trace in TRACES.values() for s in trace.steps if s.made}
    used -= {*FORMULA}
    assert used == set(OPERATIONS) == set(WRITERS)


@pytest.mark.parametrize(
    ("activation", "written"),
    [
        ("relu", "max(-1, 0) = 0"),
        ("gelu", "(-1) · (1 + erf((-1) / √2)) / 2 = -0.159"),
        ("gelu_tanh", "(-1) · (1 + tanh(√(2/π) · ((-1) + 0.044715 · (-1)³))) / 2 = -0.159"),
        ("silu", "(-1) / (1 + exp(-(-1))) = -0.269"),
        ("quick_gelu", "(-1) / (1 + exp(-1.702 · (-1))) = -0.154"),
        ("relu_squared", "max(-1, 0)² = 0"),
    ],
)
def test_the_activation_is_found_from_its_numbers(activation, written):
    trace = Trace()
    feed_forward = FeedForward(np.eye(2), np.eye(2), activation)
    feed_forward(trace("added", np.array([[-1.0, 2.0]])), trace)
    [step] = trace.by_name["activated"]
    assert cell(trace, step, (0, 0)).text == f"Φ[0,0] = {written}"


def test_of_a_long_row_the_largest_numbers_are_written_out():
    trace = Trace()
    x = trace("x", np.arange(-20.0, 20)[None])
    layer_norm(x, np.ones(40), np.zeros(40), 0, trace)
    exponentials = np.exp(trace("logits", x))
    trace("probabilities", exponentials / exponentials.sum())
    texts = {
        name: cell(trace, trace.by_name[name][0], (0, 0)).text
        for name in ("mean", "variance", "probabilities")
    }
    assert texts["mean"].startswith("μ[0] = ((-20) + (-19) + ")
    assert texts["mean"].endswith(" + (-12) + … + 13 + 14 + 15 + 16 + 17 + 18 + 19) / 40 = -0.500")
    assert texts["variance"].count(" - (-0.500))²") == 16
    wanted = "p[0,0] = exp(-20) / (exp(19) + exp(18) + exp(17) + 37 smaller ones) = "
    assert texts["probabilities"].startswith(wanted)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("epsilon", [0, 1e-12, 1e-6, 0.00123456, 1])
def test_a_norm_s_epsilon_is_found_from_its_numbers(epsilon, dtype):
    rng = np.random.default_rng(0)  # some draws hide an epsilon behind rounding
    trace, x = Trace(), rng.normal(size=(3, 4)).astype(dtype)
    gain, bias = rng.normal(size=(2, 4)).astype(dtype)
    layer_norm(trace("x", x), gain, bias, epsilon, trace)
    made = trace.origins[trace.by_name["normed"][0]]
    rounding = 1e-12 if dtype is np.float64 else 1e-5
    assert made.constant == pytest.approx(epsilon, rel=1e-3, abs=rounding)


def test_no_negative_epsilon_is_made_up_where_rounding_hides_it():
    trace, x = Trace(), RNG.normal(scale=100, size=(8, 64)).astype(np.float32)
    for _ in range(20):
        x = np.roll(x, 1, axis=1) * np.float32(1.01)
        layer_norm(trace("x", x), np.ones(64, x.dtype), np.zeros(64, x.dtype), 1e-12, trace)
        assert trace.origins[trace.by_name["normed"][0]].constant >= 0
        trace = Trace()


def test_what_a_layer_takes_in_is_what_the_one_before_put_out():
    trace = model()
    sources = {}
    for step in trace.steps:
        if step.base in ("x", "final_mean"):
            made = trace.origins[step]
            sources[step.name] = (made.operation, made.operands[0].name)
    assert sources == {
        "x[layer 0]": ("rows", "embedded"), "x[layer 1]": ("rows", "residual[layer 0]"),
        "x[layer 2]": ("rows", "residual[layer 1]"), "final_mean": ("mean", "residual[layer 2]"),
    }  # fmt: skip


CAT = TRACES["the-cat-sat"]


@pytest.mark.parametrize(
    ("trace", "name", "at", "text"),
    [
        (CAT, "x", (2, 0), "X[sat,0] = 1, given"),
        (CAT, "scores", (2, 1), "S[sat,cat] = 1·0 + 1·1 = 1"),
        (CAT, "masked", (2, 1), "S[sat,cat] = 1, not hidden"),
        (CAT, "masked", (0, 1), "S[The,cat] = -∞, hidden by the mask"),
        (CAT, "row_max", (2, 0), "m[sat] = max(1, 1, 2) = 2"),
        (CAT, "exponentials", (2, 1), "P[sat,cat] = exp(1 - 2) = 0.368"),
        (CAT, "row_sum", (2, 0), "l[sat] = 0.368 + 0.368 + 1 = 1.736"),
        (CAT, "weights", (2, 1), "A[sat,cat] = 0.368 / 1.736 = 0.212"),
        (CAT, "output", (2, 0), "O[sat,0] = 0.212·1 + 0.212·3 + 0.576·0 = 0.848"),
        (CAT, "scaled[divided]", (2, 1), "S[sat,cat] = 1 · 0.707 = 0.707"),
        (CAT, "weights[divided]", (1, 0), "A[cat,The] = 0.493 / 1.493 = 0.330"),
        (TRACES["two-heads"], "concat", (0, 2), "C[X,2] = O[X,0] of head 1 = 6"),
        (TRACES["two-heads"], "output", (0, 2), "Y[X,2] = 4·1 + 11·0 + 6·(-1) + 9·0 = -2"),
        (TRACES["gpt2"], "mean", (1, 0), "μ[cat] = ((-1) + 1 + 2 + 0) / 4 = 0.500"),
        (TRACES["gpt2"], "variance", (1, 0),
         "σ²[cat] = ((-1 - 0.500)² + (1 - 0.500)² + (2 - 0.500)² + (0 - 0.500)²) / 4 = 1.250"),
        (TRACES["gpt2"], "normed", (1, 0),
         "X'[cat,0] = 1 · (-1 - 0.500) / √(1.250 + 1e-05) + 1 = -0.342"),
        (TRACES["gpt2"], "x", (1, 0), "X[cat,0] = -1 + 0 = -1"),
        (TRACES["bert"], "x", (1, 0), "X[the,0] = X'[the,0] of embedded_normed = -1.414"),
        (TRACES["translation"], "x[decoder]", (1, 0), "X[Le,art] = 1, given"),
        (TRACES["translation"], "context[cross]", (2, 3),
         "X_enc[trains,noun] = Z[trains,noun] of encoder = 0.001"),
        (TRACES["translation"], "x[cross, step 3]", (0, 1),
         "X[entraîne,boy] = Z[garçon,boy] of decoder = 0.002"),
        (TRACES["llama"], "normed", (1, 0), "X'[cat,0] = 1 · (-1) / √(0.500 + 1e-05) = -1.414"),
        (TRACES["translation"], "probabilities[unshifted]", (0, 0),
         "p[Le,le] = exp(16) / (exp(16) + exp(0) + exp(0) + exp(0) + exp(0)) = 1.000"),
        (TRACES["llama"], "mean_square", (1, 0),
         "s[cat] = ((-1)² + 0² + 1² + 0² + 1² + 0² + (-1)² + 0²) / 8 = 0.500"),
        (TRACES["gpt2"], "W_q", (1, 1), "W_q[1,1] = c_attn[1,1] = 1"),
        (TRACES["flash"], "S[i=1,j=1]", (0, 1), "S_ij[approved,the] = -∞, hidden by the mask"),
        (TRACES["flash"], "factor[i=1,j=0]", (0, 0), "α_i[approved] = exp(-∞ - 0) = 0"),
    ],
)  # fmt: skip
def test_in_words(trace, name, at, text):
    step = trace.by_name[name][-1 if name.startswith("concat") else 0]
    assert cell(trace, step, at).text == text


@pytest.mark.parametrize("backend", ["dense", "tiled"])
def test_a_query_that_sees_no_key_has_0_by_convention(backend):
    trace = traced(attn_mask=np.arange(5)[:, None] > [0] * 5, backend=backend)
    names = ("row_max", "weights") if backend == "dense" else ("output",)
    for name in names:
        text = cell(trace, trace.by_name[name][0], (0, 0)).text
        assert text.endswith(" = 0, no key is seen: 0 by convention")
    if backend == "dense":
        assert trace.by_name["row_max"][0].note.endswith("has 0, by convention.")
        assert "convention" not in traced().by_name["row_max"][0].note


@pytest.mark.parametrize("backend", ["dense", "tiled"])
def test_nan_that_a_query_does_not_see_is_not_in_its_sum(backend):
    trace = Trace(blocks=(128, 128))
    v = [[1, 2], [3, np.nan]]
    attention(np.eye(2), np.eye(2), v, is_causal=True, scale=1, tap=trace, backend=backend)
    name = "output" if backend == "dense" else "O[i=0,j=0]"
    [output] = trace.by_name[name]
    texts = [cell(trace, output, at).text.partition(" = ")[2] for at in ((0, 1), (1, 1))]
    weights = "0.269·2 + 0.731" if backend == "dense" else "0.368·2 + 1"
    assert texts == ["1·2 = 2", f"{weights}·NaN = NaN"]


def test_the_log_sum_exp_of_blocks_is_that_of_the_last_block_of_its_row():
    rows = tiled.BLOCK_ROWS + 1
    trace = Trace(blocks=(tiled.BLOCK_ROWS, tiled.BLOCK_COLUMNS))
    attention([[1]] * rows, [[2], [2]], [[3], [5]], scale=1, return_lse=True, backend="tiled",
              tap=trace)  # fmt: skip
    [lse] = trace.by_name["lse"]
    assert cell(trace, lse, (rows - 1,)).text == f"L[q{rows - 1}] = 2 + log 2 = 2.693"


def test_a_block_goes_on_from_the_one_before():
    trace = TRACES["flash"]
    texts = {
        base: cell(trace, trace.by_name[f"{base}[i=2,j=1]"][0], (1, 0)).text
        for base in ("m", "factor", "l", "O")
    }
    assert texts["m"].startswith("m_i[yesterday] = max(")
    assert [place.step.name for place in _others(trace, "m")] == ["m[i=2,j=0]"]
    assert [place.step.name for place in _others(trace, "l")] == ["factor[i=2,j=1]", "l[i=2,j=0]"]
    assert [place.step.name for place in _others(trace, "O")] == ["factor[i=2,j=1]", "O[i=2,j=0]"]
    for name in ("l", "O"):
        [first] = trace.by_name[f"{name}[i=2,j=0]"]
        assert cell(trace, first, (0, 0)).others == ()  # no block before, and nothing to rescale


def _others(trace, base):
    return cell(trace, trace.by_name[f"{base}[i=2,j=1]"][0], (1, 0)).others


def test_a_claim_that_does_not_hold_is_not_made():
    trace = Trace(labels=token_labels(["a", "b"]))
    trace("weights", np.eye(2))
    trace("v", np.ones((2, 1)))
    trace("output", np.full((2, 1), 5.0))
    [output] = trace.by_name["output"]
    assert trace.origins[output] is None
    assert cell(trace, output, (0, 0)).text == "O[a,0] = 5, given"


def test_alibi_is_written_out():
    trace = Trace()
    attention([[1], [1]], [[1], [1]], [[1], [1]], alibi_slopes=[0.5], tap=trace)
    [bias] = trace.by_name["bias"]
    assert cell(trace, bias, (1, 0)).text == "bias[q1,k0] = -0.500·1 = -0.500"
    [bias] = TRACES["ALiBi on a bias"].by_name["bias"][:1]
    assert " - 0.500·4 = " in cell(TRACES["ALiBi on a bias"], bias, (0, 4)).text


def test_a_scale_of_ones_own_is_found():
    trace = traced(scale=-0.3)
    made = trace.origins[trace.by_name["scaled"][0]]
    assert made.constant == pytest.approx(-0.3)


def test_shared_keys_are_those_of_the_head():
    trace = traced()
    for step in trace.by_name["scores"]:
        _, k = trace.origins[step].operands
        assert (k.batch, k.kv_head) == (step.batch, step.head // 2)


def test_the_layout_of_pairs_is_found():
    trace = TRACES["layer"]
    assert trace.origins[trace.by_name["q_rotated"][0]].constant == INTERLEAVED
