"""Define the measured problems: sizes, masks, and the same random numbers on every run."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MASKS = ("none", "causal", "window", "mask")
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
WINDOW = (511, 0)


class Inputs(NamedTuple):
    """The arrays and masks of one problem.

    ``window`` is (left, right) or None. ``mask`` is None or a boolean array (B, 1, Lq, Lk) in which
    True means "may attend". A causal problem has Lq = Lk.
    """

    q: NDArray[Any]
    k: NDArray[Any]
    v: NDArray[Any]
    is_causal: bool
    window: tuple[int, int] | None
    mask: NDArray[np.bool_] | None

    @property
    def arrays(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        return self.q, self.k, self.v

    @property
    def options(self) -> dict[str, Any]:
        """Return the masks and the window as options of ``minimha.attention``."""
        return {"is_causal": self.is_causal, "window_size": self.window, "attn_mask": self.mask}

    @property
    def whole_mask(self) -> NDArray[np.bool_] | None:
        """Return the window as a boolean mask or, without a window, ``mask``, which may be None."""
        if self.window is None:
            return self.mask
        distance = np.arange(self.k.shape[2]) - np.arange(self.q.shape[2])[:, None]
        left, right = self.window
        return ((-left <= distance) & (distance <= right))[None, None]


@dataclass(frozen=True)
class Shape:
    """The sizes, the mask and the dtype of a problem.

    ``mask`` is "none", "causal", "window" (a query sees its own key and 511 before it) or "mask"
    (random). ``dtype`` is float32 on a CPU; on a GPU it may also be float16 or bfloat16.
    """

    B: int
    H: int
    Hkv: int
    Lq: int
    Lk: int
    D: int
    mask: str = "none"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.mask not in MASKS:
            raise ValueError(f"mask is {self.mask!r}: expected one of {', '.join(MASKS)}")
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"dtype is {self.dtype!r}: expected one of {', '.join(ITEMSIZE)}")
        if self.H % self.Hkv:
            raise ValueError(f"H={self.H} is not a multiple of Hkv={self.Hkv}")
        if self.mask in ("causal", "window") and self.Lq != self.Lk:
            raise ValueError(f"mask {self.mask} needs Lq = Lk, not {self.Lq} and {self.Lk}")

    def __str__(self) -> str:
        sizes = ",".join(str(n) for n in (self.B, self.H, self.Hkv, self.Lq, self.Lk, self.D))
        defaults = {"none", "float32"}
        return " ".join([sizes, *(x for x in (self.mask, self.dtype) if x not in defaults)])

    @property
    def operations(self) -> float:
        """Return the number of operations: 4 · D per pair of a query and a visible key.

        With a random mask, every key counts as visible.
        """
        pairs: float = self.Lq * self.Lk
        if self.mask == "causal":
            pairs = self.Lq * self.Lk / 2
        elif self.mask == "window":
            pairs = sum(min(i, WINDOW[0]) + 1 for i in range(self.Lq))
        return 4.0 * self.B * self.H * pairs * self.D

    @property
    def bytes_read(self) -> float:
        """Return the size of K and V in bytes."""
        return 2.0 * ITEMSIZE[self.dtype] * self.B * self.Hkv * self.Lk * self.D

    @property
    def is_decode(self) -> bool:
        """Return whether there is one query per head, so that reading takes most of the time."""
        return self.Lq == 1

    def inputs(self, seed: int = 0) -> Inputs:
        """Return random arrays and the mask of the problem, in float32 for every ``dtype``."""
        rng = np.random.default_rng(seed)
        sizes = ((self.H, self.Lq), (self.Hkv, self.Lk), (self.Hkv, self.Lk))
        q, k, v = (
            rng.standard_normal((self.B, heads, length, self.D), np.float32)
            for heads, length in sizes
        )
        mask = None
        if self.mask == "mask":
            mask = rng.random((self.B, 1, self.Lq, self.Lk)) < 0.8
        return Inputs(
            q, k, v, self.mask == "causal", WINDOW if self.mask == "window" else None, mask
        )


SHAPES = (
    Shape(1, 8, 8, 128, 128, 64),
    Shape(1, 8, 8, 1024, 1024, 64),
    Shape(4, 12, 12, 512, 512, 64),
    Shape(1, 8, 8, 4096, 4096, 64),
    Shape(1, 8, 8, 4096, 4096, 128),
    Shape(1, 8, 8, 1024, 1024, 64, "causal"),
    Shape(8, 12, 12, 512, 512, 64, "causal"),
    Shape(1, 8, 8, 4096, 4096, 64, "causal"),
    Shape(1, 32, 8, 2048, 2048, 128, "causal"),
    Shape(1, 8, 8, 4096, 4096, 64, "window"),
    Shape(4, 16, 16, 128, 1024, 64),
    Shape(1, 8, 8, 777, 777, 80),
    Shape(2, 8, 8, 1024, 1024, 64, "mask"),
    Shape(1, 32, 8, 1, 4096, 128),
    Shape(8, 32, 8, 1, 2048, 128),
    Shape(1, 8, 8, 1, 65536, 64),
)
LADDER_SHAPE = Shape(1, 4, 4, 512, 512, 64)
