"""What each traced name means. The equations only name their steps; the words are here.

``formula`` is for a terminal, ``tex`` for a page. A name may have a stage in brackets: a block,
``S[i=0,j=1]``, or a word where a step is computed several times, ``q[encoder]``. Its entry is that
of the name before the bracket.

``made`` is an operation, which ``origins`` computes, and the steps that it takes. ``a|b`` is the
first of these that the trace has; ``b?`` may be missing; ``m<`` is the m of the block before;
``a|b*`` is the latest of these before, of any stage. Without ``made`` the numbers are given.
"""

import re
from typing import NamedTuple


class Entry(NamedTuple):
    """Symbol, axes, formula (plain and TeX), one sentence, source and making of a traced name."""

    symbol: str
    tex_symbol: str
    axes: tuple[str, ...]
    formula: str
    tex: str
    sentence: str
    source: str
    made: tuple[str, ...] = ()


VASWANI = "Vaswani et al. 2017, section 3.2"
FLASH2 = "Dao 2023 (FlashAttention-2), Algorithm 1"
QK_NORM = "Henry et al. 2020; Zhang and Sennrich 2019 (RMSNorm)"
GATED = "Qiu et al. 2025 (gated attention)"
ROFORMER = "Su et al. 2021 (RoFormer), equation 34"
BAHDANAU = "Bahdanau, Cho and Bengio 2015, appendix A.1.2"
UNIT = "Henry et al. 2020; Liu et al. 2022 (Swin Transformer V2), section 3.3"
GPT2 = "Radford et al. 2019 (GPT-2)"
BA = "Ba, Kiros and Hinton 2016 (layer normalisation), equation 4"
MLA = "DeepSeek-AI 2024 (DeepSeek-V2), section 2.1"
MPT = "MosaicML NLP Team 2023 (MPT-7B)"
RMS = "Zhang and Sennrich 2019 (RMSNorm), equation 4"
SHAZEER = "Vaswani et al. 2017, section 3.3; gated: Shazeer 2020 (GLU variants)"
GEMMA2 = "Gemma Team 2024 (Gemma 2), section 2"
SCORES = ("B", "H", "Lq", "Lk")
ROWS = ("B", "H", "Lq", "1")
QUERIES = "q_rotated|q_clipped|q_layer_normed|q_normed|q"
KEYS = "k_rotated|k_clipped|k_layer_normed|k_normed|k"
RAW = "scaled|scaled_cosine|cosine|energies|scores"
STREAM = "embedded|embedded_normed|output|added|residual*"  # what a layer passes on to the next
FINAL = f"masked|modified|biased|capped|{RAW}"  # what the softmax gets
AXES = {
    "B": "batch entries",
    "L": "tokens",
    "Lq": "queries",
    "Lk": "keys",
    "Lc": "tokens of the other sequence",
    "E": "model width",
    "H": "heads",
    "Hkv": "key/value heads",
    "D": "head width (d_k in the papers)",
    "Dv": "width of a value",
    "R": "rotated width",
    "A": "width of the hidden layer",
    "F": "width inside the feed-forward",
    "V": "tokens of the vocabulary",
    "C": "width of a latent",
    "C+R": "width of a latent and a rotated key",
    "B_r": "queries of a block",
    "B_c": "keys of a block",
}
ROTATED = "(x_1 cos - x_2 sin, x_2 cos + x_1 sin), pair by pair"
TEX_ROTATED = r"(x_1 \cos - x_2 \sin,\; x_2 \cos + x_1 \sin) \text{, pair by pair}"

