"""The catalogue: symbol, formula and explanation of each *step*, a named array in a trace.

``Entry.formula`` is for terminals, ``Entry.tex`` for pages. A step's name may end with a *stage* in
brackets: a block, ``S[i=0,j=1]``, or a word if the step is computed several times, ``q[encoder]``.
The entry belongs to the name before the bracket.

``Entry.made`` has an operation of ``origins`` and the names of its operands. ``a|b`` is the first
of these steps that the trace has. ``b?`` may be missing. ``m<`` is the m of the nearest earlier
block. ``a|b*`` is the latest earlier step with one of these names, of any stage. A step without
``made`` is an input; of one that is made by ``FORMULA``, the formula alone says how.
"""

import re

from minimha.explain.around import AROUND, EMBEDDINGS, GEMMA2, RESIDUAL
from minimha.explain.entry import FORMULA, Entry
from minimha.explain.entry import formula as _formula
from minimha.explain.entry import symbol as _symbol
from minimha.explain.inside import DELTA_NET, DSA, INSIDE, MLA

VASWANI = "Vaswani et al. 2017, section 3.2"
FLASH2 = "Dao 2023 (FlashAttention-2), Algorithm 1"
QK_NORM = "Henry et al. 2020; Zhang and Sennrich 2019 (RMSNorm)"
GATED = "Qiu et al. 2025 (gated attention)"
ROFORMER = "Su et al. 2021 (RoFormer), equation 34"
BAHDANAU = "Bahdanau, Cho and Bengio 2015, appendix A.1.2"
UNIT = "Henry et al. 2020; Liu et al. 2022 (Swin Transformer V2), section 3.3"
DOT = "document 004, section 'Geometric intuition for the dot product'"
GPT2 = "Radford et al. 2019 (GPT-2)"
BA = "Ba, Kiros and Hinton 2016 (layer normalisation), equation 4"
MPT = "MosaicML NLP Team 2023 (MPT-7B)"
RMS = "Zhang and Sennrich 2019 (RMSNorm), equation 4"
ALIBI = "Press et al. 2022 (ALiBi), section 3"
DELTA = "Yang, Kautz and Hatamizadeh 2024 (Gated DeltaNet), equation 10"
SCORES = ("B", "H", "Lq", "Lk")
ROWS = ("B", "H", "Lq", "1")
QUERIES = "q_rotated|q_clipped|q_layer_normed|q_normed|q"
KEYS = "k_rotated|k_clipped|k_layer_normed|k_normed|k"
RAW = "scaled|scaled_cosine|cosine|energies|scores"
STREAM = "embedded|embedded_normed|output|added|residual*"  # the output of a layer
FINAL = f"masked|modified|biased|capped|{RAW}"  # the input of the softmax
AXES = {
    "B": "batch entries",
    "L": "tokens",
    "Lq": "queries",
    "Lk": "keys",
    "Lc": "tokens of the other sequence",
    "E": "model width",
    "H": "heads",
    "Hkv": "key/value heads",
    "Hi": "heads of the indexer",
    "Di": "width of the indexer's heads",
    "K": "keys that a query picks",
    "D": "head width (d_k in the papers)",
    "Dv": "width of a value",
    "R": "rotated width",
    "A": "width of the hidden layer",
    "F": "width inside the feed-forward",
    "N": "experts",
    "n": "tokens that an expert receives",
    "G": "groups of experts",
    "V": "tokens of the vocabulary",
    "C": "width of a latent",
    "Cq": "width of a query's latent",
    "C+R": "width of a latent and a rotated key",
    "B_r": "queries of a block",
    "B_c": "keys of a block",
}
ROTATED = "(x_1 cos - x_2 sin, x_2 cos + x_1 sin), pair by pair"
TEX_ROTATED = r"(x_1 \cos - x_2 \sin,\; x_2 \cos + x_1 \sin) \text{, pair by pair}"


