"""Describe the conditions under which a function may be wrong: given options, and shapes.

A condition is a clause of a sentence, such as "window_size is given" or "Lq > Lk".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minimha.check.expanded import ARRANGING, expanded
from minimha.check.problems import Graded

OPTIONS = (
    "is_causal", "window_size", "attn_mask", "attn_bias", "kv_lengths", "alibi_slopes", "softcap",
    "sinks", "scale", "return_lse",
)  # fmt: skip
POSITIONAL = frozenset({"is_causal", "window_size", "alibi_slopes"})  # where queries stand matters
NEEDED = ("cu_seqlens_k", "v_scale")  # always given beside another option
ARRANGED = tuple(name for name in ARRANGING if name not in NEEDED)
GROUPED = "heads are grouped"
BLOCKS = (2, 4, 8, 16, 32, 64, 128)
OPPOSITES = {  # each condition, and the one that holds otherwise, if it has a name
    "B > 1": "B = 1",
    "H > 1": "H = 1",
    GROUPED: "heads are not grouped",
    "groups have 8 heads": "",
    "groups have 3 heads": "",
    "Lq = 1": "Lq > 1",
    "1 < Lq < Lk": "",
    "Lq > Lk": "",
    "Lk > 32": "Lk <= 32",
    "Lk > 128": "",
    "Dv is not D": "Dv is D",
    "scales are of each token": "",
    "scales are of each head, or one": "",
    **{f"{option} is given": f"{option} is not given" for option in OPTIONS},
    **{f"{option} is given": f"{option} is not given" for option in ARRANGED},
}
OPTIONS_OF_DELTA = "scale", "normalize", "initial_state", "kv_lengths", "cu_seqlens"
OF_DELTA = {  # the same of the gated delta rule
    "B > 1": "B = 1",
    "H > 1": "H = 1",
    GROUPED: "heads are not grouped",
    "L > 64": "L <= 64",
    "Dv is not D": "Dv is D",
    "g has a number for each channel": "g has a number for each token",
    **{f"{option} is given": f"{option} is not given" for option in OPTIONS_OF_DELTA},
}
# Conditions that hold for the plainest problem.
USUAL = frozenset(OPPOSITES.values()) | frozenset(OF_DELTA.values())


def conditions(arguments: Mapping[str, Any]) -> frozenset[str]:
    """Return the conditions, as clauses, that hold for the arguments of a function.

    The function is ``attention`` or ``gated_delta_rule``.

    >>> import numpy as np
    >>> x = np.ones((1, 2, 1, 4))
    >>> found = conditions({"q": x, "k": x, "v": x, "softcap": 2.0})
    >>> "softcap is given" in found, "Lq = 1" in found, "B > 1" in found
    (True, True, False)
    """
    if "beta" in arguments:
        return _of_delta(arguments)
    B, H, G, Lq, Lk, D, Dv = sizes(arguments).values()
    scales = arguments.get("k_scale")
    axes = -1 if scales is None else np.ndim(scales)
    shapes = (
        B > 1, H > 1, G > 1, G == 8, G == 3, Lq == 1, 1 < Lq < Lk, Lq > Lk, Lk > 32, Lk > 128,
        Dv != D, axes > 1, 0 <= axes < 2,
    )  # fmt: skip
    options = (*OPTIONS, *ARRANGED)
    given = [arguments.get(name) is not None and arguments[name] is not False for name in options]
    return _holding(OPPOSITES, (*shapes, *given))


def _of_delta(arguments: Mapping[str, Any]) -> frozenset[str]:
    (B, Hk, L, D), (_, H, _, Dv) = arguments["k"].shape, arguments["v"].shape
    given = (arguments.get(name) is not None for name in OPTIONS_OF_DELTA)
    shapes = B > 1, H > 1, Hk != H, L > 64, Dv != D, arguments["g"].ndim == 4
    return _holding(OF_DELTA, (*shapes, *given))


def _holding(opposites: Mapping[str, str], holds: Sequence[bool]) -> frozenset[str]:
    pairs = zip(opposites.items(), holds, strict=True)
    return frozenset(one if yes else other for (one, other), yes in pairs) - {""}


def sizes(arguments: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of a problem by name: B, H, H / Hkv, Lq, Lk, D and Dv."""
    arguments = expanded(arguments)[0]
    (B, H, Lq, D), (_, Hkv, Lk, Dv) = arguments["q"].shape, arguments["v"].shape
    return {"B": B, "H": H, "H / Hkv": H // Hkv, "Lq": Lq, "Lk": Lk, "D": D, "Dv": Dv}


def limits(wrong: Sequence[Graded], right: Sequence[Graded]) -> list[str]:
    """Return conditions such as "Lk > 128" or "Lq < 33" that hold for all wrong problems.

    Each leaves out as many of the right problems as it can.
    """
    bad, good = ([sizes(p.arguments) for p in problems] for problems in (wrong, right))
    above, below = [], []
    for name in bad[0]:
        found = [s[name] for s in bad]
        if smaller := [s[name] for s in good if s[name] < min(found)]:
            above.append(f"{name} > {max(smaller)}")
        if larger := [s[name] for s in good if s[name] > max(found)]:
            below.append(f"{name} < {min(larger)}")
    return above + below


def sizes_of_wrong(wrong: Sequence[Graded], right: Sequence[Graded]) -> str:
    """Return a clause on the sizes that the wrong problems have and the right problems lack.

    The clause gives a least size, one size, or a number that does not divide a size. It is "" if no
    such clause is true.
    """
    bad, good = ([sizes(p.arguments) for p in problems] for problems in (wrong, right))
    for name in bad[0]:
        least, most = min(s[name] for s in bad), max((s[name] for s in good), default=0)
        if least > most:
            return f"{name} is {least} or more; it is right up to {most}"
    for name in bad[0]:
        found = {s[name] for s in bad}
        if len(found) == 1 and not found & {s[name] for s in good}:
            return f"{name} is {found.pop()}"
    for name in ("D", "Dv", "Lk", "Lq"):
        for block in BLOCKS:
            large = [s[name] for s in good if s[name] >= block]
            if large and all(s[name] % block for s in bad) and not any(n % block for n in large):
                return f"{block} does not divide {name}"
    return ""
