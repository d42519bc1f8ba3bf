"""How large the errors of real kernels are, as a share of ``minimha.error_bound``.

``python -m tests.check.errors --problems 10000`` prints, for each dtype and kernel: the number of
problems, the largest share of a bound in any number, and the median over problems of each
problem's largest share, for the output and the log-sum-exp.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests import each other from there

from check import libraries

import minimha
from minimha.check.wrong_attention import attend

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
WIDTHS = (1, 2, 4, 8, 16, 24, 32, 64, 80, 128)
MOST_SCORES = 60_000  # of one problem


def draw(seed, number):
    """The arguments of one problem, with up to 2000 keys and 128 wide heads."""
    rng = np.random.default_rng([seed, number])
    dtype = DTYPES[str(rng.choice(list(DTYPES)))]
    Hkv, group = int(rng.integers(1, 3)), int(rng.choice([1, 1, 2, 4]))
    H, Lk = Hkv * group, int(np.exp(rng.uniform(0, np.log(2000))))
    Lq = max(1, min(int(np.exp(rng.uniform(0, np.log(300)))), MOST_SCORES // (H * Lk)))
    B = int(rng.integers(1, 3)) if 2 * H * Lq * Lk <= MOST_SCORES else 1
    D, Dv = int(rng.choice(WIDTHS)), int(rng.choice(WIDTHS))
    Dv = D if rng.random() < 0.7 else Dv
    arrays = {
        "q": rng.normal(size=(B, H, Lq, D)) * rng.choice([0.3, 1, 1, 1, 3]),
        "k": rng.normal(size=(B, Hkv, Lk, D)) * rng.choice([0.3, 1, 1, 3]),
        "v": rng.normal(size=(B, Hkv, Lk, Dv)) + rng.choice([0, 0, 0, 3]),
    }
    return {n: x.astype(dtype) for n, x in arrays.items()} | options(rng, B, H, Lq, Lk)


def options(rng, B, H, Lq, Lk):
    """Options that are drawn independently; every query sees key 0 of its mask."""
    drawn, last = {}, max(Lk - Lq, 0)
    if rng.random() < 0.3:
        drawn |= {"is_causal": True, "q_offset": int(rng.choice([0, last]))}
    if rng.random() < 0.15:
        drawn["attn_mask"] = rng.random((B, H, Lq, Lk)) < 0.7
        drawn["attn_mask"][..., 0] = True
    elif rng.random() < 0.15:
        drawn["attn_bias"] = rng.normal(size=(B, H, Lq, Lk)).astype(np.float32)
    if rng.random() < 0.2:
        drawn["scale"] = float(rng.choice([0.1, 0.5, 1.0]))
    if rng.random() < 0.1:
        drawn["softcap"] = float(rng.choice([2.0, 30.0]))
    if rng.random() < 0.1:
        drawn["sinks"] = rng.normal(size=H).astype(np.float32)
    if rng.random() < 0.1:
        drawn |= {"q_offset": last} | drawn | {"window_size": (int(rng.integers(Lk + 1)), None)}
    if rng.random() < 0.1:
        slopes = np.exp2(-np.arange(1, H + 1)).astype(np.float32)
        drawn |= {"q_offset": last} | drawn | {"alibi_slopes": slopes}
    return drawn


def ours(backend):
    def function(**arguments):
        return minimha.attention(**arguments, backend=backend, return_lse=True)

    return function


def sdpa(backend):
    """torch's scaled_dot_product_attention with one backend."""

    def function(q, k, v, scale=None, **others):
        import torch

        mask = added(q, k, others)
        if mask is not None and mask.dtype != bool and q.dtype != np.float32:
            raise NotImplementedError("torch takes a bias only in the inputs' dtype")
        if backend == "FLASH_ATTENTION" and v.shape[-1] != q.shape[-1]:
            raise NotImplementedError("values are as wide as keys")
        if mask is not None:
            mask = torch.from_numpy(mask)
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
            output = torch.nn.functional.scaled_dot_product_attention(
                *map(tensor, (q, k, v)), mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        return output.float().numpy(), None

    return function


def tensor(x):
    import torch

    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def onnxruntime(q, k, v, scale=None, softcap=0.0, **others):
    """onnxruntime's Attention; its kernel for the CPU has no bfloat16."""
    if q.dtype != np.float32:
        raise NotImplementedError("float32")
    mask = added(q, k, others)
    return libraries.onnxruntime_attention(q, k, v, mask, scale=scale, softcap=softcap), None


def added(q, k, others):
    """Causality, mask and bias as one array; None if there is none of them."""
    if set(others) - {"is_causal", "q_offset", "attn_mask", "attn_bias"}:
        raise NotImplementedError(f"{list(others)}")
    mask, bias = others.get("attn_mask"), others.get("attn_bias")
    if others.get("is_causal"):
        causal = np.tri(q.shape[2], k.shape[2], others["q_offset"], dtype=bool)
        mask = causal if mask is None else causal & mask
    if bias is None or mask is None:
        return bias if mask is None else mask
    return np.where(mask, bias, np.float32(-np.inf))


KERNELS = {
    "dense": ours("dense"), "tiled": ours("tiled"), "cpu": ours("cpu"),
    "torch math": sdpa("MATH"), "torch flash": sdpa("FLASH_ATTENTION"),
    "onnxruntime": onnxruntime,
}  # fmt: skip


def shares(got, expected, bound):
    """|got - expected| / bound; 0 where both are equal, also if infinite."""
    with np.errstate(invalid="ignore"):
        return np.where(got == expected, 0, abs(got - expected) / bound)


def largest_shares(kernels, seed, numbers):
    """{(dtype, kernel): [(number, share of the output, share of the log-sum-exp)]}."""
    found = defaultdict(list)
    for number in numbers:
        arguments = draw(seed, number)
        wide = {n: x.astype(np.float64) if n in "qkv" else x for n, x in arguments.items()}
        output, lse = attend(wide)
        bound, lse_bound = minimha.error_bound(**arguments)
        for name in kernels:
            try:
                got, got_lse = KERNELS[name](**arguments)
            except NotImplementedError:
                continue
            share = shares(np.asarray(got, np.float64), output, bound).max()
            of_lse = np.nan if got_lse is None else shares(got_lse, lse, lse_bound).max()
            found[arguments["q"].dtype.name, name].append((number, share, of_lse))
    return found


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.check.errors", description=__doc__)
    parser.add_argument("--problems", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = largest_shares(KERNELS, given.seed, range(given.problems))
    for (dtype, name), rows in sorted(found.items()):
        number, output, lse = np.array(rows).T
        line = f"{dtype:9}{name:12}{len(rows):6} problems"
        for what, share in (("output", output), ("lse", lse)):
            if not np.isnan(share).all():
                most, median = share.max(), np.median(share)
                line += f", {what} at most {most:.2f} (number {int(number[share.argmax()])})"
                line += f", 1/{1 / median:.1f} at the median"
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