CATALOGUE: dict[str, Entry] = {
    "x": _symbol("X", ("B", "L", "E"),
        "One row per token: its embedding.", EMBEDDINGS, made=("rows", STREAM)),
    "context": _symbol("X_enc", ("B", "Lc", "E"),
        "One row per token of the other sequence, to which this one attends.",
        "Vaswani et al. 2017, section 3.2.3", made=("rows", STREAM),
        tex_symbol=r"X_{\mathrm{enc}}"),
    "wte": _symbol("wte", ("L", "E"),
        "Word token embeddings: one row per token, whatever its position.", GPT2,
        tex_symbol=r"\mathrm{wte}"),
    "wpe": _symbol("wpe", ("L", "E"),
        "Word position embeddings: one row per position, whatever the token is.", GPT2,
        tex_symbol=r"\mathrm{wpe}"),
    "c_attn": _formula("c_attn", ("E", "3E"), "c_attn = [W_q, W_k, W_v]",
        "Three matrices side by side, so that one product gives Q, K and V.", GPT2,
        tex_symbol=r"c_{\mathrm{attn}}", tex=r"c_{\mathrm{attn}} = [W_q, W_k, W_v]"),
    "c_attn_bias": _formula("b_attn", ("3E",), "b_attn = [b_q, b_k, b_v]",
        "The biases of Q, K and V, side by side.", GPT2, tex_symbol=r"b_{\mathrm{attn}}",
        tex=r"b_{\mathrm{attn}} = [b_q, b_k, b_v]"),
    "scores": _formula("S", SCORES, "S = Q Kᵀ",
        "How well each key (column) matches each query (row): their dot product.", VASWANI,
        made=("dot", QUERIES, KEYS), tex=r"S = Q K^\top"),
    "sqrt_d_k": _symbol("√D", (),
        "What the scores are divided by: the square root of the head width.", VASWANI,
        tex_symbol=r"\sqrt{D}"),
    "scaled": _formula("S", SCORES, "S ← S · scale, 1/√D unless given",
        "Keeps the scores in one range whatever the head width is.", VASWANI,
        made=("scale", "scores"),
        tex=r"S \leftarrow S \cdot \mathrm{scale},\quad \mathrm{scale} = 1/\sqrt{D}"
        r"\text{ unless given}"),
    "softcap": _symbol("c", (), "The cap of the scores.", GEMMA2),
    "capped": _formula("S", SCORES, "S ← c · tanh(S / c)",
        "No score leaves the range from -c to c.", GEMMA2, made=("cap", RAW, "softcap"),
        tex=r"S \leftarrow c \tanh(S / c)"),
    "attn_bias": _symbol("b", SCORES, "The bias that was given, to which ALiBi's is added.", ALIBI),
    "slopes": _symbol("slope", ("H",),
        "How much a score of this head falls from one position to the next.", ALIBI,
        tex_symbol=r"\mathrm{slope}"),
    "distances": _formula("d", SCORES, "d_ij = |i + q_offset - j|",
        "How many positions each key (column) is away from each query (row).", ALIBI,
        tex=r"d_{ij} = |i + q_{\mathrm{offset}} - j|"),
    "bias": _formula("bias", SCORES, "bias_ij = the given bias - slope · |i + q_offset - j|",
        "A number added to each pair's score: a given bias, ALiBi's distance, or both.", ALIBI,
        made=("alibi", "slopes", "distances", "attn_bias?"), tex_symbol=r"\mathrm{bias}",
        tex=r"\mathrm{bias}_{ij} = \text{the given bias } - \mathrm{slope} \cdot"
        r" |i + q_{\mathrm{offset}} - j|"),
    "biased": _formula("S", SCORES, "S ← S + bias",
        "Adds the bias of each pair to its score.", ALIBI,
        made=("sum", f"capped|{RAW}", "bias"), tex=r"S \leftarrow S + \mathrm{bias}"),
    "modified": _formula("S", SCORES, "S_ij ← score_mod(S_ij, b, h, i, j)",
        "What a function makes of each score, for head h of batch entry b, the query at position i "
        "and key j.", "Dong et al. 2024 (Flex Attention), section 3",
        tex=r"S_{ij} \leftarrow \mathrm{mod}(S_{ij}, b, h, i, j)"),
    "index_queries": _formula("Q_I", ("B", "H", "Lq", "Di"), "Q_I = C_q W_iq, rotated",
        "What each query looks for when it picks keys, for each head of the indexer.", DSA,
        made=("rotated", "index_up", "cos", "sin"),
        tex=r"Q_I = C_q W_{iq} \text{, rotated}"),
    "index_keys": _formula("K_I", ("B", "Lk", "Di"), "K_I = norm(X W_ik), rotated",
        "One key per token, which all heads of the indexer share.", DSA,
        made=("rotated", "index_down_normed", "cos", "sin"),
        tex=r"K_I = \mathrm{norm}(X W_{ik}) \text{, rotated}"),
    "index_weights": _formula("w", ("B", "Lq", "Hi"), "w = X W_iw / √Hi",
        "How much each head of the indexer (column) counts for each query (row).", DSA,
        tex=r"w = X W_{iw} / \sqrt{H_i}", made=FORMULA),
    "index_products": _formula("Q_I·K_I", ("B", "H", "Lq", "Lk"), "Q_I K_Iᵀ / √Di",
        "How well each key (column) matches each query (row), for one head of the indexer.", DSA,
        made=("block", "index_queries", "index_keys"), tex=r"Q_I K_I^\top / \sqrt{D_i}"),
    "index_relu": _formula("relu", ("B", "H", "Lq", "Lk"), "max(Q_I K_Iᵀ / √Di, 0)",
        "A key that does not match counts 0, however bad the match is.", DSA,
        made=("activation", "index_products"), tex_symbol=r"\mathrm{relu}",
        tex=r"\max(Q_I K_I^\top / \sqrt{D_i}, 0)"),
    "index_scores": _formula("I", ("B", "Lq", "Lk"), "I_ij = Σ_h w_ih · relu_h,ij",
        "How much each query (row) wants each key (column): the heads of the indexer, weighted.",
        DSA, tex=r"I_{ij} = \sum_h w_{ih} \cdot \mathrm{relu}_{h,ij}", made=FORMULA),
    "index_visible": _formula("I", ("B", "Lq", "Lk"),
        "I_ij ← I_ij if query i may see key j, else -∞",
        "No query picks a key that it may not see.", DSA, made=("mask", "index_scores"),
        tex=r"I_{ij} \leftarrow I_{ij} \text{ if query } i \text{ may see key } j"
        r"\text{, else } -\infty"),
    "key_indices": _formula("J_i", ("B", "Hkv", "Lq", "K"), "J_i = the K largest I_ij of query i",
        "The keys that each query (row) picks, best first. Of equal scores the earlier key wins; "
        "-1 is none.", DSA, made=FORMULA,
        tex=r"J_i = \text{the } K \text{ largest } I_{ij} \text{ of query } i"),
    "picked": _formula("J", ("B", "Hkv", "Lq", "Lk"), "J_ij = 1 if query i picks key j, else 0",
        "Which keys (columns) each query (row) picks. It sees no others.", DSA,
        tex=r"J_{ij} = 1 \text{ if query } i \text{ picks key } j \text{, else } 0", made=FORMULA),
    "masked": _formula("S", SCORES, "S_ij ← S_ij if query i may see key j, else -∞",
        "A hidden key scores -∞, so its weight will be exactly 0.", VASWANI,
        made=("mask", f"modified|biased|capped|{RAW}"),
        tex=r"S_{ij} \leftarrow S_{ij} \text{ if query } i \text{ may see key } j"
        r"\text{, else } -\infty"),
    "sinks": _symbol("sink", ("H",),
        "One extra score for every row of this head. It takes a share, but has no value.",
        "Xiao et al. 2024 (attention sinks)", tex_symbol=r"\mathrm{sink}"),
    "row_max": _formula("m", ROWS, "m_i = max_j S_ij",
        "The largest score of each row. It is subtracted before exp, so that nothing overflows; "
        "the weights stay the same.", VASWANI, made=("row max", FINAL, "sinks?"),
        tex=r"m_i = \max_j S_{ij}"),
    "exponentials": _formula("P", SCORES, "P_ij = exp(S_ij - m_i)",
        "A larger score counts exponentially more; a hidden key, with score -∞, not at all.",
        VASWANI, made=("exp", FINAL, "row_max"), tex=r"P_{ij} = e^{S_{ij} - m_i}"),
    "row_sum": _formula("l", ROWS, "l_i = Σ_j P_ij",
        "The softmax denominator of each row.", VASWANI,
        made=("total", "exponentials", "sinks?", "row_max"), tex_symbol=r"\ell",
        tex=r"\ell_i = \sum_j P_{ij}"),
    "weights": _formula("A", SCORES, "A = softmax(S), row by row: A_ij = P_ij / l_i",
        "What share of its attention each query (row) gives to each key (column).", VASWANI,
        made=("share", "exponentials", "row_sum"),
        tex=r"A = \mathrm{softmax}(S),\quad A_{ij} = P_{ij} / \ell_i"),
    "head_output": _formula("O", ("B", "H", "Lq", "Dv"), "O = A V",
        "Each row is the sum of the values, weighted by that row of A.", VASWANI,
        made=("product", "weights", "v_clipped|v")),
    "concat": _formula("C", ("B", "L", "H·Dv"), "C = [O of head 0, O of head 1, …]",
        "The heads' outputs side by side.", VASWANI, made=("concat", "head_output"),
        tex=r"C = [O_0, O_1, \ldots]"),
    "W_o": _symbol("W_o", ("H·Dv", "E"), "Mixes what the heads found.", VASWANI),
    "b_o": _symbol("b_o", ("E",), "Added to every row at the end.", VASWANI),
    "latents_and_key": _formula("[c, k_R]", ("B", "L", "C+R"), "c = norm(X W_dkv)",
        "A latent and a rotated key for each token: what a cache keeps.", MLA,
        tex=r"c = \mathrm{norm}(X W_{dkv})", made=FORMULA),
    "latents": _formula("C", ("B", "1", "Lk", "C"), "C = norm(X W_dkv)",
        "One latent per token, which all heads share.", MLA, tex=r"C = \mathrm{norm}(X W_{dkv})"),
    "latent_q": _formula("Q", ("B", "H", "Lq", "D"), "Q = [X W, rotated X W_R]",
        "One query per row. Its last numbers alone are rotated by the angles of its position.", MLA,
        tex=r"Q = [X W, \text{rotated } X W_R]", made=FORMULA),
    "latent_k": _formula("K", ("B", "H", "Lk", "D"), "K = [c W_uk, k_R]",
        "One key per row, made from the latent; all heads share its rotated end.", MLA,
        tex=r"K = [c W_{uk}, k_R]", made=FORMULA),
    "latent_v": _formula("V", ("B", "H", "Lk", "Dv"), "V = c W_uv",
        "One value per row, made from the latent.", MLA, made=("product", "kv_down_normed", "W_uv"),
        tex=r"V = c W_{uv}"),
    "q_absorbed": _formula("Q", ("B", "H", "Lq", "C+R"), "Q ← Q W_ukᵀ",
        "Queries for the latents themselves, instead of for keys made from them.", MLA,
        tex=r"Q \leftarrow Q W_{uk}^\top"),
    "mean_latents": _symbol("A C", ("B", "H", "Lq", "C"),
        "For each query, the latents weighted by its row of A; values are made from it.", MLA),
    "qkv": _formula("[Q, K, V]", ("B", "L", "channels"), "[Q, K, V] = X W_qkv",
        "Queries, keys and values of all heads, before each channel is mixed over time.", DELTA_NET,
        made=("product", "normed|x", "W_qkv"), tex=r"[Q, K, V] = X W_{qkv}"),
    "convolved": _formula("[Q, K, V]", ("B", "L", "channels"), "[Q, K, V] ← silu(conv([Q, K, V]))",
        "Each channel, mixed with the same channel of the tokens just before.", DELTA_NET,
        tex=r"[Q, K, V] \leftarrow \mathrm{silu}(\mathrm{conv}([Q, K, V]))", made=FORMULA),
    "g": _formula("g", ("B", "L", "heads"), "g = -exp(A_log) · log(1 + exp(X W_a + dt_bias))",
        "The logarithm of the decay: 0 keeps all that a head remembers.", DELTA_NET,
        tex=r"g = -e^{A_{\log}} \log(1 + e^{X W_a + b_{dt}})", made=FORMULA),
    "delta_q": _symbol("Q", ("B", "H", "L", "D"),
        "What each token asks the memory, of length 1/√D.", DELTA, made=FORMULA),
    "delta_k": _symbol("K", ("B", "H", "L", "D"),
        "Under which key each token is stored, of length 1.", DELTA, made=FORMULA),
    "delta_v": _symbol("V", ("B", "H", "L", "Dv"), "What is stored for each token.", DELTA,
        made=FORMULA),
    "beta": _symbol("β", ("B", "H", "L", "1"),
        "What part of the error each token corrects.", DELTA,
        made=("sigmoid", "normed|x", "W_b"), tex_symbol=r"\beta"),
    "decay": _formula("α", ("B", "H", "L", "1"), "α = exp(g)",
        "What part of the memory is kept, from 0 to 1.", DELTA, tex_symbol=r"\alpha",
        tex=r"\alpha = e^g", made=FORMULA),
    "decayed": _formula("S", ("B", "H", "D", "Dv"), "S ← α_t S",
        "The memory when token t comes, before it is corrected.", DELTA,
        tex=r"S \leftarrow \alpha_t S", made=FORMULA),
    "correction": _formula("u", ("B", "H", "1", "Dv"), "u = β_t (v_t - Sᵀ k_t)",
        "What is added under the key of token t: a part of what the memory has wrong.", DELTA,
        tex=r"u = \beta_t (v_t - S^\top k_t)", made=FORMULA),
    "state": _formula("S", ("B", "H", "D", "Dv"), "S ← S + k_t uᵀ",
        "The memory after token t: one row per number of a key.", DELTA,
        tex=r"S \leftarrow S + k_t u^\top", made=FORMULA),
    "delta_head_output": _formula("O", ("B", "H", "L", "Dv"), "o_t = Sᵀ q_t",
        "What the memory answers each token's query.", DELTA, made=FORMULA,
        tex=r"o_t = S^\top q_t"),
    "delta_gate": _formula("Z", ("B", "L", "H·Dv"), "Z = X W_z",
        "The input of the gates of the heads' outputs.", DELTA_NET,
        made=("product", "normed|x", "W_z")),
    "delta_gated": _formula("C", ("B", "L", "H·Dv"), "C = norm(O) · silu(Z)",
        "The normalised answers of all heads side by side, as far as the gates let them through.",
        DELTA_NET, tex=r"C = \mathrm{norm}(O) \odot \mathrm{silu}(Z)", made=FORMULA),
    "delta_output": _formula("Y", ("B", "L", "E"), "Y = C W_o",
        "One row per token, as wide as the embedding again.", DELTA_NET,
        made=("product", "delta_gated", "W_o")),
    "W_g": _symbol("W_g", ("E", "H·Dv"),
        "Turns an embedding into the input of its gates.", GATED),
    "b_g": _symbol("b_g", ("H·Dv",), "Added before the sigmoid.", GATED),
    "gate": _formula("G", ("B", "L", "H·Dv"), "G = sigmoid(X W_g)",
        "How much of each number may pass, from 0 to 1.", GATED,
        made=("sigmoid", "normed|x", "W_g", "b_g?"), tex=r"G = \sigma(X W_g)"),
    "gated": _formula("C", ("B", "L", "H·Dv"), "C ← C · G, entry by entry",
        "What the gates let through of the heads' outputs.", GATED,
        made=("times", "concat", "gate"), tex=r"C \leftarrow C \odot G"),
    "projected": _formula("Y", ("B", "L", "E"), "Y = C W_o",
        "One row per token, as wide as the embedding again.", VASWANI,
        made=("product", "gated|concat", "W_o", "b_o?")),
    "added": _formula("Z", ("B", "L", "E"), "Z = X + Y",
        "The residual connection: what the token was, and what it found.", RESIDUAL,
        made=("sum", "x", "output_normed|output")),
    "embedded": _formula("X", ("L", "E"), "X = the tokens' rows, and what says where they are",
        "One row per token: what enters the first layer.", EMBEDDINGS, made=("sum", "wte", "wpe"),
        tex=r"X = \text{the tokens' rows, and what says where they are}"),
    "normalised": _formula("O", ("B", "H", "Lq", "Dv"), "O_i ← O_i / l_i, for every block i",
        "Each row of blocks, divided by its softmax denominator at the end.", f"{FLASH2}, line 12",
        made=("normalise", "O", "l"), tex=r"O_i \leftarrow O_i / \ell_i"),
    "skipped": _formula("skipped", ("blocks", "i, j"), "(i, j) of blocks never loaded",
        "In these blocks no query may see a key, so they are never loaded.", FLASH2,
        tex_symbol=r"\text{skipped}", tex=r"(i, j) \text{ of blocks never loaded}"),
    "lse": _formula("L", ("B", "H", "Lq"), "L_i = log Σ_j exp(S_ij)",
        "The logarithm of each row's softmax denominator, its sink included.", FLASH2,
        made=("lse", "row_max", "row_sum"), tex=r"L_i = \log \sum_j \exp S_{ij}"),
    "cos": _formula("cos", ("B", "L", "R/2"), "cos(m θ_i), for position m and pair i",
        "One row per position, one column per pair: the first pair rotates fastest. A scaling may "
        "change the angles, and multiply cos and sin by one factor.", ROFORMER, tex_symbol=r"\cos",
        tex=r"\cos(m \theta_i)"),
    "sin": _formula("sin", ("B", "L", "R/2"), "sin(m θ_i), for position m and pair i",
        "The sines of the same angles.", ROFORMER, tex_symbol=r"\sin", tex=r"\sin(m \theta_i)"),
    "rotated": _formula("X", ("B", "H", "L", "D"), f"X ← {ROTATED}",
        "Each pair of numbers is rotated by the angle of its position.", ROFORMER,
        tex=rf"X \leftarrow {TEX_ROTATED}"),
    "q_rotated": _formula("Q", ("B", "H", "Lq", "D"), f"Q ← {ROTATED}",
        "Each pair of numbers in a query is rotated by the angle of its position.", ROFORMER,
        made=("rotated", QUERIES.partition("|")[2], "cos[q]", "sin[q]"),
        tex=rf"Q \leftarrow {TEX_ROTATED}"),
    "k_rotated": _formula("K", ("B", "Hkv", "Lk", "D"), f"K ← {ROTATED}",
        "Keys are rotated as queries are, so a score depends on how far apart two tokens are, not "
        "on where they are.", ROFORMER,
        made=("rotated", KEYS.partition("|")[2], "cos[k]", "sin[k]"),
        tex=rf"K \leftarrow {TEX_ROTATED}"),
    "W_q_hidden": _symbol("W_q", ("D", "A"),
        "Maps a query to the hidden layer, in which it meets the keys.", BAHDANAU),
    "W_k_hidden": _symbol("W_k", ("D", "A"), "Maps a key to the same hidden layer.", BAHDANAU),
    "q_hidden": _formula("Q_h", ("B", "H", "Lq", "A"), "Q_h = Q W_q",
        "What each query contributes to the hidden layer of all its pairs.", BAHDANAU,
        made=("product", "q", "W_q_hidden")),
    "k_hidden": _formula("K_h", ("B", "Hkv", "Lk", "A"), "K_h = K W_k",
        "What each key contributes to the hidden layer of all its pairs.", BAHDANAU,
        made=("product", "k", "W_k_hidden")),
    "b_hidden": _symbol("b", ("A",), "Added to the hidden layer of every pair.", BAHDANAU),
    "hidden": _formula("Z", ("B", "H", "Lq·Lk", "A"),
        "Z_ij = tanh(Q_h,i + K_h,j), + b inside where given",
        "One row per pair: the first query with each key, then the next query. The sum gives the "
        "attention its name.", BAHDANAU, made=("tanh", "q_hidden", "k_hidden", "b_hidden?"),
        tex=r"Z_{ij} = \tanh(Q_{h,i} + K_{h,j})\text{, } + b \text{ inside where given}"),
    "w": _symbol("w", ("A",), "How much each hidden number counts in the score.", BAHDANAU),
    "energies": _formula("S", SCORES, "S_ij = w · Z_ij",
        "How well each key (column) matches each query (row), as a small network judges it.",
        BAHDANAU, made=("pairs", "hidden", "w", "k_hidden"), tex=r"S_{ij} = w \cdot Z_{ij}"),
    "energies_ij": _formula("S_ij", ("B", "H", "B_r", "B_c"),
        "S_ij = a block of S, biased and masked as requested",
        "A block of the scores that the network gave.", f"{FLASH2}, line 8", tex_symbol="S_{ij}",
        tex=r"S_{ij} = \text{a block of } S \text{, biased and masked as requested}"),
    "q_unit": _formula("Q", ("B", "H", "Lq", "D"), "Q_i ← Q_i / |Q_i|",
        "Every query has length 1 now; a query of zeros stays as it is.", UNIT, made=("unit", "q"),
        tex=r"Q_i \leftarrow Q_i / \|Q_i\|"),
    "k_unit": _formula("K", ("B", "Hkv", "Lk", "D"), "K_j ← K_j / |K_j|",
        "Every key has length 1 now, and a dot product is the cosine of an angle.", UNIT,
        made=("unit", "k"), tex=r"K_j \leftarrow K_j / \|K_j\|"),
    "scaled_cosine": _formula("S", SCORES, "S_ij = scale · cos_ij",
        "Between -1 and 1 a softmax is nearly uniform; a learned scale widens the range.", UNIT,
        made=("scale", "cosine"), tex=r"S_{ij} = \mathrm{scale} \cdot \cos_{ij}"),
    "cosine": _formula("cos", SCORES, "cos_ij = Q_i · K_j / (|Q_i| |K_j|)",
        "The dot product with the vectors' lengths divided out: 1 where both point the same way, "
        "0 at right angles, -1 where they are opposite.",
        "document 004, section 'Dot Product vs Cosine Similarity'", made=("cosine", "q", "k"),
        tex_symbol=r"\cos", tex=r"\cos_{ij} = \frac{Q_i \cdot K_j}{\|Q_i\| \|K_j\|}"),
    "q_length": _formula("|Q|", ("B", "H", "Lq", "1"), "|Q_i| = √(Σ_d Q_id²)",
        "The length of each query.", DOT, tex_symbol=r"\|Q\|",
        tex=r"\|Q_i\| = \sqrt{\sum_d Q_{id}^2}"),
    "k_length": _formula("|K|", ("B", "Hkv", "Lk", "1"), "|K_j| = √(Σ_d K_jd²)",
        "The length of each key.", DOT, tex_symbol=r"\|K\|",
        tex=r"\|K_j\| = \sqrt{\sum_d K_{jd}^2}"),
    "angle": _formula("θ", SCORES, "θ_ij = arccos(Q_i · K_j / (|Q_i| |K_j|)), in °",
        "The angle between each query and each key: Q_i · K_j = |Q_i| |K_j| cos θ_ij.", DOT,
        tex_symbol=r"\theta", tex=r"\theta_{ij} = \arccos \frac{Q_i \cdot K_j}{\|Q_i\| \|K_j\|}"),
    "head_width": _formula("d_k", (), "d_k = d_model / h",
        "The width of each head, where d_model = 512 is divided among h = 8 heads.", VASWANI,
        tex=r"d_k = d_{\mathrm{model}} / h"),
    "x_shape": _formula("shape of X", ("axes",), "(B, L, d_model)",
        "A batch of 2 sequences of 10 tokens of width 512.", VASWANI,
        tex_symbol=r"\text{shape of } X", tex=r"(B, L, d_{\mathrm{model}})"),
    "q_shape": _formula("shape of Q", ("axes",), "(B, h, L, d_k)",
        "Each head has separate queries; K and V have this shape too.", VASWANI,
        tex_symbol=r"\text{shape of } Q"),
    "weights_shape": _formula("shape of A", ("axes",), "(B, h, L, L)",
        "One L × L matrix of weights for each head.", VASWANI, tex_symbol=r"\text{shape of } A"),
    "concat_shape": _formula("shape of C", ("axes",), "(B, L, h·d_k)",
        "The heads side by side are as wide as the model again.", VASWANI,
        tex_symbol=r"\text{shape of } C", tex=r"(B, L, h \cdot d_k)"),
    "output_shape": _formula("shape of Y", ("axes",), "(B, L, d_model)",
        "What comes out has the shape of what went in.", VASWANI, tex_symbol=r"\text{shape of } Y",
        tex=r"(B, L, d_{\mathrm{model}})"),
    "d_model": _symbol("d_model", ("model",),
        "The model width.", "the models' papers", tex_symbol=r"d_{\mathrm{model}}"),
    "num_heads": _symbol("h", ("model",), "The number of heads.", "the models' papers"),
    "d_k": _formula("d_k", ("model",), "d_k = d_model / h",
        "The width of each head.", VASWANI, tex=r"d_k = d_{\mathrm{model}} / h"),
    "illustration": _formula("picture", ("head", "entry"), "no formula",
        "Numbers that a picture shows.", tex_symbol=r"\text{picture}", tex=r"\text{no formula}"),
    "difference": _formula("difference", (), "max |O naive - O tiled|",
        "Both ways end in the same output, up to the last bits of the arithmetic.", FLASH2,
        tex_symbol=r"\text{difference}", tex=r"\max |O_{\mathrm{naive}} - O_{\mathrm{tiled}}|"),
    "kept": _symbol("numbers kept", (),
        "How many numbers are held at once between the inputs and the output.", FLASH2,
        tex_symbol=r"\text{numbers kept}"),
    "Q": _formula("Q_i", ("B", "H", "B_r", "D"), "load Q_i",
        "A block of queries, loaded once.", f"{FLASH2}, line 4", tex=r"\text{load } Q_i"),
    "K": _formula("K_j", ("B", "Hkv", "B_c", "D"), "load K_j",
        "The next block of keys.", f"{FLASH2}, line 7", tex=r"\text{load } K_j"),
    "V": _formula("V_j", ("B", "Hkv", "B_c", "Dv"), "load V_j",
        "The values of those keys.", f"{FLASH2}, line 7", tex=r"\text{load } V_j"),
    "S": _formula("S_ij", ("B", "H", "B_r", "B_c"),
        "S_ij = scale · Q_i K_jᵀ, capped, biased, masked as requested",
        "The scores of this block alone; the next block overwrites them.", f"{FLASH2}, line 8",
        made=("block", "Q", "K"), tex_symbol="S_{ij}",
        tex=r"S_{ij} = \mathrm{scale} \cdot Q_i K_j^\top"
        r" \text{, capped, biased, masked as requested}"),
    "m": _formula("m_i", ("B", "H", "B_r", "1"), "m_i ← max(m_i, rowmax S_ij)",
        "The largest score of each row so far.", f"{FLASH2}, line 9",
        made=("running max", "S|energies_ij", "m<?"),
        tex=r"m_i \leftarrow \max(m_i, \mathrm{rowmax} S_{ij})"),
    "P": _formula("P_ij", ("B", "H", "B_r", "B_c"), "P_ij = exp(S_ij - m_i)",
        "The exponentials of this block, relative to the maximum so far.", f"{FLASH2}, line 9",
        made=("exp", "S|energies_ij", "m"), tex_symbol="P_{ij}", tex=r"P_{ij} = e^{S_{ij} - m_i}"),
    "factor": _formula("α_i", ("B", "H", "B_r", "1"), "α_i = exp(m_old - m_i)",
        "Rescales the sums so far from the old maximum to the new one.",
        f"{FLASH2}, lines 9 and 10", made=("decay", "m", "m<?"), tex_symbol=r"\alpha_i",
        tex=r"\alpha_i = e^{m_{\mathrm{old}} - m_i}"),
    "l": _formula("l_i", ("B", "H", "B_r", "1"), "l_i ← α_i l_i + rowsum P_ij",
        "The softmax denominator so far, relative to that maximum.", f"{FLASH2}, line 9",
        made=("running sum", "P", "factor", "l<?"), tex_symbol=r"\ell_i",
        tex=r"\ell_i \leftarrow \alpha_i \ell_i + \mathrm{rowsum} P_{ij}"),
    "O": _formula("O_i", ("B", "H", "B_r", "Dv"), "O_i ← α_i O_i + P_ij V_j",
        "The output so far, still to be divided by l_i.",
        f"{FLASH2}, line 10, without its misprinted inverse",
        made=("running product", "P", "V", "factor", "O<?"),
        tex=r"O_i \leftarrow \alpha_i O_i + P_{ij} V_j"),
}  # fmt: skip


