"""The examples beyond the documents' own numbers: their notes describe their numbers."""

from statistics import NormalDist, fmean, pvariance

import numpy as np
import pytest

from minimha.examples import EXAMPLES, sentences, translation
from minimha.examples import language_models as models
from minimha.explain import render
from minimha.explain.figures.gallery import svg
from minimha.layers.rope import RoPE

READS = {  # example → head → who reads whom, most of all and alone
    "heads-000": {
        0: "cat→sleeps I→adopted",
        1: "that→cat I→cat adopted→cat",
        2: "The→cat",
        3: "sleeps→cat adopted→I",
    },
    "coreference": {
        0: "it→cat",
        1: "cat→sat it→was",
        2: "The→. cat→. on→. it→. .→.",
        3: "The→cat the→mat on→mat",
    },
    "heads-001": {0: "cat→ran ran→cat"},
    "heads-002": {
        0: "bank→loan loan→bank",
        1: "approved→bank bank→approved",
        2: "yesterday→approved approved→yesterday",
        3: "bank→The approved→bank the→approved loan→the yesterday→loan The→The",
    },
}
SHARES = {  # example → head → reader → those between whom it divides itself
    "heads-001": {
        2: {"that": "that I saw", "I": "that I saw", "saw": "that I saw"},
        3: {"cat": "cat ran away", "ran": "cat ran away", "away": "cat ran away"},
    },
}


def weights(name, head):
    example = EXAMPLES[name]
    return example.sentence.split(), example.trace()["weights"][head]


@pytest.mark.parametrize(
    ("name", "head", "pairs"),
    [(name, head, pairs) for name, heads in READS.items() for head, pairs in heads.items()],
)
def test_each_head_reads_what_the_document_says(name, head, pairs):
    words, A = weights(name, head)
    for reader, read in (pair.split("→") for pair in pairs.split()):
        assert A[words.index(reader), words.index(read)] > 0.97


@pytest.mark.parametrize(
    ("name", "head", "groups"),
    [(name, head, groups) for name, heads in SHARES.items() for head, groups in heads.items()],
)
def test_words_that_belong_together_share_their_attention(name, head, groups):
    words, A = weights(name, head)
    for reader, together in groups.items():
        shares = A[words.index(reader), [words.index(word) for word in together.split()]]
        np.testing.assert_allclose(shares, 1 / 3, atol=0.01)


def test_the_local_head_is_darkest_on_the_diagonal_and_lighter_beside_it():
    _, A = weights("heads-001", 1)
    beside = np.r_[np.diagonal(A, 1), np.diagonal(A, -1)]
    assert np.diagonal(A).min() > 0.6 > 0.25 > beside.max()
    assert beside.min() > 0.1
    assert A[0, 2:].max() < 0.01


def test_a_figure_names_the_relation_of_each_head():
    trace = EXAMPLES["coreference"].trace()
    assert "weights, head 0, coreference: it → cat" in render.plain(
        render.text(trace.selected(["heatmap"]), 3, None, "blocks")
    )
    assert "weights, head 3, syntax: The → cat, on the → mat" in svg(trace, 3)


@pytest.mark.parametrize("name", READS)
def test_the_output_of_a_head_says_whom_it_reads(name):
    trace = EXAMPLES[name].trace()
    wanted = (trace["weights"] @ np.arange(trace["x"].shape[0])).T
    np.testing.assert_allclose(trace["output"], wanted, rtol=1e-12)


def test_one_embedding_of_bank_has_two_outputs():
    trace = EXAMPLES["bank"].trace()
    bank = {name: trace[name][1] for name in trace if trace[name].ndim and len(trace[name]) > 1}
    np.testing.assert_array_equal(bank["x[loan]"], bank["x[river]"])
    for context, at, output in (("loan", 4, [1, 1, 0, 0]), ("river", 4, [1, 0, 1, 0])):
        assert bank[f"weights[{context}]"][at] > 0.999
        np.testing.assert_allclose(bank[f"added[{context}]"], output, atol=1e-3)
        others = [0, 2, 3, 4, 5]
        x, added = trace[f"x[{context}]"], trace[f"added[{context}]"]
        np.testing.assert_allclose(added[others], x[others], atol=1e-3)


