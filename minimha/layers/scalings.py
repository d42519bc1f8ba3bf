"""Scalings of rotary embedding: slower rotation, for sequences longer than in training.

Each rule computes the angle per position of pair i from the unscaled θ_i = base^(-2i/R), where R is
the rotated width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.equations.arguments import flag, integer, name_of, number

Angles = NDArray[np.float64]


def token_count(name: str, value: Any) -> int:
    """Return ``value``, a positive integer in the range of float64, as an int.

    Raise TypeError or ValueError for any other value; ``name`` is the argument's name in errors.
    """
    length = integer(name, value)
    number(name, length)
    return length


def _positive(name: str, value: Any) -> float:
    result = number(name, value)
    if result <= 0:
        raise ValueError(f"{name_of(name)} is {value!r}: expected a positive number")
    return result


# Parameter that several rules have → its check.
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "factor": lambda name, value: number(name, value, low=1),
    "original_length": token_count,
    "beta_slow": _positive, "low_freq_factor": _positive, "high_freq_factor": _positive,
    "attention_factor": lambda name, value: None if value is None else _positive(name, value),
    "truncate": flag,
}  # fmt: skip


class Scaling(ABC):
    """The base class of scaling rules, which are frozen dataclasses."""

    is_dynamic = False  # whether the angles depend on the sequence's length

    @property
    def magnitude(self) -> float:
        """The factor of cos and sin."""
        return 1.0

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            if name in CHECKS:
                self._keep(name, CHECKS[name](name, value))

    @abstractmethod
    def frequencies(self, theta: Angles, base: float, length: int) -> Angles:
        """Return each pair's scaled angle per position (R/2,), from the unscaled ``theta``.

        ``base`` is that of θ_i = base^(-2i/R), and ``length`` is the number of tokens.
        """

    def _keep(self, name: str, checked: Any) -> None:
        object.__setattr__(self, name, checked)  # the only way in a frozen dataclass


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Linear scaling θ_i / factor, which has the effect of dividing positions by factor.

    Parameters
    ----------
    factor : float
        At least 1.

    Raises
    ------
    TypeError, ValueError
        ``factor`` is not a number, or below 1.

    References
    ----------
    Chen et al., "Extending Context Window of Large Language Models via Position Interpolation",
    2023.
    """

    factor: float

    def frequencies(self, theta: Angles, base: float, length: int) -> Angles:
        """Return each pair's scaled angle per position, ``theta`` / factor."""
        return theta / self.factor


@dataclass(frozen=True)
class DynamicNTKScaling(Scaling):
    """Dynamic NTK scaling: the base of θ_i = base^(-2i/R) grows with the sequence length n.

    Up to the training length n_0, the base does not change. Beyond n_0, it is multiplied by
    (factor · n / n_0 - (factor - 1))^(R / (R - 2)), where R is the rotated width. Queries and keys
    must be rotated for the same n, which all sequences of a batch share. In ``RoPE.rotate``, n is
    the argument ``length``, by default the largest position of the call + 1. If keys are cached,
    pass ``length`` in each call: the length that the sequence will have at the end.

    Parameters
    ----------
    factor : float
        At least 1.
    original_length : int
        n_0, the largest sequence length in training.

    Raises
    ------
    TypeError, ValueError
        ``factor`` is below 1, or ``original_length`` is not a positive integer.

    References
    ----------
    Peng et al., "YaRN", 2023 (NTK-aware and dynamic scaling), in the form used by transformers.
    """

    factor: float
    original_length: int

    is_dynamic = True

    def frequencies(self, theta: Angles, base: float, length: int) -> Angles:
        """Return each pair's angle per position, for the base that belongs to ``length``."""
        R = 2 * len(theta)
        if R < 4:
            raise ValueError(
                f"rotary_dim is {R}: dynamic NTK raises to the power R / (R - 2), so it needs "
                f"at least 4"
            )
        n = max(length, self.original_length)
        growth = self.factor * n / self.original_length - (self.factor - 1)
        return np.asarray(theta * growth ** (-np.arange(0, R, 2) / (R - 2)))


@dataclass(frozen=True)
class YaRNScaling(Scaling):
    """YaRN scaling: θ_i for fast pairs, θ_i / factor for slow pairs, a mixture in between.

    Fast pairs rotate at least ``beta_fast`` times within ``original_length`` tokens, slow pairs at
    most ``beta_slow`` times. cos and sin are multiplied by ``attention_factor``, so scores grow by
    its square. The mixture is a ramp, linear in the index of the pair as in the authors' code and
    in transformers. In the paper, it is linear in the number of rotations. With an extreme
    ``original_length``, the ramp's ends may cross; the result is then also as in the authors' code.

    Parameters
    ----------
    factor : float
        At least 1.
    original_length : int
        The largest sequence length in training.
    beta_fast : float, default 32.0
        At least ``beta_slow``.
    beta_slow : float, default 1.0
        Positive.
    attention_factor : float, optional
        Positive. Default is 0.1 · ln(factor) + 1.
    truncate : bool, default True
        Whether to round the ramp's lower end down and its upper end up to integers; False in
        gpt-oss.

    Raises
    ------
    TypeError, ValueError
        A number is out of range.

    References
    ----------
    Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023
    (NTK by parts, and the temperature of attention).
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._keep("beta_fast", number("beta_fast", self.beta_fast, low=self.beta_slow))

    @property
    def magnitude(self) -> float:
        """The attention factor, which multiplies cos and sin."""
        given = self.attention_factor
        return 0.1 * math.log(self.factor) + 1 if given is None else given

    def frequencies(self, theta: Angles, base: float, length: int) -> Angles:
        """Return each pair's scaled angle: ``theta``, ``theta`` / factor, or a mixture of both."""
        R = 2 * len(theta)
        low = self._index_rotating(self.beta_fast, base, R)
        high = self._index_rotating(self.beta_slow, base, R)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, R - 1)
        # If the ends meet, the ramp is a step; the original code gives it this width.
        width = high - low or 0.001
        slow = np.clip((np.arange(len(theta)) - low) / width, 0, 1)
        return np.asarray(theta / self.factor * slow + theta * (1 - slow))

    def _index_rotating(self, times: float, base: float, R: int) -> float:
        """Return the pair index i, not rounded, at which original_length · θ_i = 2π · times."""
        return R * math.log(self.original_length / (2 * math.pi * times)) / (2 * math.log(base))