CATALOGUE: dict[str, Entry] = {
    "x": Entry("X", "X", ("B", "L", "E"), "X", "X",
        "One row per token: its embedding.", "Vaswani et al. 2017, section 3.4",
        made=("rows", STREAM)),
    "context": Entry("X_enc", r"X_{\mathrm{enc}}", ("B", "Lc", "E"), "X_enc", r"X_{\mathrm{enc}}",
        "One row per token of the other sequence, to which this one attends.",
        "Vaswani et al. 2017, section 3.2.3",
        made=("rows", STREAM)),
    "wte": Entry("wte", r"\mathrm{wte}", ("L", "E"), "wte", r"\mathrm{wte}",
        "Word token embeddings: one row per token, whatever its position.", GPT2),
    "wpe": Entry("wpe", r"\mathrm{wpe}", ("L", "E"), "wpe", r"\mathrm{wpe}",
        "Word position embeddings: one row per position, whatever the token is.", GPT2),
    "c_attn": Entry("c_attn", r"c_{\mathrm{attn}}", ("E", "3E"), "c_attn = [W_q, W_k, W_v]",
        r"c_{\mathrm{attn}} = [W_q, W_k, W_v]",
        "Three matrices side by side, so that one product gives Q, K and V.", GPT2),
    "c_attn_bias": Entry("b_attn", r"b_{\mathrm{attn}}", ("3E",), "b_attn = [b_q, b_k, b_v]",
        r"b_{\mathrm{attn}} = [b_q, b_k, b_v]",
        "Their biases, side by side too.", GPT2),
    "W_q": Entry("W_q", "W_q", ("H", "E", "D"), "W_q", "W_q",
        "Turns an embedding into a query: what the token looks for.", VASWANI,
        made=("columns", "c_attn")),
    "W_k": Entry("W_k", "W_k", ("Hkv", "E", "D"), "W_k", "W_k",
        "Turns an embedding into a key: what the token offers.", VASWANI,
        made=("columns", "c_attn")),
    "W_v": Entry("W_v", "W_v", ("Hkv", "E", "Dv"), "W_v", "W_v",
        "Turns an embedding into a value: what the token passes on.", VASWANI,
        made=("columns", "c_attn")),
    "b_q": Entry("b_q", "b_q", ("H", "D"), "b_q", "b_q",
        "Added to every query.", VASWANI,
        made=("columns", "c_attn_bias")),
    "b_k": Entry("b_k", "b_k", ("Hkv", "D"), "b_k", "b_k",
        "Added to every key.", VASWANI,
        made=("columns", "c_attn_bias")),
    "b_v": Entry("b_v", "b_v", ("Hkv", "Dv"), "b_v", "b_v",
        "Added to every value.", VASWANI,
        made=("columns", "c_attn_bias")),
    "q_combined": Entry("Q", "Q", ("B", "L", "H·D"),
        "[Q of head 0, Q of head 1, …] = X W_q", r"[Q_0, Q_1, \ldots] = X W_q",
        "The queries of all heads side by side, one product, which is split: from H·D numbers "
        "per token to H heads of D.", VASWANI,
        made=("products", "normed|x", "W_q", "b_q?")),
    "k_combined": Entry("K", "K", ("B", "L", "Hkv·D"),
        "[K of head 0, K of head 1, …] = X W_k", r"[K_0, K_1, \ldots] = X W_k",
        "The keys of all heads side by side, one product, which is split: from Hkv·D numbers "
        "per token to Hkv heads of D.", VASWANI,
        made=("products", "context|normed|x", "W_k", "b_k?")),
    "v_combined": Entry("V", "V", ("B", "L", "Hkv·Dv"),
        "[V of head 0, V of head 1, …] = X W_v", r"[V_0, V_1, \ldots] = X W_v",
        "The values of all heads side by side, one product, which is split: from Hkv·Dv numbers "
        "per token to Hkv heads of Dv.", VASWANI,
        made=("products", "context|normed|x", "W_v", "b_v?")),
    "q": Entry("Q", "Q", ("B", "H", "Lq", "D"), "Q = X W_q", r"Q = X W_q",
        "One query per row.", VASWANI,
        made=("product", "normed|x", "W_q", "b_q?")),
    "k": Entry("K", "K", ("B", "Hkv", "Lk", "D"), "K = X W_k", r"K = X W_k",
        "One key per row.", VASWANI,
        made=("product", "context|normed|x", "W_k", "b_k?")),
    "v": Entry("V", "V", ("B", "Hkv", "Lk", "Dv"), "V = X W_v", r"V = X W_v",
        "One value per row.", VASWANI,
        made=("product", "context|normed|x", "W_v", "b_v?")),
    "scores": Entry("S", "S", SCORES, "S = Q Kᵀ", r"S = Q K^\top",
        "How well each key (column) matches each query (row): their dot product.", VASWANI,
        made=("dot", QUERIES, KEYS)),
    "sqrt_d_k": Entry("√D", r"\sqrt{D}", (), "√D", r"\sqrt{D}",
        "What the scores are divided by: the square root of the head width.", VASWANI),
    "scaled": Entry("S", "S", SCORES, "S ← S · scale, 1/√D unless given",
        r"S \leftarrow S \cdot \mathrm{scale},\quad \mathrm{scale} = 1/\sqrt{D}"
        r"\text{ unless given}",
        "Keeps the scores in one range whatever the head width is.", VASWANI,
        made=("scale", "scores")),
    "softcap": Entry("c", "c", (), "c", "c",
        "The cap of the scores.", "Gemma Team 2024 (Gemma 2), section 2"),
    "capped": Entry("S", "S", SCORES, "S ← c · tanh(S / c)", r"S \leftarrow c \tanh(S / c)",
        "No score leaves the range from -c to c.", "Gemma Team 2024 (Gemma 2), section 2",
        made=("cap", RAW, "softcap")),
    "attn_bias": Entry("b", "b", SCORES, "b", "b",
        "The bias that was given, to which ALiBi's is added.",
        "Press et al. 2022 (ALiBi), section 3"),
    "slopes": Entry("slope", r"\mathrm{slope}", ("H",), "slope", r"\mathrm{slope}",
        "How much a score of this head falls from one position to the next.",
        "Press et al. 2022 (ALiBi), section 3"),
    "distances": Entry("d", "d", SCORES, "d_ij = |i + q_offset - j|",
        r"d_{ij} = |i + q_{\mathrm{offset}} - j|",
        "How many positions each key (column) is away from each query (row).",
        "Press et al. 2022 (ALiBi), section 3"),
    "bias": Entry("bias", r"\mathrm{bias}", SCORES,
        "bias_ij = the given bias - slope · |i + q_offset - j|",
        r"\mathrm{bias}_{ij} = \text{the given bias } - \mathrm{slope} \cdot"
        r" |i + q_{\mathrm{offset}} - j|",
        "What is known about each pair beforehand: a given bias, ALiBi's distance, or both.",
        "Press et al. 2022 (ALiBi), section 3",
        made=("alibi", "slopes", "distances", "attn_bias?")),
    "biased": Entry("S", "S", SCORES, "S ← S + bias", r"S \leftarrow S + \mathrm{bias}",
        "Adds what is known about each pair beforehand.",
        "Press et al. 2022 (ALiBi), section 3",
        made=("sum", f"capped|{RAW}", "bias")),
    "modified": Entry("S", "S", SCORES, "S_ij ← score_mod(S_ij, b, h, i, j)",
        r"S_{ij} \leftarrow \mathrm{mod}(S_{ij}, b, h, i, j)",
        "What a function makes of each score, for head h of batch entry b, the query at position i "
        "and key j.", "Dong et al. 2024 (Flex Attention), section 3"),
    "masked": Entry("S", "S", SCORES, "S_ij ← S_ij if query i may see key j, else -∞",
        r"S_{ij} \leftarrow S_{ij} \text{ if query } i \text{ may see key } j"
        r"\text{, else } -\infty",
        "A hidden key scores -∞, so its weight will be exactly 0.", VASWANI,
        made=("mask", f"modified|biased|capped|{RAW}")),
    "sinks": Entry("sink", r"\mathrm{sink}", ("H",), "sink", r"\mathrm{sink}",
        "One more score for every row of this head, which takes its share and passes nothing on.",
        "Xiao et al. 2024 (attention sinks)"),
    "row_max": Entry("m", "m", ROWS, "m_i = max_j S_ij", r"m_i = \max_j S_{ij}",
        "The largest score of each row. It is subtracted before exp, so that nothing overflows; "
        "the weights stay the same.", VASWANI,
        made=("row max", FINAL, "sinks?")),
    "exponentials": Entry("P", "P", SCORES, "P_ij = exp(S_ij - m_i)", r"P_{ij} = e^{S_{ij} - m_i}",
        "A larger score counts exponentially more; a hidden key, with score -∞, not at all.",
        VASWANI, made=("exp", FINAL, "row_max")),
    "row_sum": Entry("l", r"\ell", ROWS, "l_i = Σ_j P_ij", r"\ell_i = \sum_j P_{ij}",
        "The softmax denominator of each row.", VASWANI,
        made=("total", "exponentials", "sinks?", "row_max")),
    "weights": Entry("A", "A", SCORES, "A = softmax(S), row by row: A_ij = P_ij / l_i",
        r"A = \mathrm{softmax}(S),\quad A_{ij} = P_{ij} / \ell_i",
        "What share of its attention each query (row) gives to each key (column).", VASWANI,
        made=("share", "exponentials", "row_sum")),
    "head_output": Entry("O", "O", ("B", "H", "Lq", "Dv"), "O = A V", r"O = A V",
        "Each row is the sum of the values, weighted by that row of A.", VASWANI,
        made=("product", "weights", "v_clipped|v")),
    "concat": Entry("C", "C", ("B", "L", "H·Dv"), "C = [O of head 0, O of head 1, …]",
        r"C = [O_0, O_1, \ldots]",
        "The heads' outputs side by side.", VASWANI,
        made=("concat", "head_output")),
    "W_o": Entry("W_o", "W_o", ("H·Dv", "E"), "W_o", "W_o",
        "Mixes what the heads found.", VASWANI),
    "b_o": Entry("b_o", "b_o", ("E",), "b_o", "b_o",
        "Added to every row at the end.", VASWANI),
    "g_q": Entry("g_q", "g_q", ("D",), "g_q", "g_q",
        "The gain of each entry of a normalised query.", QK_NORM),
    "g_k": Entry("g_k", "g_k", ("D",), "g_k", "g_k",
        "The gain of each entry of a normalised key.", QK_NORM),
    "q_normed": Entry("Q", "Q", ("B", "H", "Lq", "D"), "Q ← g_q · Q / rms(Q), row by row",
        r"Q \leftarrow g_q \cdot Q / \mathrm{rms}(Q)",
        "All queries have the same length now, so that no score grows with it.", QK_NORM,
        made=("rms", "q", "g_q")),
    "k_normed": Entry("K", "K", ("B", "Hkv", "Lk", "D"), "K ← g_k · K / rms(K), row by row",
        r"K \leftarrow g_k \cdot K / \mathrm{rms}(K)",
        "All keys have the same length now, so that no score grows with it.", QK_NORM,
        made=("rms", "k", "g_k")),
    "gains_q": Entry("g_q", "g_q", ("H", "1", "D"), "g_q", "g_q",
        "The gain of each entry of a normalised query, head by head.", BA),
    "s_q": Entry("s_q", "s_q", ("H", "1", "D"), "s_q", "s_q",
        "What is added to each entry of a normalised query.", BA),
    "q_layer_normed": Entry("Q", "Q", ("B", "H", "Lq", "D"),
        "Q ← g_q · (Q - mean(Q)) / std(Q) + s_q, row by row",
        r"Q \leftarrow g_q \cdot (Q - \mathrm{mean}(Q)) / \mathrm{std}(Q) + s_q",
        "All queries have one mean and one length now, before gain and shift.", BA),
    "gains_k": Entry("g_k", "g_k", ("Hkv", "1", "D"), "g_k", "g_k",
        "The gain of each entry of a normalised key, head by head.", BA),
    "s_k": Entry("s_k", "s_k", ("Hkv", "1", "D"), "s_k", "s_k",
        "What is added to each entry of a normalised key.", BA),
    "k_layer_normed": Entry("K", "K", ("B", "Hkv", "Lk", "D"),
        "K ← g_k · (K - mean(K)) / std(K) + s_k, row by row",
        r"K \leftarrow g_k \cdot (K - \mathrm{mean}(K)) / \mathrm{std}(K) + s_k",
        "All keys have one mean and one length now, before gain and shift.", BA),
    "q_clipped": Entry("Q", "Q", ("B", "H", "Lq", "D"), "Q ← Q clipped to -c … c",
        r"Q \leftarrow \min(\max(Q, -c), c)",
        "No number is beyond the limit.", MPT),
    "k_clipped": Entry("K", "K", ("B", "Hkv", "Lk", "D"), "K ← K clipped to -c … c",
        r"K \leftarrow \min(\max(K, -c), c)",
        "No number is beyond the limit.", MPT),
    "v_clipped": Entry("V", "V", ("B", "Hkv", "Lk", "Dv"), "V ← V clipped to -c … c",
        r"V \leftarrow \min(\max(V, -c), c)",
        "No number is beyond the limit.", MPT),
    "latents_and_key": Entry("[c, k_R]", "[c, k_R]", ("B", "L", "C+R"), "c = norm(X W_dkv)",
        r"c = \mathrm{norm}(X W_{dkv})",
        "A latent and a rotated key for each token: what a cache keeps.", MLA),
    "latents": Entry("C", "C", ("B", "1", "Lk", "C"), "C = norm(X W_dkv)",
        r"C = \mathrm{norm}(X W_{dkv})",
        "One latent per token, which all heads share.", MLA),
    "q_absorbed": Entry("Q", "Q", ("B", "H", "Lq", "C+R"), "Q ← Q W_ukᵀ",
        r"Q \leftarrow Q W_{uk}^\top",
        "Queries that meet latents themselves instead of keys made from them.", MLA),
    "mean_latents": Entry("A C", "A C", ("B", "H", "Lq", "C"), "A C", r"A C",
        "For each query, the mean of the latents with its weights; values are made from it.", MLA),
    "W_g": Entry("W_g", "W_g", ("E", "H·Dv"), "W_g", "W_g",
        "Turns an embedding into what its gates are made from.", GATED),
    "b_g": Entry("b_g", "b_g", ("H·Dv",), "b_g", "b_g",
        "Added before the sigmoid.", GATED),
    "gate": Entry("G", "G", ("B", "L", "H·Dv"), "G = sigmoid(X W_g)", r"G = \sigma(X W_g)",
        "How much of each number may pass, from 0 to 1.", GATED,
        made=("sigmoid", "normed|x", "W_g", "b_g?")),
    "gated": Entry("C", "C", ("B", "L", "H·Dv"), "C ← C · G, entry by entry",
        r"C \leftarrow C \odot G",
        "What the gates let through of the heads' outputs.", GATED,
        made=("times", "concat", "gate")),
    "projected": Entry("Y", "Y", ("B", "L", "E"), "Y = C W_o", r"Y = C W_o",
        "One row per token, as wide as the embedding again.", VASWANI,
        made=("product", "gated|concat", "W_o", "b_o?")),
    "output": Entry("O", "O", ("B", "H", "Lq", "Dv"), "O = A V", r"O = A V",
        "Each row is the sum of the values, weighted by that row of A.", VASWANI,
        made=("product", "weights", "v_clipped|v")),
    "added": Entry("Z", "Z", ("B", "L", "E"), "Z = X + Y", r"Z = X + Y",
        "The residual connection: what the token was, and what it found.",
        "Vaswani et al. 2017, section 3.1",
        made=("sum", "x", "output_normed|output")),
    "embedded": Entry("X", "X", ("L", "E"), "X = the tokens' rows, and what says where they are",
        r"X = \text{the tokens' rows, and what says where they are}",
        "One row per token: what enters the first layer.", "Vaswani et al. 2017, section 3.4",
        made=("sum", "wte", "wpe")),
    "W_in": Entry("W_in", r"W_{\mathrm{in}}", ("E", "F"), "W_in", r"W_{\mathrm{in}}",
        "Widens each row for the feed-forward.", SHAZEER),
    "b_in": Entry("b_in", r"b_{\mathrm{in}}", ("F",), "b_in", r"b_{\mathrm{in}}",
        "Added to every wide row.", SHAZEER),
    "W_gate": Entry("W_gate", r"W_{\mathrm{gate}}", ("E", "F"), "W_gate", r"W_{\mathrm{gate}}",
        "Makes what the feed-forward's gates are computed from.", SHAZEER),
    "b_gate": Entry("b_gate", r"b_{\mathrm{gate}}", ("F",), "b_gate", r"b_{\mathrm{gate}}",
        "Added before the activation.", SHAZEER),
    "W_out": Entry("W_out", r"W_{\mathrm{out}}", ("F", "E"), "W_out", r"W_{\mathrm{out}}",
        "Narrows each row to the model width again.", SHAZEER),
    "b_out": Entry("b_out", r"b_{\mathrm{out}}", ("E",), "b_out", r"b_{\mathrm{out}}",
        "Added to every row at the end.", SHAZEER),
    "expanded": Entry("U", "U", ("B", "L", "F"), "U = Z' W_in, + b_in where given",
        r"U = Z' W_{\mathrm{in}} \text{, } + b_{\mathrm{in}} \text{ where given}",
        "The wide row of each token, which no other token has a part in.", SHAZEER,
        made=("product", "added_normed|added", "W_in", "b_in?")),
    "gate_input": Entry("G", "G", ("B", "L", "F"), "G = Z' W_gate, + b_gate where given",
        r"G = Z' W_{\mathrm{gate}} \text{, } + b_{\mathrm{gate}} \text{ where given}",
        "What decides how much of each number passes.", SHAZEER,
        made=("product", "added_normed|added", "W_gate", "b_gate?")),
    "activated": Entry("Φ", r"\Phi", ("B", "L", "F"), "Φ = φ(U), φ(G) where it is gated",
        r"\Phi = \varphi(U) \text{, } \varphi(G) \text{ where it is gated}",
        "The activation φ (ReLU, GELU, SiLU), number by number: negative ones nearly vanish.",
        SHAZEER, made=("activation", "gate_input|expanded")),
    "gated_product": Entry("U", "U", ("B", "L", "F"), "U ← Φ · U, entry by entry",
        r"U \leftarrow \Phi \odot U",
        "What the gates let through.", "Shazeer 2020 (GLU variants)",
        made=("times", "activated", "expanded")),
    "feed_forward": Entry("F", "F", ("B", "L", "E"),
        "F = Φ W_out, U W_out where it is gated, + b_out where given",
        r"F = \Phi W_{\mathrm{out}} \text{, } U W_{\mathrm{out}} \text{ where it is gated, }"
        r" + b_{\mathrm{out}} \text{ where given}",
        "What each token makes by itself of what attention brought it.", SHAZEER,
        made=("product", "gated_product|activated", "W_out", "b_out?")),
    "residual": Entry("X", "X", ("B", "L", "E"), "X ← Z + F", r"X \leftarrow Z + F",
        "What leaves the layer, and enters the next one: all that was found so far.",
        "Vaswani et al. 2017, section 3.1",
        made=("sum", "added", "feed_forward_normed|feed_forward")),
    "post_residual": Entry("R", "R", ("B", "L", "E"), "R = Z' + F", "R = Z' + F",
        "The second residual connection, which starts from what was normalised.",
        "Vaswani et al. 2017, section 3.1",
        made=("sum", "added_normed", "feed_forward")),
    "W_vocab": Entry("W_vocab", r"W_{\mathrm{vocab}}", ("E", "V"), "W_vocab",
        r"W_{\mathrm{vocab}}",
        "One column per token of the vocabulary; if it is tied, the embedding's rows.",
        "Press and Wolf 2017 (tied embeddings)"),
    "uncapped_logits": Entry("logits", r"\mathrm{logits}", ("B", "L", "V"), "logits = X' W_vocab",
        r"\mathrm{logits} = X' W_{\mathrm{vocab}}",
        "The scores before they are capped.", GEMMA2,
        made=("product", "final_normed", "W_vocab")),
    "logit_softcap": Entry("c", "c", (), "c", "c",
        "The cap of the logits.", GEMMA2),
    "capped_logits": Entry("logits", r"\mathrm{logits}", ("B", "L", "V"),
        "logits ← c · tanh(logits / c)",
        r"\mathrm{logits} \leftarrow c \tanh(\mathrm{logits} / c)",
        "How well each token of the vocabulary (column) would follow each token (row), from -c to "
        "c.", GEMMA2,
        made=("cap", "uncapped_logits", "logit_softcap")),
    "logits": Entry("logits", r"\mathrm{logits}", ("B", "L", "V"), "logits = X' W_vocab",
        r"\mathrm{logits} = X' W_{\mathrm{vocab}}",
        "How well each token of the vocabulary (column) would follow each token (row).",
        "Vaswani et al. 2017, section 3.4",
        made=("product", "final_normed|added|output|x", "W_vocab")),
    "probabilities": Entry("p", "p", ("B", "L", "V"), "p = softmax(logits), row by row",
        r"p = \mathrm{softmax}(\mathrm{logits})",
        "How probable each token of the vocabulary (column) is after each token (row).",
        "Vaswani et al. 2017, section 3.4",
        made=("softmax", "logits")),
    "normalised": Entry("O", "O", ("B", "H", "Lq", "Dv"), "O_i ← O_i / l_i, for every block i",
        r"O_i \leftarrow O_i / \ell_i",
        "Each row of blocks, divided by its softmax denominator at the end.", f"{FLASH2}, line 12",
        made=("normalise", "O", "l")),
    "skipped": Entry("skipped", r"\text{skipped}", ("blocks", "i, j"),
        "(i, j) of blocks never loaded", r"(i, j) \text{ of blocks never loaded}",
        "In these blocks no query may see a key, so they are never loaded.", FLASH2),
    "lse": Entry("L", "L", ("B", "H", "Lq"), "L_i = log Σ_j exp(S_ij)",
        r"L_i = \log \sum_j \exp S_{ij}",
        "The logarithm of each row's softmax denominator, its sink included.", FLASH2,
        made=("lse", "row_max", "row_sum")),
    "cos": Entry("cos", r"\cos", ("B", "L", "R/2"), "cos(m θ_i), for position m and pair i",
        r"\cos(m \theta_i)",
        "One row per position, one column per pair: the first pair rotates fastest. A scaling may "
        "change the angles, and multiply cos and sin by one factor.", ROFORMER),
    "sin": Entry("sin", r"\sin", ("B", "L", "R/2"), "sin(m θ_i), for position m and pair i",
        r"\sin(m \theta_i)",
        "The sines of the same angles.", ROFORMER),
    "rotated": Entry("X", "X", ("B", "H", "L", "D"), f"X ← {ROTATED}",
        rf"X \leftarrow {TEX_ROTATED}",
        "Each pair of numbers is rotated by the angle of its position.", ROFORMER),
    "q_rotated": Entry("Q", "Q", ("B", "H", "Lq", "D"), f"Q ← {ROTATED}",
        rf"Q \leftarrow {TEX_ROTATED}",
        "Each pair of numbers in a query is rotated by the angle of its position.", ROFORMER,
        made=("rotated", QUERIES.partition("|")[2], "cos[q]", "sin[q]")),
    "k_rotated": Entry("K", "K", ("B", "Hkv", "Lk", "D"), f"K ← {ROTATED}",
        rf"K \leftarrow {TEX_ROTATED}",
        "Keys are rotated as queries are, so a score depends on how far apart two tokens are, not "
        "on where they are.", ROFORMER,
        made=("rotated", KEYS.partition("|")[2], "cos[k]", "sin[k]")),
    "W_q_hidden": Entry("W_q", "W_q", ("D", "A"), "W_q", "W_q",
        "Maps a query to the hidden layer, in which it meets the keys.", BAHDANAU),
    "W_k_hidden": Entry("W_k", "W_k", ("D", "A"), "W_k", "W_k",
        "Maps a key to the same hidden layer.", BAHDANAU),
    "q_hidden": Entry("Q_h", "Q_h", ("B", "H", "Lq", "A"), "Q_h = Q W_q", "Q_h = Q W_q",
        "What each query contributes to the hidden layer of all its pairs.", BAHDANAU,
        made=("product", "q", "W_q_hidden")),
    "k_hidden": Entry("K_h", "K_h", ("B", "Hkv", "Lk", "A"), "K_h = K W_k", "K_h = K W_k",
        "What each key contributes to it.", BAHDANAU,
        made=("product", "k", "W_k_hidden")),
    "b_hidden": Entry("b", "b", ("A",), "b", "b",
        "Added to the hidden layer of every pair.", BAHDANAU),
    "hidden": Entry("Z", "Z", ("B", "H", "Lq·Lk", "A"),
        "Z_ij = tanh(Q_h,i + K_h,j), + b inside where given",
        r"Z_{ij} = \tanh(Q_{h,i} + K_{h,j})\text{, } + b \text{ inside where given}",
        "One row per pair: the first query with each key, then the next query. The sum gives the "
        "attention its name.", BAHDANAU,
        made=("tanh", "q_hidden", "k_hidden", "b_hidden?")),
    "w": Entry("w", "w", ("A",), "w", "w",
        "How much each hidden number counts in the score.", BAHDANAU),
    "energies": Entry("S", "S", SCORES, "S_ij = w · Z_ij", r"S_{ij} = w \cdot Z_{ij}",
        "How well each key (column) matches each query (row), as a small network judges it.",
        BAHDANAU,
        made=("pairs", "hidden", "w", "k_hidden")),
    "energies_ij": Entry("S_ij", "S_{ij}", ("B", "H", "B_r", "B_c"),
        "S_ij = a block of S, biased and masked as requested",
        r"S_{ij} = \text{a block of } S \text{, biased and masked as requested}",
        "A block of the scores that the network gave.", f"{FLASH2}, line 8"),
    "q_unit": Entry("Q", "Q", ("B", "H", "Lq", "D"), "Q_i ← Q_i / |Q_i|",
        r"Q_i \leftarrow Q_i / \|Q_i\|",
        "Every query has length 1 now; a query of zeros stays as it is.", UNIT,
        made=("unit", "q")),
    "k_unit": Entry("K", "K", ("B", "Hkv", "Lk", "D"), "K_j ← K_j / |K_j|",
        r"K_j \leftarrow K_j / \|K_j\|",
        "So has every key, and their dot product is the cosine of an angle.", UNIT,
        made=("unit", "k")),
    "scaled_cosine": Entry("S", "S", SCORES, "S_ij = scale · cos_ij",
        r"S_{ij} = \mathrm{scale} \cdot \cos_{ij}",
        "Between -1 and 1 a softmax is nearly uniform; a learned scale widens the range.", UNIT,
        made=("scale", "cosine")),
    "cosine": Entry("cos", r"\cos", SCORES, "cos_ij = Q_i · K_j / (|Q_i| |K_j|)",
        r"\cos_{ij} = \frac{Q_i \cdot K_j}{\|Q_i\| \|K_j\|}",
        "The dot product with the vectors' lengths divided out: 1 where both point the same way, "
        "0 at right angles, -1 where they are opposite.",
        "document 004, section 'Dot Product vs Cosine Similarity'",
        made=("cosine", "q", "k")),
    "head_width": Entry("d_k", "d_k", (), "d_k = d_model / h", r"d_k = d_{\mathrm{model}} / h",
        "The width of each head, where d_model = 512 is divided among h = 8 heads.", VASWANI),
    "x_shape": Entry("shape of X", r"\text{shape of } X", ("axes",), "(B, L, d_model)",
        r"(B, L, d_{\mathrm{model}})",
        "A batch of 2 sequences of 10 tokens of width 512.", VASWANI),
    "q_shape": Entry("shape of Q", r"\text{shape of } Q", ("axes",), "(B, h, L, d_k)",
        "(B, h, L, d_k)",
        "Each head has queries of its own; K and V have this shape too.", VASWANI),
    "weights_shape": Entry("shape of A", r"\text{shape of } A", ("axes",), "(B, h, L, L)",
        "(B, h, L, L)",
        "One L × L matrix of weights for each head.", VASWANI),
    "concat_shape": Entry("shape of C", r"\text{shape of } C", ("axes",), "(B, L, h·d_k)",
        r"(B, L, h \cdot d_k)",
        "The heads side by side are as wide as the model again.", VASWANI),
    "output_shape": Entry("shape of Y", r"\text{shape of } Y", ("axes",), "(B, L, d_model)",
        r"(B, L, d_{\mathrm{model}})",
        "What comes out has the shape of what went in.", VASWANI),
    "d_model": Entry("d_model", r"d_{\mathrm{model}}", ("model",), "d_model", r"d_{\mathrm{model}}",
        "The model width.", "the models' papers"),
    "num_heads": Entry("h", "h", ("model",), "h", "h",
        "The number of heads.", "the models' papers"),
    "d_k": Entry("d_k", "d_k", ("model",), "d_k = d_model / h", r"d_k = d_{\mathrm{model}} / h",
        "The width of each head.", VASWANI),
    "illustration": Entry("picture", r"\text{picture}", ("head", "entry"), "no formula",
        r"\text{no formula}",
        "Numbers that a picture shows.", ""),
    "difference": Entry("difference", r"\text{difference}", (), "max |O naive - O tiled|",
        r"\max |O_{\mathrm{naive}} - O_{\mathrm{tiled}}|",
        "Both ways end in the same output, up to the last bits of the arithmetic.", FLASH2),
    "kept": Entry("numbers kept", r"\text{numbers kept}", (), "numbers kept",
        r"\text{numbers kept}",
        "How many numbers are held at once between the inputs and the output.", FLASH2),
    "Q": Entry("Q_i", "Q_i", ("B", "H", "B_r", "D"), "load Q_i", r"\text{load } Q_i",
        "A block of queries, loaded once.", f"{FLASH2}, line 4"),
    "K": Entry("K_j", "K_j", ("B", "Hkv", "B_c", "D"), "load K_j", r"\text{load } K_j",
        "The next block of keys.", f"{FLASH2}, line 7"),
    "V": Entry("V_j", "V_j", ("B", "Hkv", "B_c", "Dv"), "load V_j", r"\text{load } V_j",
        "The values of those keys.", f"{FLASH2}, line 7"),
    "S": Entry("S_ij", "S_{ij}", ("B", "H", "B_r", "B_c"),
        "S_ij = scale · Q_i K_jᵀ, capped, biased, masked as requested",
        r"S_{ij} = \mathrm{scale} \cdot Q_i K_j^\top \text{, capped, biased, masked as requested}",
        "The scores of this block alone; the next block overwrites them.", f"{FLASH2}, line 8",
        made=("block", "Q", "K")),
    "m": Entry("m_i", "m_i", ("B", "H", "B_r", "1"), "m_i ← max(m_i, rowmax S_ij)",
        r"m_i \leftarrow \max(m_i, \mathrm{rowmax} S_{ij})",
        "The largest score of each row so far.", f"{FLASH2}, line 9",
        made=("running max", "S|energies_ij", "m<?")),
    "P": Entry("P_ij", "P_{ij}", ("B", "H", "B_r", "B_c"), "P_ij = exp(S_ij - m_i)",
        r"P_{ij} = e^{S_{ij} - m_i}",
        "The exponentials of this block, relative to the maximum so far.", f"{FLASH2}, line 9",
        made=("exp", "S|energies_ij", "m")),
    "factor": Entry("α_i", r"\alpha_i", ("B", "H", "B_r", "1"), "α_i = exp(m_old - m_i)",
        r"\alpha_i = e^{m_{\mathrm{old}} - m_i}",
        "What has been summed relative to the old maximum, times this, is relative to the new one.",
        f"{FLASH2}, lines 9 and 10",
        made=("decay", "m", "m<?")),
    "l": Entry("l_i", r"\ell_i", ("B", "H", "B_r", "1"),
        "l_i ← α_i l_i + rowsum P_ij",
        r"\ell_i \leftarrow \alpha_i \ell_i + \mathrm{rowsum} P_{ij}",
        "The softmax denominator so far, relative to that maximum.", f"{FLASH2}, line 9",
        made=("running sum", "P", "factor", "l<?")),
    "O": Entry("O_i", "O_i", ("B", "H", "B_r", "Dv"),
        "O_i ← α_i O_i + P_ij V_j",
        r"O_i \leftarrow \alpha_i O_i + P_{ij} V_j",
        "The output so far, still to be divided by l_i.",
        f"{FLASH2}, line 10, without its misprinted inverse",
        made=("running product", "P", "V", "factor", "O<?")),
}  # fmt: skip