def _of_projection(
    letter: str, axes: tuple[str, ...], name: str, plural: str, purpose: str, inputs: str
) -> dict[str, Entry]:
    W, b, symbol, (_, heads, _, width) = f"W_{letter}", f"b_{letter}", letter.upper(), axes
    return {
        W: _symbol(W, (heads, "E", width), f"Turns an embedding into a {name}: {purpose}.",
            VASWANI, made=("columns", "c_attn")),
        b: _symbol(b, (heads, width), f"Added to every {name}.", VASWANI,
            made=("columns", "c_attn_bias")),
        f"{letter}_combined": _formula(symbol, ("B", "L", f"{heads}·{width}"),
            f"[{symbol} of head 0, {symbol} of head 1, …] = X {W}",
            f"The {plural} of all heads side by side, one product, which is split: from "
            f"{heads}·{width} numbers per token to {heads} heads of {width}.", VASWANI,
            made=("products", inputs, W, f"{b}?"),
            tex=rf"[{symbol}_0, {symbol}_1, \ldots] = X {W}"),
        letter: _formula(symbol, axes, f"{symbol} = X {W}", f"One {name} per row.", VASWANI,
            made=("product", inputs, W, f"{b}?")),
        f"{letter}_clipped": _formula(symbol, axes, f"{symbol} ← {symbol} clipped to -c … c",
            "No number is beyond the limit.", MPT,
            tex=rf"{symbol} \leftarrow \min(\max({symbol}, -c), c)"),
    }  # fmt: skip