@dataclass(frozen=True)
class Llama3Scaling(Scaling):
    """Llama 3 scaling: θ_i / factor for long wavelengths, θ_i for short ones, a mixture in between.

    Pair i rotates t = original_length · θ_i / 2π times within ``original_length`` tokens. Its
    wavelength is long if t is below ``low_freq_factor``, and short if t is above
    ``high_freq_factor``.

    Parameters
    ----------
    factor : float
        At least 1.
    original_length : int
        The largest sequence length in training.
    low_freq_factor : float, default 1.0
        Positive.
    high_freq_factor : float, default 4.0
        More than ``low_freq_factor``.

    Raises
    ------
    TypeError, ValueError
        A number is out of range.

    References
    ----------
    "The Llama 3 Herd of Models", 2024; ``apply_scaling`` in Meta's code for Llama 3.1.
    """

    factor: float
    original_length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor!r}: expected more than "
                f"low_freq_factor, {self.low_freq_factor!r}"
            )

    def frequencies(self, theta: Angles, base: float, length: int) -> Angles:
        """Return each pair's scaled angle: ``theta``, ``theta`` / factor, or a mixture of both."""
        times = self.original_length * theta / (2 * math.pi)
        kept = (times - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0, 1)
        return np.asarray(theta / self.factor * (1 - kept) + theta * kept)


@dataclass(frozen=True)
class FactorScaling(Scaling):
    """Scaling θ_i / f_i with one positive factor f_i per pair (``factors``), as in GGUF files."""

    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        self._keep("factors", _positives("factors", self.factors))

    def frequencies(self, theta: Angles, base: float, length: int) -> Angles:
        """Return each pair's scaled angle per position, ``theta`` / f_i for pair i."""
        return _divided(theta, "factors", self.factors)


@dataclass(frozen=True)
class LongRoPEScaling(Scaling):
    """LongRoPE scaling θ_i / f_i, with different factors f_i for short and for long sequences.

    Up to the training length n_0, f_i are the ``short_factors``. In a longer sequence, all
    positions use the ``long_factors``. The sequence's length is given as in ``DynamicNTKScaling``.
    For each length, cos and sin are multiplied by ``attention_factor``.

    Parameters
    ----------
    short_factors, long_factors : sequence of float
        The positive factors f_i, one for each pair.
    original_length : int
        n_0, at least 2.
    factor : float, default 1.0
        The largest supported length divided by n_0, at least 1.
    attention_factor : float, optional
        Positive. Default is √(1 + ln(factor) / ln(n_0)).

    Raises
    ------
    TypeError, ValueError
        A number is out of range.

    References
    ----------
    Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens", 2024; Abdin et
    al., "Phi-3 Technical Report", 2024.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_length: int
    factor: float = 1.0
    attention_factor: float | None = None

    is_dynamic = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("short_factors", "long_factors"):
            self._keep(name, _positives(name, getattr(self, name)))
        self._keep("original_length", integer("original_length", self.original_length, low=2))
        if len(self.short_factors) != len(self.long_factors):
            raise ValueError(
                f"short_factors has {len(self.short_factors)} numbers but long_factors has "
                f"{len(self.long_factors)}: expected one for each pair"
            )

    @property
    def magnitude(self) -> float:
        """The attention factor, which multiplies cos and sin."""
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))

    def frequencies(self, theta: Angles, base: float, length: int) -> Angles:
        """Return ``theta`` divided by the factors for sequences of ``length`` tokens."""
        name = "short_factors" if length <= self.original_length else "long_factors"
        return _divided(theta, name, getattr(self, name))


def _positives(name: str, values: Any) -> tuple[float, ...]:
    if not isinstance(values, list | tuple):
        raise TypeError(f"{name_of(name)} is {values!r}: expected a list of positive numbers")
    return tuple(_positive(f"{name}[{n}]", value) for n, value in enumerate(values))


def _divided(theta: Angles, name: str, factors: tuple[float, ...]) -> Angles:
    if len(theta) != len(factors):
        raise ValueError(
            f"{name} has {len(factors)} numbers: expected one for each of {len(theta)} pairs"
        )
    return theta / factors