def test_bank_learns_nothing_from_a_word_that_it_does_not_see():
    trace = EXAMPLES["bank"].trace(is_causal=True)
    np.testing.assert_array_equal(trace["added[loan]"][1], trace["x[loan]"][1])
    assert not any(s.note and "'bank' reads" in s.note for s in trace.steps)


@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_changes_nothing_that_is_read(is_causal):
    trace = EXAMPLES["padding"].trace(is_causal=is_causal)
    assert not trace["weights"][1, :, 3:].any()
    assert (trace["weights"][0, -1] > 0).all()
    for name in ("weights", "output"):
        together = trace[name][1, :3, : trace[f"{name}[alone]"].shape[1]]
        np.testing.assert_allclose(together, trace[f"{name}[alone]"], rtol=1e-12)
    long, short = (step for step in trace.steps if step.name == "weights")
    assert long.columns == ("The", "quick", "brown", "fox", "jumps")
    assert short.rows == short.columns == ("The", "cat", "sat", "<pad>", "<pad>")


def test_every_french_word_finds_its_english_one():
    trace = translation.EXAMPLE.trace()
    np.testing.assert_allclose(trace["weights[cross]"], np.eye(5), atol=0.01)
    found = trace["output[cross]"]
    np.testing.assert_allclose(found[2, :5], [0, 0, 0, 0, 1], atol=0.01)  # trains, the verb
    step = next(step for step in trace.steps if step.name == "weights[cross]")
    assert (step.rows, step.columns) == (translation.FRENCH, translation.ENGLISH)
    written = render.plain(render.text(trace.selected(cell="entraîne,trains"), 3, None, "blocks"))
    assert "weights[cross]: A[entraîne,trains] = 1 / 1.003 = 0.997" in written


def test_the_encoder_finds_the_verb_and_what_follows_it():
    trace = translation.EXAMPLE.trace()
    before, after = trace["x[encoder]"], trace["added[encoder]"]
    assert before[2, 3:5].tolist() == [0.5, 0.5]
    np.testing.assert_allclose(after[2, 3:5], [0, 1], atol=0.01)
    np.testing.assert_allclose(after[:, translation.AFTER], [0, 0, 1, 1, 1], atol=0.01)
    np.testing.assert_array_equal(trace["context[cross]"], after)
    np.testing.assert_array_equal(trace["x[cross]"], trace["added[decoder]"])


def test_the_decoder_expects_an_article_a_noun_or_a_verb_and_does_not_know_which():
    article, noun, verb = [1, 0, 0, 0, 0], [0, 1 / 3, 1 / 3, 1 / 3, 0], [0, 0, 0, 0, 1]
    wanted = [article, noun, verb, article, noun]
    trace = translation.EXAMPLE.trace()
    for name in ("added[decoder]", "probabilities[decoder]"):
        np.testing.assert_allclose(trace[name][:, :5], wanted, atol=0.01)


def words(probabilities):
    return [translation.VOCABULARY[n] for n in probabilities.argmax(-1)]


RIGHT = ["le", "garçon", "entraîne", "le", "chiot"]


@pytest.mark.parametrize("is_scaled", [True, False])
def test_written_word_by_word_it_is_what_the_whole_pass_says(is_scaled):
    trace = translation.EXAMPLE.trace(is_scaled=is_scaled)
    assert words(trace["probabilities[cross]"]) == RIGHT
    scale = None if is_scaled else 1.0
    assert translation.write(trace["added[encoder]"], scale, lambda name, value: value) == RIGHT
    for n in range(5):
        for name in ("x", "q", "scores", "weights"):
            alone, whole = trace[f"{name}[cross, step {n + 1}]"], trace[f"{name}[cross]"]
            np.testing.assert_allclose(alone[0], whole[n], rtol=1e-9, atol=1e-12)


