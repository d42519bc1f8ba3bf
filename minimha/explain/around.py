"""The catalogue's entries for steps around attention: feed-forward, experts, residual, logits.

They are written as in ``catalogue``, which explains them.
"""

from minimha.explain.entry import FORMULA, Entry
from minimha.explain.entry import formula as _formula
from minimha.explain.entry import symbol as _symbol

EMBEDDINGS = "Vaswani et al. 2017, section 3.4"
RESIDUAL = "Vaswani et al. 2017, section 3.1"
GEMMA2 = "Gemma Team 2024 (Gemma 2), section 2"
SHAZEER = "Vaswani et al. 2017, section 3.3; gated: Shazeer 2020 (GLU variants)"
GPT_OSS = "OpenAI 2025 (gpt-oss)"
EXPERTS = "Shazeer et al. 2017 (mixtures of experts), section 2"
MIXTRAL = "Jiang et al. 2024 (Mixtral), section 2.1"
DEEPSEEK3 = "DeepSeek-AI 2024 (DeepSeek-V3), section 2.1.2"
INPUT = "expert_input|parallel_normed|added_normed|added"  # the input of a feed-forward

AROUND: dict[str, Entry] = {
    "W_in": _symbol("W_in", ("E", "F"),
        "Widens each row for the feed-forward.", SHAZEER, tex_symbol=r"W_{\mathrm{in}}"),
    "b_in": _symbol("b_in", ("F",),
        "Added to every wide row.", SHAZEER, tex_symbol=r"b_{\mathrm{in}}"),
    "W_gate": _symbol("W_gate", ("E", "F"),
        "Computes the input of the feed-forward's gates.", SHAZEER,
        tex_symbol=r"W_{\mathrm{gate}}"),
    "b_gate": _symbol("b_gate", ("F",),
        "Added before the activation.", SHAZEER, tex_symbol=r"b_{\mathrm{gate}}"),
    "W_out": _symbol("W_out", ("F", "E"),
        "Narrows each row to the model width again.", SHAZEER, tex_symbol=r"W_{\mathrm{out}}"),
    "b_out": _symbol("b_out", ("E",),
        "Added to every row at the end.", SHAZEER, tex_symbol=r"b_{\mathrm{out}}"),
    "expanded": _formula("U", ("B", "L", "F"), "U = Z' W_in, + b_in where given",
        "The wide row of each token, computed without the other tokens.", SHAZEER,
        made=("product", INPUT, "W_in", "b_in?"),
        tex=r"U = Z' W_{\mathrm{in}} \text{, } + b_{\mathrm{in}} \text{ where given}"),
    "gate_input": _formula("G", ("B", "L", "F"), "G = Z' W_gate, + b_gate where given",
        "The input of the gates, which decide how much of each number passes.", SHAZEER,
        made=("product", INPUT, "W_gate", "b_gate?"),
        tex=r"G = Z' W_{\mathrm{gate}} \text{, } + b_{\mathrm{gate}} \text{ where given}"),
    "activated": _formula("Φ", ("B", "L", "F"), "Φ = φ(U), φ(G) where it is gated",
        "The activation φ (ReLU, GELU, SiLU, …), number by number: negative ones nearly vanish.",
        SHAZEER, made=("activation", "gate_limited|gate_input|expanded"), tex_symbol=r"\Phi",
        tex=r"\Phi = \varphi(U) \text{, } \varphi(G) \text{ where it is gated}"),
    "gate_limited": _formula("G", ("B", "L", "F"), "G ← min(G, limit)",
        "No gate's input is above the limit.", GPT_OSS,
        tex=r"G \leftarrow \min(G, \mathrm{limit})", made=FORMULA),
    "expanded_limited": _formula("U", ("B", "L", "F"), "U ← 1 + U, clipped to ±limit before",
        "What the gates multiply: 1 where the wide row has 0.", GPT_OSS,
        tex=r"U \leftarrow 1 + \min(\max(U, -\mathrm{limit}), \mathrm{limit})", made=FORMULA),
    "gated_product": _formula("U", ("B", "L", "F"), "U ← Φ · U, entry by entry",
        "What the gates let through.", "Shazeer 2020 (GLU variants)",
        made=("times", "activated", "expanded_limited|expanded"), tex=r"U \leftarrow \Phi \odot U"),
    "feed_forward": _formula("F", ("B", "L", "E"),
        "F = Φ W_out, U W_out where it is gated, + b_out where given",
        "What the feed-forward computes for each token, without the other tokens.", SHAZEER,
        made=("product", "gated_product|activated", "W_out", "b_out?"),
        tex=r"F = \Phi W_{\mathrm{out}} \text{, } U W_{\mathrm{out}} \text{ where it is gated, }"
        r" + b_{\mathrm{out}} \text{ where given}"),
    "W_router": _symbol("W_r", ("E", "N"),
        "One column per expert: what the expert's tokens have in common.", EXPERTS),
    "b_router": _symbol("b_r", ("N",), "Added to each expert's logit.", EXPERTS),
    "router_logits": _formula("R", ("B", "L", "N"), "R = Z' W_r, + b_r where given",
        "How well each expert (column) suits each token (row).", EXPERTS,
        made=("product", "added_normed|added", "W_router", "b_router?"),
        tex=r"R = Z' W_r \text{, } + b_r \text{ where given}"),
    "router_probabilities": _formula("p", ("B", "L", "N"), "p = softmax(R), row by row",
        "The same as shares of 1, before all but the best experts are dropped.", MIXTRAL,
        made=("softmax", "router_logits"), tex=r"p = \mathrm{softmax}(R)"),
    "router_scores": _formula("p", ("B", "L", "N"), "p = sigmoid(R), number by number",
        "How well each expert suits each token, from 0 to 1, whatever suits other experts.",
        DEEPSEEK3, tex=r"p = \sigma(R)"),
    "b_choice": _symbol("b_c", ("N",), "Added to each expert's score before the best are chosen, "
        "so that all experts have work.", DEEPSEEK3),
    "choice_scores": _formula("c", ("B", "L", "N"), "c = p + b_c",
        "The scores by which a token's experts are chosen; its shares are made from p.",
        DEEPSEEK3, made=("sum", "router_scores", "b_choice")),
    "group_scores": _formula("s", ("B", "L", "G"), "s = the sum of a group's best scores",
        "How well the best experts of each group (column) suit each token (row).",
        "DeepSeek-AI 2024 (DeepSeek-V2), section 2.2.2", tex=r"\text{the sum of a group's best}"),
    "groups_kept": _formula("k", ("B", "L", "G"), "k = 1 for a token's best groups, else 0",
        "Which groups (columns) each token (row) keeps: it goes to no expert of another group.",
        "DeepSeek-AI 2024 (DeepSeek-V2), section 2.2.2",
        tex=r"k = 1 \text{ for a token's best groups, else } 0"),
    "expert_shares": _formula("G", ("B", "L", "N"),
        "G_te = p_te if expert e is among the best of token t, else 0; divided by their sum if so",
        "Which experts (columns) each token (row) goes to, and how much each of them counts.",
        MIXTRAL, tex=r"G_{te} = p_{te} \text{ if expert } e \text{ is among the best of token } t"
        r"\text{, else } 0 \text{; divided by their sum if so}"),
    "expert_input": _symbol("Z'_e", ("B", "n", "E"),
        "The rows of the tokens that go to this expert, in their order.", EXPERTS),
    "expert_output": _formula("F_e", ("B", "n", "E"),
        "F_e = Φ W_out, U W_out where it is gated, + b_out where given",
        "What this expert makes of each of its tokens, without the other tokens.", EXPERTS,
        made=("product", "gated_product|activated", "W_out", "b_out?"),
        tex=r"F_e = \Phi W_{\mathrm{out}} \text{, } U W_{\mathrm{out}} \text{ where it is gated, }"
        r" + b_{\mathrm{out}} \text{ where given}"),
    "W_shared": _symbol("W_s", ("E", "1"), "Computes the gate of the expert that all tokens share.",
        "Qwen Team 2024 (Qwen1.5-MoE)"),
    "shared_gate": _formula("g", ("B", "L", "1"), "g = sigmoid(Z' W_s)",
        "How much of what the shared expert makes of a token counts.",
        "Qwen Team 2024 (Qwen1.5-MoE)", made=("sigmoid", "added_normed|added", "W_shared"),
        tex=r"g = \sigma(Z' W_s)"),
    "mixed": _formula("F", ("B", "L", "E"), "F_t = Σ_e G_te F_e,t, + the shared expert's",
        "What the experts make of each token, each by its share.", MIXTRAL,
        tex=r"F_t = \sum_e G_{te} F_{e,t} \text{, } + \text{the shared expert's}"),
    "residual": _formula("X", ("B", "L", "E"), "X ← Z + F",
        "What leaves the layer, and enters the next one: all that was found so far.", RESIDUAL,
        made=("sum", "added", "feed_forward_normed|feed_forward"), tex=r"X \leftarrow Z + F"),
    "post_residual": _formula("R", ("B", "L", "E"), "R = Z' + F",
        "The second residual connection, which starts from what was normalised.", RESIDUAL,
        made=("sum", "added_normed", "feed_forward")),
    "W_vocab": _symbol("W_vocab", ("E", "V"),
        "One column per token of the vocabulary; if it is tied, the embedding's rows.",
        "Press and Wolf 2017 (tied embeddings)", tex_symbol=r"W_{\mathrm{vocab}}"),
    "uncapped_logits": _formula("logits", ("B", "L", "V"), "logits = X' W_vocab",
        "The scores before they are capped.", GEMMA2, made=("product", "final_normed", "W_vocab"),
        tex_symbol=r"\mathrm{logits}", tex=r"\mathrm{logits} = X' W_{\mathrm{vocab}}"),
    "logit_softcap": _symbol("c", (), "The cap of the logits.", GEMMA2),
    "capped_logits": _formula("logits", ("B", "L", "V"), "logits ← c · tanh(logits / c)",
        "How well each token of the vocabulary (column) would follow each token (row), from -c to "
        "c.", GEMMA2, made=("cap", "uncapped_logits", "logit_softcap"),
        tex_symbol=r"\mathrm{logits}",
        tex=r"\mathrm{logits} \leftarrow c \tanh(\mathrm{logits} / c)"),
    "logits": _formula("logits", ("B", "L", "V"), "logits = X' W_vocab",
        "How well each token of the vocabulary (column) would follow each token (row).", EMBEDDINGS,
        made=("product", "final_normed|added|output|x", "W_vocab"), tex_symbol=r"\mathrm{logits}",
        tex=r"\mathrm{logits} = X' W_{\mathrm{vocab}}"),
    "probabilities": _formula("p", ("B", "L", "V"), "p = softmax(logits), row by row",
        "How probable each token of the vocabulary (column) is after each token (row).", EMBEDDINGS,
        made=("softmax", "logits"), tex=r"p = \mathrm{softmax}(\mathrm{logits})"),
}  # fmt: skip
