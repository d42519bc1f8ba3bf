"""Load checkpoints: a folder with config.json, safetensors and tokenizer.json, or a GGUF file.

Nothing is downloaded, and no pickle is opened. Each family of models has a module, which
knows the keys of its config.json and the names of its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from numpy.typing import ArrayLike

from minimha.models.checkpoints import safetensors
from minimha.models.checkpoints.settings import Settings
from minimha.models.checkpoints.tensors import Tensors
from minimha.models.files import read_json
from minimha.models.tokens import Tokenizer, ends, from_file
from minimha.models.transformer import Transformer

if TYPE_CHECKING:
    from minimha.models.encoder import Encoder
    from minimha.models.encoder_decoder import EncoderDecoder

Model: TypeAlias = "Transformer | Encoder | EncoderDecoder"

# The module that reads each architecture, by ``model_type`` in config.json.
FAMILIES = {
    "gpt2": "gpt2", "gpt_neox": "gpt_neox",
    "llama": "llama", "mistral": "llama", "qwen2": "llama", "qwen3": "llama",
    "phi3": "llama", "olmo2": "llama", "olmo3": "llama",
    "smollm3": "llama", "mixtral": "llama", "qwen2_moe": "llama", "qwen3_moe": "llama",
    "olmoe": "llama", "gpt_oss": "llama",
    "gemma": "gemma", "gemma2": "gemma", "gemma3_text": "gemma", "gemma3": "gemma",
    "bert": "bert", "roberta": "bert", "xlm-roberta": "bert", "camembert": "bert", "t5": "t5",
}  # fmt: skip


# What others need that is not implemented, and the nearest family that works.
NEAREST = {
    "cohere": ("layer norms without biases", "gpt_neox"), "falcon": ("one key for all", "gpt_neox"),
    "deepseek_v2": ("latent attention", "qwen2_moe"), "gemma3n": ("rows for each layer", "gemma3"),
    "deepseek_v3": ("latent attention, groups of experts", "qwen3_moe"), "whisper": ("sound", "t5"),
    "granite": ("factors of embeddings, residuals and logits", "llama"), "bloom": ("ALiBi", "gpt2"),
    "modernbert": ("windows and RoPE in an encoder", "bert"), "stablelm": ("layer norms", "llama"),
    "phi": ("one norm for parallel parts", "gpt_neox"), "starcoder2": ("layer norms", "mistral"),
}  # fmt: skip


def load(path: str | Path) -> Model:
    """Load a model from a folder or a file on this machine.

    Weights in float32 stay in their files and are read when they are used. Weights of 16 bits, and
    quantised weights, are converted to float32 once.

    Parameters
    ----------
    path : str or Path
        A folder with config.json, weights (model.safetensors, or shards with their index) and, for
        text, tokenizer.json; or a file whose name ends in .gguf.

    Returns
    -------
    Transformer, or an Encoder (BERT) or an EncoderDecoder (T5)

    Raises
    ------
    TypeError, ValueError
        A missing or damaged file, weights in a pickle, an unknown architecture or setting, or a
        tensor that is missing, unused or misshapen.

    Notes
    -----
    What of each family is computed, by its module in ``minimha.models.checkpoints``:

    ========  ======================================  ==========================================
    module    model_type in config.json               features
    ========  ======================================  ==========================================
    gpt2      gpt2                                    learned positions, layer norms
    gpt_neox  gpt_neox                                attention and feed-forward side by side
    llama     llama, mistral, qwen2, qwen3, phi3,     RoPE with any scaling below, windows,
              olmo2, olmo3, smollm3, mixtral,         norms of inputs, outputs, queries and
              qwen2_moe, qwen3_moe, olmoe, gpt_oss    keys, mixtures of experts, sinks, MXFP4
    gemma     gemma, gemma2, gemma3_text, gemma3      caps, local layers; of images no part
    bert      bert, roberta, xlm-roberta, camembert   encoders, with the head of masked tokens
    t5        t5                                      an encoder and a decoder, relative positions
    ========  ======================================  ==========================================

    RoPE's scalings are linear, dynamic, yarn, llama3 and longrope, and partial_rotary_factor.

    Examples
    --------
    >>> load("no/such/folder")
    Traceback (most recent call last):
    ValueError: no/such/folder is no folder: expected one with config.json, or a .gguf file
    """
    folder = Path(path)
    if folder.suffix == ".gguf":
        from minimha.models.checkpoints import gguf, gguf_tokens

        settings, tensors, metadata = gguf.read(folder)
        return _model(settings, tensors, gguf_tokens.tokenizer(metadata))
    safetensors.check_no_pickle(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: expected one with config.json, or a .gguf file")
    config = read_json(folder / "config.json")
    settings = Settings(config)
    _family(settings).read_config(settings)  # refuse what is unknown before reading anything large
    tokenizer, generation = folder / "tokenizer.json", folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    return from_tensors(
        config if eos is None else config | {"eos_token_id": eos},
        safetensors.read_folder(folder),
        from_file(tokenizer) if tokenizer.exists() else None,
    )


def from_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, ArrayLike], tokenizer: Tokenizer | None = None
) -> Model:
    """Return the model with the settings ``config`` and the weights ``tensors``.

    Parameters
    ----------
    config : mapping
        The content of config.json.
    tensors : mapping of str to array_like
        The weights under their names in the checkpoint; float32 arrays are not copied.
    tokenizer : Tokenizer, optional

    Raises
    ------
    TypeError, ValueError
        As ``load``.
    """
    return _model(Settings(config), tensors, tokenizer)


def _family(settings: Settings) -> Any:
    """Return the module for this model's family."""
    architecture = settings.text("model_type")
    if architecture not in FAMILIES:
        feature, near = NEAREST.get(architecture, (None, None))
        needs = f", which needs {feature} (the nearest that works is {near})" if near else ""
        raise ValueError(
            f"{settings.name}'s model_type is {architecture!r}{needs}: expected one of "
            f"{', '.join(FAMILIES)}"
        )
    is_mxfp4 = settings.section("quantization_config").get("quant_method") == "mxfp4"
    if not is_mxfp4 or architecture != "gpt_oss":
        settings.expect("quantization_config", None)
    return import_module(f"{__name__}.{FAMILIES[architecture]}")


def _model(
    settings: Settings, tensors: Mapping[str, ArrayLike], tokenizer: Tokenizer | None
) -> Model:
    weights = Tensors(tensors)
    model: Model = _family(settings).transformer(settings, weights, tokenizer)
    weights.check_all_taken()
    eos = ends(f"{settings.name}'s eos_token_id", settings.get("eos_token_id"))
    return replace(model, config=replace(model.config, eos=eos))