def test_without_position_the_articles_are_alike():
    """What aligns them is what self-attention found: without it both are read alike."""
    english = translation.embeddings(translation.IN_ENGLISH)
    _, A = translation.cross()(english, english, return_weights=True)
    assert A[0, 0, 0] == A[0, 0, 3] == A[0, 3, 0]


def test_without_the_mask_the_whole_pass_takes_the_second_half_for_the_first():
    """The verb is seen before it is written, so that both nouns are taken for the object."""
    trace = translation.EXAMPLE.trace()
    assert not np.triu(trace["weights[decoder]"], 1).any()
    free = translation.EXAMPLE.trace(is_causal=False)
    assert np.triu(free["weights[decoder]"][0], 1).max() > 0.9
    assert words(free["probabilities[cross]"]) == ["le", "chiot", "entraîne", "le", "chiot"]


def test_without_shift_or_mask_the_answer_is_copied_and_no_english_is_read():
    trace = translation.EXAMPLE.trace()
    assert words(trace["probabilities[unshifted]"]) == RIGHT
    assert words(trace["probabilities[unmasked]"])[:4] == RIGHT[:4]
    assert words(trace["probabilities[unmasked]"])[4] != RIGHT[4]  # nothing is ahead of it
    np.testing.assert_allclose(trace["weights[unmasked]"][:4, 1:], np.eye(4), atol=0.01)


def test_gpt2_s_fused_matrix_holds_those_of_both_heads():
    trace = models.GPT2.trace()
    np.testing.assert_array_equal(trace["x"], trace["wte"] + trace["wpe"])
    fused = trace["normed"] @ trace["c_attn"] + trace["c_attn_bias"]
    for n, name in enumerate("qkv"):
        for head in (0, 1):
            columns = 4 * n + 2 * head + np.arange(2)
            np.testing.assert_allclose(trace[name][head], fused[:, columns], rtol=1e-12)
    assert not np.triu(trace["weights"], 1).any()


def test_llama_turns_queries_and_keys_and_shares_keys():
    trace = models.LLAMA.trace()
    rope, at = RoPE(4), [0, 1, 2]
    np.testing.assert_allclose(trace["q_rotated"], rope.rotate(trace["q"], at), rtol=1e-12)
    np.testing.assert_allclose(trace["k_rotated"], rope.rotate(trace["k"], at), rtol=1e-12)
    wanted = trace["q_rotated"] @ trace["k_rotated"].T
    np.testing.assert_allclose(trace["scores"], wanted, rtol=1e-12)


def layer_norm(x, gain, bias, epsilon):
    return [
        [g * (a - fmean(row)) / (pvariance(row) + epsilon) ** 0.5 + b
         for a, g, b in zip(row, gain, bias, strict=True)]
        for row in x.tolist()
    ]  # fmt: skip


def gelu(x):
    return [[a * NormalDist().cdf(a) for a in row] for row in x.tolist()]


@pytest.mark.parametrize("prefix", ["", "added_"])
def test_gpt2_normalises_before_attention_and_before_the_feed_forward(prefix):
    t = models.GPT2.trace()
    source = t[prefix[:-1] or "x"]
    wanted = layer_norm(source, t[f"{prefix}norm_gain"], t[f"{prefix}norm_bias"], 1e-5)
    np.testing.assert_allclose(t[f"{prefix}normed"], wanted, rtol=1e-12)


def test_gpt2_adds_what_attention_and_the_feed_forward_found():
    t = models.GPT2.trace()
    np.testing.assert_array_equal(t["added"], t["x"] + t["output"])
    inner = t["added_normed"] @ t["W_in"] + t["b_in"]
    np.testing.assert_allclose(t["activated"], gelu(inner), atol=5e-4)  # by tanh: nearly
    wanted = t["added"] + t["activated"] @ t["W_out"] + t["b_out"]
    np.testing.assert_allclose(t["residual"], wanted, rtol=1e-12)