def _of_norm(prefix: str, letter: str, step: str, what: str) -> dict[str, Entry]:
    """The steps of the normalisation of ``step``, whose names begin with ``prefix``."""
    gain, bias, mean, variance, square = (
        f"{prefix}{name}" for name in ("norm_gain", "norm_bias", "mean", "variance", "mean_square")
    )
    normed, rows, each = f"{letter}'", ("B", "L", "E"), ("B", "L", "1")
    return {
        gain: Entry("g", "g", ("E",), "g", "g", f"The gain of each entry of {what}.", BA),
        bias: Entry("b", "b", ("E",), "b", "b", "Added after the normalisation.", BA),
        mean: Entry("μ", r"\mu", each, f"μ = mean of {letter}, row by row",
            rf"\mu = \mathrm{{mean}}({letter})", f"The mean of each row of {what}.", BA,
            made=("mean", step)),
        variance: Entry("σ²", r"\sigma^2", each, f"σ² = mean of ({letter} - μ)², row by row",
            rf"\sigma^2 = \mathrm{{mean}}(({letter} - \mu)^2)",
            "How far its numbers are spread around that mean.", BA,
            made=("mean square", step, mean)),
        square: Entry("s", "s", each, f"s = mean of {letter}², row by row",
            rf"s = \mathrm{{mean}}({letter}^2)", f"How large the numbers of {what} are.", RMS,
            made=("mean square", step)),
        f"{prefix}normed": Entry(normed, normed, rows,
            f"{normed} = g · ({letter} - μ) / √(σ² + ε) + b",
            rf"{normed} = g \cdot \frac{{{letter} - \mu}}{{\sqrt{{\sigma^2 + \varepsilon}}}} + b",
            f"Every row of {what} has one mean and one size now, before gain and bias.", BA,
            made=("norm", step, variance, gain, mean, bias)),
        f"{prefix}rms_normed": Entry(normed, normed, rows, f"{normed} = g · {letter} / √(s + ε)",
            rf"{normed} = g \cdot \frac{{{letter}}}{{\sqrt{{s + \varepsilon}}}}",
            f"Every row of {what} has one size now, before the gain.", RMS,
            made=("norm", step, square, gain)),
    }  # fmt: skip


