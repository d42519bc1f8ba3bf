"""Read and check the settings in a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from minimha.equations.arguments import flag, integer, number
from minimha.layers.feed_forward import Activation
from minimha.layers.rope import RoPE
from minimha.layers.scalings import (
    DynamicNTKScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    Scaling,
    YaRNScaling,
)

LARGEST = 1 << 24  # for any count: a file must not make us reserve all memory
DEEPEST = 1 << 12  # for the number of layers
POSITIVE = 1e-9  # the smallest number that counts as positive
LOCAL, GLOBAL = KINDS = ("sliding_attention", "full_attention")

# The activations by their names in config.json.
ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu", "swish": "silu", "quick_gelu": "quick_gelu", "relu2": "relu_squared",
}  # fmt: skip
# For each kind of rope_scaling: the class, and our names of required and of optional settings.
SCALINGS: dict[str, tuple[type[Any], dict[str, str], dict[str, str]]] = {
    "linear": (LinearScaling, {"factor": "factor"}, {}),
    "dynamic": (
        DynamicNTKScaling, {"factor": "factor", "max_position_embeddings": "original_length"}, {},
    ),
    "factors": (FactorScaling, {"factors": "factors"}, {}),  # as ``gguf`` reads Llama 3's
    "llama3": (
        Llama3Scaling,
        {
            "factor": "factor", "original_max_position_embeddings": "original_length",
            "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
        },
        {},
    ),
    "yarn": (
        YaRNScaling,
        {"factor": "factor", "original_max_position_embeddings": "original_length"},
        {
            "beta_fast": "beta_fast", "beta_slow": "beta_slow",
            "attention_factor": "attention_factor", "truncate": "truncate",
        },
    ),
    "longrope": (
        LongRoPEScaling,
        {
            "short_factor": "short_factors", "long_factor": "long_factors",
            "original_max_position_embeddings": "original_length", "factor": "factor",
        },
        {"attention_factor": "attention_factor"},
    ),
}  # fmt: skip
OLD_NAMES = {"su": "longrope"}  # of kinds of rope_scaling
MAGNITUDES = ("mscale", "mscale_all_dim")  # of YaRN: numerator and denominator
ORIGINAL, LONGEST = "original_max_position_embeddings", "max_position_embeddings"


class Settings:
    """The settings in a config.json, read and checked one at a time. Null counts as missing."""

    def __init__(self, values: Mapping[str, Any], name: str = "config.json") -> None:
        self.values, self.name = values, name

    def with_defaults(self, defaults: Mapping[str, Any]) -> Settings:
        """Return a copy in which ``defaults`` replace missing and null settings."""
        given = {key: value for key, value in self.values.items() if value is not None}
        return Settings({**defaults, **given}, self.name)

    def of_text(self, model_type: str) -> Settings:
        """Return the settings of a model's part for text, which are in text_config.

        ``model_type`` replaces theirs.
        """
        tied = {"tie_word_embeddings": self.get("tie_word_embeddings")}
        text = {**tied, **self.section("text_config"), "model_type": model_type}
        return Settings(text, f"{self.name}'s text_config")

    def get(self, key: str) -> Any:
        """Return the value of ``key``, or None if it is missing."""
        return self.values.get(key)

    def text(self, key: str, default: str | None = None) -> str:
        """Return setting ``key``, a string, or ``default`` if it is missing."""
        value = self._given(key, default)
        if not isinstance(value, str):
            raise ValueError(f"{self._called(key)} is {value!r}: expected a string")
        return value

    def count(self, key: str, default: int | None = None, low: int = 1, high: int = LARGEST) -> int:
        """Return setting ``key``, an integer from ``low`` to ``high``; ``default`` if missing."""
        value = integer(self._called(key), self._given(key, default), low)
        if value > high:
            raise ValueError(f"{self._called(key)} is {value}: expected at most {high}")
        return value

    def longest(self) -> int:
        """Return the model's maximum length in tokens.

        If RoPE's scaling is dynamic, it is the setting times the scaling's factor.
        """
        length = self.count(LONGEST)
        rules = Settings(self.section("rope_parameters") or self.section("rope_scaling"), "rope")
        if "dynamic" not in (rules.get("rope_type"), rules.get("type")):
            return length
        return int(length * rules.number("factor", 1.0, 1))

    def is_local(self, default: list[bool], kinds: tuple[str, ...] = KINDS) -> list[bool]:
        """Return for each layer whether the setting layer_types names it as ``kinds[0]``.

        False stands for ``kinds[1]``. If the setting is missing, return ``default``.
        """
        given = self.get("layer_types")
        if given is None:
            return default
        is_listed = isinstance(given, list | tuple) and all(kind in kinds for kind in given)
        if not is_listed or len(given) != len(default):
            named, each = self._called("layer_types"), " or ".join(kinds)
            each = f"{each} for each of {len(default)} layers"
            raise ValueError(f"{named} is {given!r}: expected {each}")
        return [kind == kinds[0] for kind in given]

    def quotient(self, key: str, divisor: str) -> int:
        """Return setting ``key`` divided by setting ``divisor``.

        Raises ValueError if the quotient is not an integer.
        """
        width, parts = self.count(key), self.count(divisor)
        if width % parts:
            raise ValueError(
                f"{self._called(key)} is {width} and its {divisor} {parts}: the first must be a "
                f"multiple of the second"
            )
        return width // parts

    def section(self, key: str) -> dict[str, Any]:
        """Return setting ``key``, an object, as a dict, which is empty if the key is missing."""
        value = self.get(key)
        if not isinstance(value, Mapping | None):
            raise TypeError(f"{self._called(key)} is {value!r}: expected an object")
        return {**(value or {})}

    def number(self, key: str, default: float | None = None, low: float = -math.inf) -> float:
        """Return setting ``key``, a finite number of at least ``low``, or ``default`` if missing.

        Raises ValueError if the setting is missing and there is no default.
        """
        return number(self._called(key), self._given(key, default), low=low)

    def flag(self, key: str, default: bool) -> bool:
        """Return setting ``key``, True or False, or ``default`` if it is missing."""
        return flag(self._called(key), self._given(key, default))

    def optional(self, key: str) -> float | None:
        """Return setting ``key``, a positive number, or None if it is missing."""
        return None if self.get(key) is None else self.number(key, low=POSITIVE)

    def expect(self, key: str, *values: Any) -> None:
        """Raise ValueError unless setting ``key`` is one of ``values`` or absent.

        Unlike in the other methods, null does not count as absent.
        """
        value = self.values.get(key, values[0])
        if value not in values:
            listed = " or ".join(map(repr, values))
            raise ValueError(f"{self._called(key)} is {value!r}: only {listed} is implemented")

    def activation(self, key: str, default: str) -> Activation:
        """Return minimha's name for the activation function that the setting ``key`` gives.

        ``default`` replaces a missing setting. It is a name of config.json, such as "gelu_new".
        """
        value = self.text(key, default)
        if value not in ACTIVATIONS:
            raise ValueError(
                f"{self._called(key)} is {value!r}: expected one of {', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[value]

    def rope(
        self, head_dim: int, kind: str = GLOBAL, base: float = 10000.0, partial: float = 1.0
    ) -> RoPE:
        """Return the rotary embedding of the layers of a ``kind``, such as "sliding_attention".

        It is read from rope_parameters, which transformers 5 writes, or from rope_theta and
        rope_scaling, which earlier versions write. ``base`` and ``partial`` (the rotated fraction
        of each head) are the defaults of missing settings.
        """
        old = "rope_theta" if kind == "full_attention" else "rope_local_base_freq"
        scaling = self.section("rope_scaling") if kind == "full_attention" else {}
        given = self.section("rope_parameters") or {"rope_theta": self.get(old), **scaling}
        parameters = Settings(given, f"{self.name}'s rope")
        parameters.values = parameters.section(kind) or given
        where = self if parameters.get("partial_rotary_factor") is None else parameters
        rotary = int(head_dim * where.number("partial_rotary_factor", partial))
        base = parameters.number("rope_theta", base if self.get(old) is None else self.number(old))
        rule = parameters._scaling({key: self.get(key) for key in (ORIGINAL, LONGEST)})
        rope = RoPE(head_dim, base, rotary_dim=rotary, scaling=rule)
        if rule is not None:
            rope.frequencies()  # raises here what would be raised when it is used
        return rope

    def _scaling(self, lengths: Mapping[str, Any]) -> Scaling | None:
        """Return the RoPE scaling; ``lengths`` are the model's original and largest lengths."""
        kind = self.get("rope_type") or self.get("type") or "default"
        if kind == "default":
            return None
        if isinstance(kind, str):
            kind = OLD_NAMES.get(kind, kind)
        if not isinstance(kind, str) or kind not in SCALINGS:
            known = ", ".join(["default", *SCALINGS])
            raise ValueError(f"{self._called('rope_type')} is {kind!r}: expected one of {known}")
        scaling, required, optional = SCALINGS[kind]
        known_keys = {"rope_type", "type", "rope_theta", "partial_rotary_factor", ORIGINAL}
        known_keys |= set(MAGNITUDES) if kind == "yarn" else set()
        for key in self.values:
            if key not in {*required, *optional, *known_keys} and self.get(key) is not None:
                raise ValueError(f"{self._called(key)} is {self.get(key)!r}: not implemented")
        self.values = self._with_lengths(kind, lengths)
        given = {ours: self._given(key, None) for key, ours in required.items()}
        given |= {
            ours: self.get(key) for key, ours in optional.items() if self.get(key) is not None
        }
        made: Scaling = scaling(**given)
        return made

    def _with_lengths(self, kind: str, lengths: Mapping[str, Any]) -> dict[str, Any]:
        """Return a scaling's settings, with those that follow from the lengths or the factor."""
        values = {**self.values}
        if lengths[ORIGINAL] is not None:  # where it was before transformers 5
            values[ORIGINAL] = lengths[ORIGINAL]
        for key in (ORIGINAL, LONGEST):
            if values.get(key) is None:
                values[key] = lengths[LONGEST]
        filled = Settings(values, self.name)
        if kind == "longrope" and self.get("factor") is None:
            values["factor"] = max(1, filled.count(LONGEST) / filled.count(ORIGINAL))
        has_both = kind == "yarn" and all(self.get(key) for key in MAGNITUDES)
        if has_both and self.get("attention_factor") is None:
            logarithm = 0.1 * math.log(filled.number("factor", low=1))
            top, bottom = (1 + filled.number(key, low=0) * logarithm for key in MAGNITUDES)
            values["attention_factor"] = top / bottom
        return values

    def _given(self, key: str, default: Any) -> Any:
        value = default if self.get(key) is None else self.get(key)
        if value is None:
            raise ValueError(f"{self._called(key)} is missing")
        return value

    def _called(self, key: str) -> str:
        return f"{self.name}'s {key}"