def _of_head_norm(letter: str, axes: tuple[str, ...], name: str, plural: str) -> dict[str, Entry]:
    Q, g, s = letter.upper(), f"g_{letter}", f"s_{letter}"
    return {
        g: _symbol(g, ("D",), f"The gain of each entry of a normalised {name}.", QK_NORM),
        f"{letter}_normed": _formula(Q, axes, f"{Q} ← {g} · {Q} / rms({Q}), row by row",
            f"All {plural} have the same length now, so that no score grows with it.", QK_NORM,
            made=("rms", letter, g), tex=rf"{Q} \leftarrow {g} \cdot {Q} / \mathrm{{rms}}({Q})"),
        f"gains_{letter}": _symbol(g, (axes[1], "1", "D"),
            f"The gain of each entry of a normalised {name}, head by head.", BA),
        s: _symbol(s, (axes[1], "1", "D"), f"Added to each entry of a normalised {name}.", BA),
        f"{letter}_layer_normed": _formula(Q, axes,
            f"{Q} ← {g} · ({Q} - mean({Q})) / std({Q}) + {s}, row by row",
            f"All {plural} have one mean and one length now, before gain and shift.", BA,
            tex=rf"{Q} \leftarrow {g} \cdot ({Q} - \mathrm{{mean}}({Q})) / \mathrm{{std}}({Q})"
            f" + {s}"),
    }  # fmt: skip


