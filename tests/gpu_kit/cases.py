"""The problems of the kit's check: the same numbers wherever they are made, with NumPy alone.

A case is a dict: "rung", "dtype", sizes by their letters, and "options", a name in ``OPTIONS``.
"B_c" in a case is the number of keys per tile, where it is not the rung's own choice.
"""

from itertools import product

import numpy as np

RUNGS = {
    "cuda.rung1_rows": ("float32", "float64"),
    "cuda.rung2_tiles": ("float32", "float64"),
    "cuda.rung3_register_tiles": ("float32",),
    "cuda.rung4_tensor_cores": ("bfloat16", "float16"),
    "cuda.rung5_decode": ("bfloat16", "float16", "float32"),
    "cuda.rung6_warpgroups": ("bfloat16", "float16"),
}
OPTIONS = ("none", "causal", "window", "mask", "bias", "softcap", "alibi", "sinks", "lengths")
WIDTHS = {
    16: ("none",), 40: ("none",), 64: OPTIONS, 72: ("none",), 80: ("none", "causal"), 128: OPTIONS,
    256: ("none", "causal"),
}  # fmt: skip


def cases(sample=False):
    """All of them, or a small one of each rung."""
    found = []
    for rung, dtypes in RUNGS.items():
        if sample:
            sizes = {"B": 2, "H": 4, "Hkv": 2, "Lq": 5, "Lk": 33, "D": 16}
            found.append({"rung": rung, "dtype": dtypes[0], **sizes, "options": "causal"})
            continue
        lengths = (1, 5) if "decode" in rung else (131,)
        for dtype, D, Lq in product(dtypes, WIDTHS, lengths):
            sizes = {"B": 2, "H": 4, "Hkv": 2, "Lq": Lq, "Lk": 203, "D": D}
            found += [{"rung": rung, "dtype": dtype, **sizes, "options": x} for x in WIDTHS[D]]
            if D in (64, 128):  # of up to 128 keys a tile, nine and more for each of two buffers
                long = {"rung": rung, "dtype": dtype, **sizes, "B": 1, "Lk": 2400}
                found += [long | {"options": "none"}, *smaller(long | {"options": "causal"})]
    return found


def smaller(case):
    """The case with 32 keys per tile, so that two wide blocks of rung 4 fit into an A100's SM."""
    is_wide = "rung4" in case["rung"] and case["D"] in (16, 128)  # 16 in a sample
    return [case | {"B_c": 32}] if is_wide else []


def timed(sample=False):
    """The cases to measure: as many queries in all at every length."""
    found = []
    lengths, widths = ((64,), (16,)) if sample else ((1024, 4096, 16384), (64, 128))
    for rung, dtypes in RUNGS.items():
        if rung < "cuda.rung3" or (sample and "rung4" not in rung):
            continue
        for L, D in product(lengths, widths):
            sizes = {"B": max(lengths) // L, "H": 16 if dtypes[0] == "bfloat16" else 4}
            sizes |= {"Hkv": sizes["H"], "Lq": L, "Lk": L, "D": D}
            if "decode" in rung:
                sizes |= {"B": 4, "H": 32, "Hkv": 8, "Lq": 1}
            case = {"rung": rung, "dtype": dtypes[0], **sizes, "options": "none"}
            found += [case, *smaller(case)]
    return found


def work(case):
    """What a call does: "FLOP" of the two products, or "bytes" of keys and values, and how many."""
    B, H, Hkv, Lq, Lk, D = (case[letter] for letter in ("B", "H", "Hkv", "Lq", "Lk", "D"))
    if "decode" in case["rung"]:
        return "bytes", 2 * B * Hkv * Lk * D * (4 if case["dtype"] == "float32" else 2)
    return "FLOP", 4 * B * H * Lq * Lk * D


def numbers(shape, seed):
    """Multiples of 1/16 below 4, normal on the whole: every dtype holds them exactly."""
    x = np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(seed << 32)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)  # splitmix64
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    four = sum((x >> np.uint64(8 * byte) & np.uint64(255)).astype(np.int64) for byte in range(4))
    return ((four - 510) // 9 / 16).reshape(shape)


def problem(case):
    """q, k and v in float64, and the options of ``minimha.attention``."""
    B, H, Hkv, Lq, Lk, D = (case[letter] for letter in ("B", "H", "Hkv", "Lq", "Lk", "D"))
    q, k, v = (numbers((B, h, n, D), i) for i, (h, n) in enumerate(((H, Lq), (Hkv, Lk), (Hkv, Lk))))
    options = {
        "none": {},
        "causal": {"is_causal": True, "q_offset": Lk - Lq},
        "window": {"window_size": (40, 3), "q_offset": Lk // 2},
        "mask": {"attn_mask": numbers((B, 1, Lq, Lk), 3) < 0.5},
        "bias": {"attn_bias": numbers((1, H, Lq, Lk), 4).astype(np.float32)},
        "softcap": {"softcap": 1.5},
        "alibi": {"alibi_slopes": [2.0**-h for h in range(H)], "q_offset": 7},
        "sinks": {"sinks": [float(h) for h in range(H)]},
        "lengths": {"kv_lengths": [Lk, 2 * Lk // 3][:B]},
    }[case["options"]]
    return q, k, v, options


def label(case):
    """What the case is called in a report."""
    sizes = " ".join(f"{letter}={case[letter]}" for letter in ("B", "H", "Hkv", "Lq", "Lk", "D"))
    keys = f" B_c={case['B_c']}" if "B_c" in case else ""
    return f"{case['rung']} {case['dtype']} {sizes} {case['options']}{keys}"


def settings(case):
    """What the launches of the rung take besides the problem."""
    return {"B_c": case["B_c"]} if "B_c" in case else {}
