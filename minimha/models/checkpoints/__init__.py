"""Checkpoints: config.json, safetensors and tokenizer.json in one folder, or one file of GGUF.

Nothing is downloaded, and no pickle is opened. A family of models is one module, which says what
its config.json means and what its tensors are called.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from numpy.typing import ArrayLike

from minimha.models.checkpoints import safetensors
from minimha.models.checkpoints.settings import Settings
from minimha.models.checkpoints.tensors import Tensors
from minimha.models.tokens import Tokenizer, from_file
from minimha.models.transformer import Transformer

if TYPE_CHECKING:
    from minimha.models.encoder import Encoder
    from minimha.models.encoder_decoder import EncoderDecoder

Model: TypeAlias = "Transformer | Encoder | EncoderDecoder"

# The module that reads each architecture, by ``model_type`` in config.json.
FAMILIES = {
    "gpt2": "gpt2",
    "llama": "llama", "mistral": "llama", "qwen2": "llama", "qwen3": "llama",
    "gemma2": "gemma", "gemma3_text": "gemma",
    "bert": "bert", "t5": "t5",
}  # fmt: skip


def load(path: str | Path) -> Model:
    """Return the model in a folder or a file on this machine.

    Weights in float32 stay in their files, from which the system reads them when they are used;
    those of 16 bits, and quantised ones, are widened to float32 once.

    Parameters
    ----------
    path : str or Path
        A folder with config.json, model.safetensors or its shards with their index and, for text,
        tokenizer.json; or a file whose name ends in .gguf.

    Returns
    -------
    Transformer, or an Encoder (BERT) or an EncoderDecoder (T5)

    Raises
    ------
    TypeError, ValueError
        No such folder or file, a file that is missing or damaged, weights in a pickle, an
        architecture or a setting that is not known, a tensor that is missing, left over or of
        another shape.

    Examples
    --------
    >>> load("no/such/folder")
    Traceback (most recent call last):
    ValueError: no/such/folder is no folder: expected one with config.json, or a .gguf file
    """
    folder = Path(path)
    if folder.suffix == ".gguf":
        from minimha.models.checkpoints import gguf, gguf_tokens

        config, tensors, metadata = gguf.read(folder)
        return _model(config, tensors, gguf_tokens.tokenizer(metadata))
    safetensors.check_no_pickle(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: expected one with config.json, or a .gguf file")
    tokenizer = folder / "tokenizer.json"
    return from_tensors(
        read_json(folder / "config.json"),
        safetensors.read_folder(folder),
        from_file(tokenizer) if tokenizer.exists() else None,
    )


def from_tensors(
    config: Mapping[str, Any],
    tensors: Mapping[str, ArrayLike],
    tokenizer: Tokenizer | None = None,
) -> Model:
    """Return the model of a checkpoint that is in memory.

    Parameters
    ----------
    config : mapping
        What config.json holds.
    tensors : mapping of str to array_like
        The weights under their names in the checkpoint; float32 arrays are used as they are.
    tokenizer : Tokenizer, optional

    Raises
    ------
    TypeError, ValueError
        As ``load``.
    """
    return _model(Settings(config), tensors, tokenizer)


def _model(
    settings: Settings, tensors: Mapping[str, ArrayLike], tokenizer: Tokenizer | None
) -> Model:
    architecture = settings.text("model_type")
    if architecture not in FAMILIES:
        raise ValueError(
            f"{settings.name}'s model_type is {architecture!r}: expected one of "
            f"{', '.join(FAMILIES)}"
        )
    settings.expect("quantization_config", None)
    family = import_module(f"{__name__}.{FAMILIES[architecture]}")
    weights = Tensors(tensors)
    model: Model = family.transformer(settings, weights, tokenizer)
    weights.check_all_taken()
    return model


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; a ValueError says what is wrong with it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}: expected an object")
    return value
