"""The catalogue's entries for steps inside latent attention and Gated DeltaNet.

The layers do not tap these steps, but the examples do. Entries are written as in ``catalogue``.
"""

from minimha.explain.entry import Entry
from minimha.explain.entry import formula as _formula
from minimha.explain.entry import symbol as _symbol

MLA = "DeepSeek-AI 2024 (DeepSeek-V2), section 2.1"
DSA = "DeepSeek-AI 2025 (DeepSeek-V3.2), section 2.1"
DELTA_NET = "Yang, Kautz and Hatamizadeh 2024 (Gated DeltaNet), section 3.4"

INSIDE: dict[str, Entry] = {
    "W_dq": _symbol("W_dq", ("E", "Cq"), "Narrows a row to the latent of its query.", MLA),
    "query_down": _formula("C_q", ("L", "Cq"), "C_q = X' W_dq",
        "One narrow row per token, from which the queries of all heads are made.", MLA,
        made=("product", "normed", "W_dq")),
    "W_uq": _symbol("W_uq", ("H", "Cq", "D"), "Makes a query from a latent.", MLA),
    "query_up": _formula("Q", ("H", "Lq", "D"), "Q = C_q' W_uq",
        "One query per row, before its last numbers are rotated.", MLA,
        made=("product", "query_down_normed", "W_uq")),
    "W_dkv": _symbol("W_dkv", ("E", "C"),
        "Narrows a row to the latent of its keys and values.", MLA),
    "kv_down": _formula("c", ("L", "C"), "c = X' W_dkv",
        "One narrow row per token, from which the keys and values of all heads are made.", MLA,
        made=("product", "normed", "W_dkv")),
    "W_kr": _symbol("W_kr", ("E", "R"), "Makes the part of a key that is rotated.", MLA),
    "shared_key": _formula("k_R", ("L", "R"), "k_R = X' W_kr",
        "One key per token, which all heads share, before it is rotated.", MLA,
        made=("product", "normed", "W_kr"), tex="k_R = X' W_{kr}"),
    "W_uk": _symbol("W_uk", ("H", "C", "D"), "Makes a head's part of a key from a latent.", MLA),
    "W_uv": _symbol("W_uv", ("H", "C", "Dv"), "Makes a head's value from a latent.", MLA),
    "W_iq": _symbol("W_iq", ("H", "Cq", "Di"), "Makes the indexer's query from a latent.", DSA),
    "index_up": _formula("Q_I", ("H", "Lq", "Di"), "Q_I = C_q' W_iq",
        "The indexer's queries, before they are rotated.", DSA,
        made=("product", "query_down_normed", "W_iq")),
    "W_ik": _symbol("W_ik", ("E", "Di"), "Makes the indexer's key of a token.", DSA),
    "index_down": _formula("K_I", ("Lk", "Di"), "K_I = X' W_ik",
        "The indexer's keys, before they are normalised and rotated.", DSA,
        made=("product", "normed", "W_ik")),
    "W_iw": _symbol("W_iw", ("E", "Hi"), "Computes how much each head of the indexer counts.", DSA),
    "W_qkv": _symbol("W_qkv", ("E", "channels"), "Makes queries, keys and values at once: their "
        "numbers are the channels of the convolution.", DELTA_NET),
    "conv": _symbol("w_conv", ("channels", "taps"),
        "What each channel (row) keeps of earlier tokens and, last, of the token itself.",
        DELTA_NET, tex_symbol=r"w_{\mathrm{conv}}"),
    "W_z": _symbol("W_z", ("E", "H·Dv"), "Computes the input of the output's gates.", DELTA_NET),
    "W_b": _symbol("W_b", ("H", "E", "1"), "Computes what part of an error is corrected.",
        DELTA_NET),
    "W_a": _symbol("W_a", ("E", "heads"), "Computes how fast heads forget.", DELTA_NET),
    "dt_bias": _symbol("dt_bias", ("heads",), "Added to what W_a computes.", DELTA_NET,
        tex_symbol=r"b_{dt}"),
    "A_log": _symbol("A_log", ("heads",), "The logarithm of each head's rate.", DELTA_NET,
        tex_symbol=r"A_{\log}"),
    "g_o": _symbol("g_o", ("Dv",), "The gain of each entry of a normalised answer.", DELTA_NET),
}  # fmt: skip