def _of_norm(prefix: str, letter: str, step: str, what: str, width: str = "E") -> dict[str, Entry]:
    """Return the entries for normalising the step ``step``; their names begin with ``prefix``."""
    gain, bias, mean, variance, square = (
        f"{prefix}{name}" for name in ("norm_gain", "norm_bias", "mean", "variance", "mean_square")
    )
    normed, rows, each = f"{letter}'", ("B", "L", width), ("B", "L", "1")
    return {
        gain: _symbol("g", (width,), f"The gain of each entry of {what}.", BA),
        bias: _symbol("b", (width,), "Added after the normalisation.", BA),
        mean: _formula("μ", each, f"μ = mean of {letter}, row by row",
            f"The mean of each row of {what}.", BA, made=("mean", step), tex_symbol=r"\mu",
            tex=rf"\mu = \mathrm{{mean}}({letter})"),
        variance: _formula("σ²", each, f"σ² = mean of ({letter} - μ)², row by row",
            "How far its numbers are spread around that mean.", BA,
            made=("mean square", step, mean), tex_symbol=r"\sigma^2",
            tex=rf"\sigma^2 = \mathrm{{mean}}(({letter} - \mu)^2)"),
        square: _formula("s", each, f"s = mean of {letter}², row by row",
            f"How large the numbers of {what} are.", RMS, made=("mean square", step),
            tex=rf"s = \mathrm{{mean}}({letter}^2)"),
        f"{prefix}normed": _formula(normed, rows, f"{normed} = g · ({letter} - μ) / √(σ² + ε) + b",
            f"Every row of {what} has one mean and one size now, before gain and bias.", BA,
            made=("norm", step, variance, gain, mean, bias),
            tex=rf"{normed} = g \cdot \frac{{{letter} - \mu}}"
            r"{\sqrt{\sigma^2 + \varepsilon}} + b"),
        f"{prefix}rms_normed": _formula(normed, rows, f"{normed} = g · {letter} / √(s + ε)",
            f"Every row of {what} has one size now, before the gain.", RMS,
            made=("norm", step, square, gain),
            tex=rf"{normed} = g \cdot \frac{{{letter}}}{{\sqrt{{s + \varepsilon}}}}"),
    }  # fmt: skip


