"""Convert numbers of 16 or 8 bits, given as integers, to float32, and float32 to 16 bits."""

from __future__ import annotations

import numpy as np

from minimha.kernels.cpu.jit import jit


@jit
def of_bfloat16(bits):
    """Return the float32 equal to the bfloat16 number whose bits are ``bits``."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@jit
def of_float16(bits):
    """Return the float32 equal to the float16 number whose bits are ``bits``."""
    word = np.uint32(bits)
    rest = np.uint32((word & np.uint32(0x7FFF)) << np.uint32(13))
    # With exponent and mantissa shifted, finite numbers, also subnormal ones, are 2^112 too small.
    finite = np.uint32(rest).view(np.float32) * np.float32(2.0**112)
    other = np.uint32(rest | np.uint32(0x7F800000)).view(np.float32)  # infinity and NaN
    magnitude = other if rest >= np.uint32(0x7C00 << 13) else finite
    return -magnitude if word & np.uint32(0x8000) else magnitude


UNIT_OF_FLOAT8 = np.float32(2.0**8)


@jit
def of_float8(bits):
    """Return, as float32, the float8_e4m3fn number of these bits over ``UNIT_OF_FLOAT8``.

    Vectors are widened so with fewer instructions. Scales are multiplied by this unit instead.
    """
    word = np.uint32(bits)
    size = np.uint32(word & np.uint32(0x7F))
    # Over 2^8, the exponent has the bias 15 instead of 7; subnormal numbers are multiples of 2^-17.
    normal = np.uint32(np.uint32(size << np.uint32(20)) + np.uint32(112 << 23)).view(np.float32)
    finite = normal if size >= np.uint32(8) else np.float32(size) * np.float32(2.0**-17)
    magnitude = finite if size < np.uint32(0x7F) else np.float32(np.nan)
    return -magnitude if word & np.uint32(0x80) else magnitude


# Rounding uses integers, which LLVM vectorizes on every CPU: a number added to the dropped digits
# carries into the last kept digit, and from there into the exponent.


@jit
def to_bfloat16(word):
    """Return the bits of the bfloat16 nearest to the float32 with bits ``word``, ties to even."""
    upper = np.uint32(word >> np.uint32(16))
    nearest = np.uint32(word + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
    is_nan = np.uint32(word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint16(upper | np.uint32(0x40) if is_nan else nearest)


@jit
def to_float16(word):
    """Return the bits of the float16 nearest to the float32 with bits ``word``, ties to even."""
    size = np.uint32(word & np.uint32(0x7FFFFFFF))
    odd = np.uint32(size >> np.uint32(13)) & np.uint32(1)
    # The exponent minus 112: its bias is 15 instead of 127.
    normal = np.uint32(size + np.uint32(0xC8000FFF) + odd) >> np.uint32(13)
    # The last digit of a sum with 1/2 is 2^-24, as that of subnormal numbers.
    moved = np.float32(size.view(np.float32) + np.float32(0.5)).view(np.uint32)
    nearest = normal if size >= np.uint32(113 << 23) else np.uint32(moved - np.uint32(126 << 23))
    infinite = np.uint32(0x7E00 if size > np.uint32(0x7F800000) else 0x7C00)
    nearest = infinite if size >= np.uint32(143 << 23) else nearest
    return np.uint16(nearest | np.uint32(np.uint32(word >> np.uint32(16)) & np.uint32(0x8000)))
