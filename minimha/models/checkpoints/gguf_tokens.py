"""Build the tokenizer of a GGUF file with the package ``tokenizers``.

There are two kinds. "gpt2" is byte-level BPE; its GGUF files name a rule that splits text into
words.
"llama", for LLaMA 2 and Gemma, is SentencePiece's BPE, which merges the pair of pieces with the
best score.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from minimha.models.chat import Template
from minimha.models.checkpoints.settings import Settings
from minimha.models.tokens import SubwordTokenizer, library

LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SHORT = r"'s|'t|'re|'ve|'m|'ll|'d"
GPT2 = rf"{SHORT}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
LATER = rf"(?i:{SHORT})|{LETTERS}|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# For each tokenizer.ggml.pre: the regular expressions that split a text, one after the other.
WORDS = {
    "gpt-2": (GPT2,), "default": (GPT2,),
    "smollm": (r"\p{N}", GPT2),
    "llama-bpe": (LATER % r"\p{N}{1,3}",),
    "qwen2": (LATER % r"\p{N}",),
}  # fmt: skip
CONTROL, USER_DEFINED = 3, 4  # values in tokenizer.ggml.token_type
KINDS = ("gpt2", "llama")


def tokenizer(metadata: Settings) -> SubwordTokenizer | None:
    """Return the tokenizer that a GGUF file's ``metadata`` describes.

    Return None if the file has none. Raise ValueError for an unknown kind.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    if kind not in KINDS:
        raise ValueError(
            f"{metadata.name}'s tokenizer.ggml.model is {kind!r}: expected one of "
            f"{', '.join(KINDS)}"
        )
    tokenizers, tokens = library(metadata.name), _list(metadata, "tokens")
    build = _byte_level if kind == "gpt2" else _sentence_piece
    numbers = {token: n for n, token in enumerate(tokens)}
    try:
        built = build(tokenizers, metadata, numbers)
    except ValueError:
        raise
    except Exception as error:  # tokenizers raises no other type
        raise ValueError(f"{metadata.name}'s tokenizer cannot be built: {error}") from error
    marks = {CONTROL: built.add_special_tokens, USER_DEFINED: built.add_tokens}
    types = metadata.get("tokenizer.ggml.token_type") or []
    for mark, add in marks.items():
        marked = [t for t, its in zip(tokens, types, strict=False) if its == mark]
        add([tokenizers.AddedToken(t, normalized=False, special=mark == CONTROL) for t in marked])
    begins = kind == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    if metadata.flag("tokenizer.ggml.add_bos_token", begins):
        first = _token(metadata, "bos", tokens)
        built.post_processor = tokenizers.processors.TemplateProcessing(
            single=[first, "$A"], special_tokens=[(first, tokens.index(first))]
        )
    return SubwordTokenizer(built, _template(metadata, tokens))


def _template(metadata: Settings, tokens: list[str]) -> partial[Template] | None:
    """Return a function that makes the chat template, if there is one."""
    if metadata.get("tokenizer.chat_template") is None:
        return None
    ids = {role: metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos")}
    special = {
        f"{role}_token": _token(metadata, role, tokens) for role in ids if ids[role] is not None
    }
    return partial(Template, metadata.name, metadata.text("tokenizer.chat_template"), special)


def _byte_level(tokenizers: Any, metadata: Settings, numbers: dict[str, int]) -> Any:
    """Build GPT-2's tokenizer, which splits text into words and bytes, then merges pairs."""
    pre = metadata.get("tokenizer.ggml.pre") or "default"
    if pre not in WORDS:
        raise ValueError(
            f"{metadata.name}'s tokenizer.ggml.pre is {pre!r}: expected one of {', '.join(WORDS)}"
        )
    merges = [tuple(pair.split(" ")) for pair in _list(metadata, "merges")]
    built = tokenizers.Tokenizer(
        tokenizers.models.BPE(numbers, merges, ignore_merges=pre == "llama-bpe")
    )
    cuts = [
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(words), "isolated") for words in WORDS[pre]
    ]
    to_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*cuts, to_bytes])
    built.decoder = tokenizers.decoders.ByteLevel()
    return built


def _sentence_piece(tokenizers: Any, metadata: Settings, numbers: dict[str, int]) -> Any:
    """Build SentencePiece's tokenizer, where a space is ▁ and unknown characters become bytes."""
    model = tokenizers.models.BPE(
        numbers, _merges(numbers, _list(metadata, "scores")), fuse_unk=True, byte_fallback=True,
        unk_token=_token(metadata, "unknown", list(numbers)),
    )  # fmt: skip
    built = tokenizers.Tokenizer(model)
    spaces = [tokenizers.normalizers.Replace(" ", "▁")]
    decoders = tokenizers.decoders
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.flag("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, tokenizers.normalizers.Prepend("▁"))
        steps.append(decoders.Strip(" ", 1, 0))
    built.normalizer = tokenizers.normalizers.Sequence(spaces)
    built.decoder = decoders.Sequence(steps)
    return built


def _merges(numbers: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return the pairs of pieces whose concatenation is a piece, best score first."""
    pairs = [
        (-scores[number], numbers[piece[:cut]], numbers[piece[cut:]])
        for piece, number in numbers.items()
        for cut in range(1, len(piece))
        if piece[:cut] in numbers and piece[cut:] in numbers
    ]
    pieces = list(numbers)
    return [(pieces[left], pieces[right]) for _, left, right in sorted(pairs)]


def _token(metadata: Settings, role: str, tokens: list[str]) -> str:
    key = f"tokenizer.ggml.{role}_token_id"
    number = metadata.get(key)
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise ValueError(
            f"{metadata.name}'s {key} is {number!r}: expected 0 to {len(tokens) - 1}, the "
            f"vocabulary's tokens"
        )
    return tokens[number]


def _list(metadata: Settings, name: str) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list):
        raise ValueError(f"{metadata.name}'s tokenizer.ggml.{name} is {value!r}: expected a list")
    return value