QUERY_AXES, KEY_AXES = ("B", "H", "Lq", "D"), ("B", "Hkv", "Lk", "D")
VALUE_AXES = ("B", "Hkv", "Lk", "Dv")
CATALOGUE |= (
    AROUND
    | INSIDE
    | {"output": CATALOGUE["head_output"]}
    | _of_projection("q", QUERY_AXES, "query", "queries", "what the token looks for", "normed|x")
    | _of_projection("k", KEY_AXES, "key", "keys", "what the token offers", "context|normed|x")
    | _of_projection(
        "v", VALUE_AXES, "value", "values", "what the token passes on", "context|normed|x"
    )
    | _of_head_norm("q", QUERY_AXES, "query", "queries")
    | _of_head_norm("k", KEY_AXES, "key", "keys")
    | _of_norm("", "X", "x", "what enters the layer")
    | _of_norm("query_down_", "C_q", "query_down", "the queries' latents", "Cq")
    | _of_norm("kv_down_", "c", "kv_down", "the latents", "C")
    | _of_norm("index_down_", "K_I", "index_down", "the indexer's keys", "Di")
    | _of_norm("output_", "Y", "output", "what attention found")
    | _of_norm("added_", "Z", "added", "the residual stream")
    | _of_norm("parallel_", "X", "x", "what enters the layer")
    | _of_norm("embedded_", "X", "embedded", "the embeddings")
    | _of_norm("post_residual_", "R", "post_residual", "what leaves the feed-forward")
    | _of_norm("feed_forward_", "F", "feed_forward", "what the feed-forward made")
    | _of_norm("final_", "X", "embedded|residual*", "what leaves the last layer")
    | _of_norm("head_", "X", "head", "what the head of masked tokens made")
)


def base_of(name: str) -> str:
    """Return a traced array's name without its stage in brackets: ``S`` for ``S[i=0,j=1]``."""
    return name.partition("[")[0]


def beside(name: str, base: str) -> str:
    """Return ``base`` with the stage of ``name`` in brackets.

    For example, the name ``q[a]`` and the base ``x`` give ``x[a]``.
    """
    return base + name[len(base_of(name)) :]


def entry(name: str) -> Entry:
    """Return the catalogue's entry of the traced array ``name``.

    For an array that the catalogue lacks, the entry has only the name.

    >>> entry("S[i=0,j=1]").symbol
    'S_ij'
    """
    base = base_of(name)
    tex = rf"\text{{{re.sub('[^0-9A-Za-z]+', ' ', base)}}}"
    return CATALOGUE.get(base) or Entry(base, tex, (), base, tex, "", "")
