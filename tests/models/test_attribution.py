"""Shares of logits, patched runs and rollout, each against runs of another kind."""

from dataclasses import replace

import numpy as np
import pytest
from models import plain

from minimha.explain import Trace
from minimha.layers.norms import LayerNorm, RMSNorm
from minimha.models import attribution as causes
from minimha.models import world
from minimha.models.checkpoints import from_tensors
from minimha.models.interpretability import Head, without_heads

IDS, OTHER = np.array([1, 5, 2, 9, 1, 5]), np.array([1, 5, 7, 9, 3, 5])
RNG = np.random.default_rng(0)
MODELS = {
    "gpt2": from_tensors(plain.GPT2, plain.gpt2_tensors(RNG)),
    "llama": from_tensors(plain.LLAMA, plain.llama_tensors(RNG)),
}


def with_output_norms(model):
    """The model with norms of the parts' outputs, as Gemma has them."""
    E = model.config.d_model
    norms = [RMSNorm(RNG.normal(size=E).astype(np.float32), 1e-6) for _ in "ab"]
    names = "attention_output_norm", "feed_forward_output_norm"
    blocks = [replace(b, **dict(zip(names, norms, strict=True))) for b in model.blocks]
    return replace(model, blocks=blocks)


@pytest.fixture(params=["gpt2", "llama", "output norms"])
def model(request):
    return MODELS.get(request.param) or with_output_norms(MODELS["llama"])


def test_shares_sum_to_the_logit_and_to_the_difference_of_two(model):
    logits = model.logits(IDS)
    for position in (-1, 2):
        found = causes.attribution(model, IDS, 4, position=position)
        assert found.values.sum() == pytest.approx(logits[position, 4], rel=1e-4, abs=1e-5)
    both = causes.attribution(model, IDS, 4, 7)
    assert both.names[0] == "embedded"
    assert both.values.sum() == pytest.approx(logits[-1, 4] - logits[-1, 7], rel=1e-4, abs=1e-5)
    largest = both.largest(3)
    assert [abs(share) for _, share in largest] == sorted(np.abs(both.values))[:-4:-1]


@pytest.mark.parametrize("head", [(0, 1), (1, 0)])
@pytest.mark.parametrize("family", MODELS)
def test_the_share_of_a_head_is_what_goes_when_it_is_removed(family, head):
    model, (layer, _) = MODELS[family], head
    whole, less = Trace(), Trace()
    model.logits(IDS, tap=whole)
    without_heads(model, [Head(*head)]).logits(IDS, tap=less)
    added, last = f"added[layer {layer}]", whole[f"residual[layer {len(model.blocks) - 1}]"][-1]
    output = (whole[added] - less[added])[-1].astype(float)
    norm = model.final_norm
    if isinstance(norm, LayerNorm):
        output, variance = output - output.mean(), np.var(last.astype(float))
    else:
        variance = np.mean(np.square(last.astype(float)))
    wanted = output * norm.gain / np.sqrt(variance + norm.epsilon) @ model.W_vocab[:, 4]
    found = causes.attribution(model, IDS, 4)
    share = found.values[found.names.index(str(Head(*head)))]
    assert share == pytest.approx(wanted, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("step", ["residual", "output", "feed_forward", "head_output"])
def test_each_cell_of_a_patch_is_a_run_with_one_row_replaced(model, step):
    found = causes.patch(model, IDS, OTHER, lambda logits: logits[4], step)
    clean, corrupted = Trace(), Trace()
    model.logits(IDS, tap=clean)
    model.logits(OTHER, tap=corrupted)
    assert found.shape == (2, 6)
    for n, p in np.ndindex(found.shape):
        name = f"{step}[layer {n}]"
        mended = corrupted[name].copy()
        mended[..., p, :] = clean[name][..., p, :]
        wanted = model.logits(OTHER, replace={name: mended})[-1, 4]
        assert found[n, p] == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_the_subject_is_what_a_verb_depends_on():
    model = world.load()
    were, was = model.encode("were was")
    found = causes.patch(
        model, "the cats that saw the dog", "the cat that saw the dog", lambda x: x[were] - x[was]
    )
    assert found[0].argmax() == 1  # the subject at first, the last word at the end
    assert found[-1].argmax() == 5


def test_rollout_multiplies_half_attention_and_half_the_row_itself(model):
    trace = Trace()
    model.logits(IDS, tap=trace)
    found = causes.rollout(model, IDS)
    total = np.eye(6)
    for n in range(2):
        heads = trace[f"weights[layer {n}]"]
        A = sum(head / len(heads) for head in heads.astype(float))
        total = np.array([[sum((A[i, k] + (i == k)) / 2 * total[k, j] for k in range(6))
                           for j in range(6)] for i in range(6)])  # fmt: skip
        np.testing.assert_allclose(found[n], total, atol=1e-6)
    np.testing.assert_allclose(found.sum(axis=-1), 1, atol=1e-6)


def test_what_does_not_fit_is_refused():
    model = MODELS["gpt2"]
    with pytest.raises(ValueError, match="corrupted has 2 tokens but clean has 6: expected equal"):
        causes.patch(model, IDS, [1, 2], np.sum)
    with pytest.raises(ValueError, match="step is 'wpe', of which layer 0 has shape"):
        causes.patch(model, IDS, OTHER, np.sum, "wpe")
    with pytest.raises(ValueError, match="step is 'W_q', of which layer 0 has shape"):
        causes.patch(model, IDS, OTHER, np.sum, "W_q")
    with pytest.raises(ValueError, match="against is 'the cat', which is 2 tokens: expected one"):
        causes.attribution(world.load(), "the cat", "sat", "the cat")
    with pytest.raises(ValueError, match=r"position is 6: expected -6 to 5"):
        causes.attribution(model, IDS, 4, position=6)


def test_steps_are_those_that_a_trace_receives(model):
    trace = Trace()
    model.logits(IDS, tap=trace)
    found = model.steps(IDS)
    assert list(found) == list(trace)
    H = model.config.num_heads
    assert found["weights[layer 1]"] == (1, H, 6, 6)