@pytest.mark.parametrize("prefix", ["", "added_"])
def test_llama_divides_by_the_root_mean_square(prefix):
    t = models.LLAMA.trace()
    x, gain = t[prefix[:-1] or "x"].tolist(), t[f"{prefix}norm_gain"]
    wanted = [np.array(row) / (fmean(a * a for a in row) + 1e-5) ** 0.5 * gain for row in x]
    np.testing.assert_allclose(t[f"{prefix}normed"], wanted, rtol=1e-12)


def test_llama_gates_its_feed_forward():
    t = models.LLAMA.trace()
    gate = t["added_normed"] @ t["W_gate"]
    inner = gate / (1 + np.exp(-gate)) * (t["added_normed"] @ t["W_in"])
    wanted = t["x"] + t["output"] + inner @ t["W_out"]
    np.testing.assert_allclose(t["residual"], wanted, rtol=1e-12)


def test_bert_sees_every_token_and_normalises_what_was_added():
    t = models.BERT.trace()
    assert (t["weights"] > 0).all()
    for prefix, source in (
        ("embedded_", t["wte"] + t["wpe"]),
        ("added_", t["x"] + t["output"]),
        ("post_residual_", t["added_normed"] + t["feed_forward"]),
    ):
        wanted = layer_norm(source, t[f"{prefix}norm_gain"], t[f"{prefix}norm_bias"], 1e-12)
        np.testing.assert_allclose(t[f"{prefix}normed"], wanted, rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(t["x"], t["embedded_normed"])
    np.testing.assert_allclose(t["activated"], gelu(t["expanded"]), rtol=1e-12, atol=1e-12)


def test_a_sentence_attends_to_another():
    trace = sentences.sentence(["le", "chiot"], context=["the", "small", "puppy"]).trace()
    np.testing.assert_array_equal(trace["k"], trace["context"] @ trace["W_k"])
    assert trace["weights"].shape == (2, 2, 3)
    step = next(step for step in trace.steps if step.name == "weights")
    assert (step.rows, step.columns) == (("le", "chiot"), ("the", "small", "puppy"))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"context": []}, "the sentence to attend to has no tokens"),
        (
            {"rope": True, "num_heads": 4},
            "d-model is 4 and heads is 4: rotary positions rotate pairs",
        ),
    ],
)
def test_a_rotation_or_another_sentence_that_cannot_be(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        sentences.sentence(["a", "b"], **settings)


def test_two_sentences_have_no_causal_mask():
    with pytest.raises(ValueError, match="no meaning between two sentences"):
        sentences.sentence(["a"], context=["b"]).trace(is_causal=True)


def test_cosine_and_dot_product_side_by_side():
    trace = EXAMPLES["cosine"].trace()
    root = 1 / np.sqrt(2)
    wanted = [[1, root, 0], [0, root, 1], [root, 1, root]]
    np.testing.assert_allclose(trace["cosine[cosine]"], wanted, atol=1e-15)
    np.testing.assert_array_equal(trace["scores[dot]"], EXAMPLES["given-qkv"].trace()["scores"])
    lengths = trace["q_length"] * trace["k_length"].T
    np.testing.assert_allclose(trace["angle"], [[0, 45, 90], [90, 45, 0], [45, 0, 45]])
    cosines = np.cos(np.radians(trace["angle"]))
    np.testing.assert_allclose(lengths * cosines, trace["scores[dot]"], atol=1e-15)


def test_a_small_network_scores_document_004():
    trace = EXAMPLES["additive"].trace()
    q, k = trace["q"], trace["k"]
    wanted = [[np.tanh(a + b).sum() for b in k] for a in q]
    np.testing.assert_allclose(trace["energies"], wanted, rtol=1e-12)
    with pytest.raises(ValueError, match="no product of vectors to divide"):
        EXAMPLES["additive"].trace(is_scaled=True)
