"""Load models from folders with config.json and safetensors files, or from GGUF files.

Nothing is downloaded, and no pickle is opened. Each family of models has a module, which
defines the keys of its config.json and the names of its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from numpy.typing import ArrayLike

from minimha.equations.arguments import choice
from minimha.models.checkpoints import safetensors
from minimha.models.checkpoints.settings import Settings
from minimha.models.checkpoints.tensors import Tensors
from minimha.models.files import read_json
from minimha.models.tokens import Tokenizer, ends, from_file
from minimha.models.transformer import Transformer

if TYPE_CHECKING:
    from minimha.models.encoder import Encoder
    from minimha.models.encoder_decoder import EncoderDecoder

DTYPES = ("float32", "bfloat16")
Model: TypeAlias = "Transformer | Encoder | EncoderDecoder"

# The module that reads each architecture, by ``model_type`` in config.json.
FAMILIES = {
    "gpt2": "gpt2", "gpt_neox": "gpt_neox",
    "llama": "llama", "mistral": "llama", "qwen2": "llama", "qwen3": "llama",
    "phi3": "llama", "olmo2": "llama", "olmo3": "llama",
    "smollm3": "llama", "mixtral": "llama", "qwen2_moe": "llama", "qwen3_moe": "llama",
    "olmoe": "llama", "gpt_oss": "llama", "deepseek_v2": "llama", "deepseek_v3": "llama",
    "qwen3_next": "llama", "qwen3_5": "llama", "qwen3_5_text": "llama",
    "deepseek_v32": "llama",
    "gemma": "gemma", "gemma2": "gemma", "gemma3_text": "gemma", "gemma3": "gemma",
    "bert": "bert", "roberta": "bert", "xlm-roberta": "bert", "camembert": "bert",
    "modernbert": "modernbert", "t5": "t5",
}  # fmt: skip


# What others need that is not implemented, and the nearest family that works.
NEAREST = {
    "cohere": ("layer norms without biases", "gpt_neox"), "falcon": ("one key for all", "gpt_neox"),
    "glm_moe_dsa": ("an indexer for some layers", "deepseek_v32"), "whisper": ("sound", "t5"),
    "gemma3n": ("rows for each layer", "gemma3"), "glm4_moe": ("DeepSeek's experts", "qwen3_moe"),
    "granite": ("factors of embeddings, residuals and logits", "llama"), "bloom": ("ALiBi", "gpt2"),
    "nomic_bert": ("RoPE and norms of sums", "bert"), "stablelm": ("layer norms", "llama"),
    "kimi_linear": ("a decay per channel", "qwen3_next"),
    "qwen3_5_moe": ("experts in one tensor", "qwen3_next"),
    "phi": ("one norm for parallel parts", "gpt_neox"), "starcoder2": ("layer norms", "mistral"),
}  # fmt: skip


def load(path: str | Path, dtype: Literal["float32", "bfloat16"] = "float32") -> Model:
    """Load a model from a local folder or GGUF file.

    Matrices are memory-mapped as they are stored: in float32, in 16 bits or quantised. They are
    widened when they are used, or multiplied as bytes, with the accuracy of float32. Of gpt-oss in
    bfloat16, two thirds of each expert's matrices are copied, in 16 bits. GGUF types other than
    F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K become float32 when the model is
    loaded.

    Parameters
    ----------
    path : str or Path
        A folder with config.json, weights (model.safetensors, or shards with their index) and, for
        text, tokenizer.json; or a file whose name ends in .gguf.
    dtype : {"float32", "bfloat16"}, default "float32"
        The accuracy of matrix products with many rows, as when a prompt is read. With "bfloat16",
        rows and matrices are rounded to bfloat16 if the CPU has a matrix unit, or instructions for
        pairs of bfloat16 numbers. Sums are float32.

    Returns
    -------
    Transformer, Encoder (BERT, ModernBERT) or EncoderDecoder (T5)

    Raises
    ------
    TypeError, ValueError
        A missing or damaged file, weights in a pickle, an unknown architecture or setting, or a
        tensor that is missing, unused or of a wrong shape.

    Notes
    -----
    The supported models and their features, by module of ``minimha.models.checkpoints``:

    ==========  ======================================  ========================================
    module      model_type in config.json               features
    ==========  ======================================  ========================================
    gpt2        gpt2                                    learned positions, layer norms
    gpt_neox    gpt_neox                                attention and feed-forward side by side
    llama       llama, mistral, qwen2, qwen3, phi3,     RoPE with any scaling below, windows,
                olmo2, olmo3, smollm3, mixtral,         norms of inputs, outputs, queries and
                qwen2_moe, qwen3_moe, olmoe, gpt_oss    keys, mixtures of experts, sinks, MXFP4
    llama       deepseek_v2, deepseek_v3, deepseek_v32  latent attention, groups of experts, indexer
    llama       qwen3_next, qwen3_5_text, qwen3_5       gated delta nets, gates; text only
    gemma       gemma, gemma2, gemma3_text, gemma3      caps, local layers; text only
    bert        bert, roberta, xlm-roberta, camembert   encoders, with the head of masked tokens
    modernbert  modernbert                              an encoder with RoPE and local layers
    t5          t5                                      an encoder and a decoder, relative positions
    ==========  ======================================  ========================================

    RoPE's scalings are linear, dynamic, yarn, llama3 and longrope. With partial_rotary_factor, RoPE
    rotates only a part of each head.

    Examples
    --------
    >>> load("no/such/folder")
    Traceback (most recent call last):
    ValueError: no/such/folder is no folder: expected one with config.json, or a .gguf file
    """
    folder, dtype = Path(path), choice("dtype", dtype, DTYPES)
    if folder.suffix == ".gguf":
        from minimha.models.checkpoints import gguf, gguf_tokens

        settings, tensors, metadata = gguf.read(folder)
        return _model(settings, tensors, gguf_tokens.tokenizer(metadata), dtype)
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
        dtype,
    )


def from_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, ArrayLike],
    tokenizer: Tokenizer | None = None, dtype: Literal["float32", "bfloat16"] = "float32",
) -> Model:  # fmt: skip
    """Build a model from the content of its config.json and its tensors.

    Parameters
    ----------
    config : mapping
        The content of config.json.
    tensors : mapping of str to array_like
        The weights under their names in the checkpoint. Matrices that ``load`` would map are not
        copied.
    tokenizer : Tokenizer, optional
        Converts text. Without a tokenizer, the model accepts only token ids.
    dtype : {"float32", "bfloat16"}, default "float32"
        As in ``load``.

    Raises
    ------
    TypeError, ValueError
        An unknown architecture or setting, or a tensor that is missing, unused or of a wrong shape.
    """
    return _model(Settings(config), tensors, tokenizer, dtype)


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
    settings: Settings, tensors: Mapping[str, ArrayLike], tokenizer: Tokenizer | None, dtype: str
) -> Model:
    weights = Tensors(tensors, is_rounded=dtype == "bfloat16")
    model: Model = _family(settings).transformer(settings, weights, tokenizer)
    weights.check_all_taken()
    eos = ends(f"{settings.name}'s eos_token_id", settings.get("eos_token_id"))
    return replace(model, config=replace(model.config, eos=eos))