CATALOGUE |= (
    _of_norm("", "X", "x", "what enters the layer")
    | _of_norm("output_", "Y", "output", "what attention found")
    | _of_norm("added_", "Z", "added", "the residual stream")
    | _of_norm("embedded_", "X", "embedded", "the embeddings")
    | _of_norm("post_residual_", "R", "post_residual", "what leaves the feed-forward")
    | _of_norm("feed_forward_", "F", "feed_forward", "what the feed-forward made")
    | _of_norm("final_", "X", "embedded|residual*", "what leaves the last layer")
)


def base_of(name: str) -> str:
    """Return the name without its bracket: ``S`` for ``S[i=0,j=1]``."""
    return name.partition("[")[0]


def beside(name: str, base: str) -> str:
    """Return the step ``base`` of the same stage: ``x[encoder]`` beside ``q[encoder]``."""
    return base + name[len(base_of(name)) :]


def entry(name: str) -> Entry:
    """Return the entry of a traced name; a name that is not in the catalogue stands for itself.

    >>> entry("S[i=0,j=1]").symbol
    'S_ij'
    """
    base = base_of(name)
    tex = rf"\text{{{re.sub('[^0-9A-Za-z]+', ' ', base)}}}"
    return CATALOGUE.get(base) or Entry(base, tex, (), base, tex, "", "")
