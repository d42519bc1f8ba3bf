"""The sizes of known models, and the features in which they differ.

Letters: ``E`` = d_model, ``H`` = num_heads, ``Hkv`` = num_kv_heads, ``D`` = head_dim, ``F`` = d_ff,
``V`` = vocabulary. Where a source is a checkpoint, its config.json has the sizes.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal

from minimha.equations.arguments import flag, integer


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts in place of a gated feed-forward.

    Attributes
    ----------
    experts, chosen : int
        The number of experts of a layer, and the number of experts that compute each token.
    d_ff : int
        The width inside one expert.
    shared : int, default 0
        The width inside the expert that computes every token; 0 if there is none.
    dense_layers : int, default 0
        The number of layers at the start that have a plain feed-forward of the preset's width d_ff.
    has_biases : bool, default False
        Whether router and experts have biases.
    has_router_bias : bool, default False
        Whether the router has a bias that affects only the choice of experts (DeepSeek V3).
    has_shared_gate : bool, default False
        Whether a row of E weights gates the shared expert (Qwen).
    """

    experts: int
    chosen: int
    d_ff: int
    shared: int = 0
    dense_layers: int = 0
    has_biases: bool = False
    has_router_bias: bool = False
    has_shared_gate: bool = False


@dataclass(frozen=True)
class Latent:
    """Widths of latent attention (DeepSeek-V2, 2024, section 2.1), which caches one row per token.

    Attributes
    ----------
    queries, keys : int
        The width of a query's latent row, and of the latent row from which keys and values come.
    plain, rotated : int
        The widths of a key's unrotated and rotated parts. All heads share the rotated part.
    values : int
        The width of a head's values.
    """

    queries: int
    keys: int
    plain: int
    rotated: int
    values: int


@dataclass(frozen=True)
class Indexer:
    """A lightning indexer (DeepSeek-V3.2, 2025), which chooses ``keys`` keys for each query.

    It has ``heads`` query heads of width ``head_dim``, and one key of that width per token.
    """

    heads: int
    head_dim: int
    keys: int


@dataclass(frozen=True)
class Delta:
    """Layers with the gated delta rule, except each ``every``-th, which has softmax attention.

    Queries and keys have ``key_heads`` heads, values have ``value_heads``, all of width
    ``head_dim``. A convolution over ``convolution`` tokens precedes the rule.
    """

    every: int
    key_heads: int
    value_heads: int
    head_dim: int
    convolution: int = 4


@dataclass(frozen=True)
class Preset:
    """The sizes and architecture of a model such as GPT-2 Small.

    Attributes
    ----------
    name : str
    year : int
        When the model was published.
    layers : int
    d_model : int
        E, the model width.
    num_heads, num_kv_heads : int
        H and Hkv; H must be a multiple of Hkv.
    head_dim : int
        D, the width of queries, keys and values. With ``latent``, the width of a whole key.
    d_ff : int
        F, the width inside the feed-forward.
    vocabulary : int
        V, the rows of the token embedding.
    max_length : int
        The largest number of tokens that the model can read.
    is_gated : bool
        Whether the feed-forward has three matrices (a gate, as in SwiGLU) instead of two.
    has_biases : bool
        Whether projections have a bias and norms are LayerNorms. If False, projections have no
        bias, and norms are RMSNorms, which have only a gain.
    is_tied : bool
        Whether the token embedding is also the unembedding.
    positions : str
        "learned" (max_length rows of weights), or how positions enter without weights.
    source : str
        The publication or checkpoint that gives the sizes.
    is_causal : bool, default True
        True for a decoder, False for an encoder. An encoder ends in BERT's pooler, an (E, E) matrix
        applied to the first token, instead of an unembedding.
    num_segments : int, default 0
        The number of rows of the segment embedding.
    window : int, optional
        The largest number of keys that a decoder's query attends to, its own included. Older keys
        are not cached. Default is all.
    global_every : int, optional
        n, if every n-th layer has no window. By default all layers have the ``window``, if any.
    norms_per_layer : int, default 2
        The number of norms of E numbers in a layer.
    qk_norm : {None, "head", "full"}, default None
        The normalisation of queries and keys: of each head, of all heads together, or None if they
        are not normalised.
    has_attention_biases : bool, default False
        Whether attention's projections have biases although ``has_biases`` is False.
    has_sinks : bool, default False
        Whether each head has a sink.
    has_gate : bool, default False
        Whether attention's output is multiplied by a gate, which W_q computes as further columns.
    softcap, logit_softcap : int, optional
        The caps of the scores and of the logits.
    mixture, latent, indexer, delta : Mixture, Latent, Indexer, Delta, optional
        Each is described by its class. Default is None: the model has no such part.

    Raises
    ------
    TypeError, ValueError
        A size is not a positive integer (num_segments may be 0), a flag is not True or False, H is
        not a multiple of Hkv, or an encoder has a window.
    """

    name: str
    year: int
    layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    vocabulary: int
    max_length: int
    is_gated: bool
    has_biases: bool
    is_tied: bool
    positions: str
    source: str
    is_causal: bool = True
    num_segments: int = 0
    window: int | None = None
    global_every: int | None = None
    norms_per_layer: int = 2
    qk_norm: Literal["head", "full"] | None = None
    has_attention_biases: bool = False
    has_sinks: bool = False
    has_gate: bool = False
    softcap: int | None = None
    logit_softcap: int | None = None
    mixture: Mixture | None = None
    latent: Latent | None = None
    indexer: Indexer | None = None
    delta: Delta | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            name, value = each.name, getattr(self, each.name)
            if each.type is bool:
                object.__setattr__(self, name, flag(name, value))
            elif each.type is int or (each.type == int | None and value is not None):
                low = 0 if name == "num_segments" else 1
                object.__setattr__(self, name, integer(name, value, low))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads is {self.num_kv_heads} but num_heads is {self.num_heads}: H must be "
                f"a multiple of Hkv"
            )
        if self.window is not None and not self.is_causal:
            raise ValueError(
                f"window is {self.window} but is_causal is False: only a decoder has a window, "
                f"whose queries see the latest keys"
            )

    @property
    def attention_layers(self) -> int:
        """The number of layers with softmax attention."""
        return self.layers // self.delta.every if self.delta else self.layers

    @property
    def local_layers(self) -> int:
        """The number of layers in which a query sees only a window."""
        if self.window is None:
            return 0
        return self.layers - (self.layers // self.global_every if self.global_every else 0)


BERT: dict[str, Any] = {
    "vocabulary": 30522, "max_length": 512, "is_gated": False, "has_biases": True,
    "is_tied": True, "positions": "learned", "is_causal": False, "num_segments": 2,
    "source": "Devlin et al., BERT, 2018, section 3",
}  # fmt: skip
# GPT-2's paper prints 117M and 762M; the weights released with it hold 124M and 774M.
GPT2: dict[str, Any] = {
    "vocabulary": 50257, "max_length": 1024, "is_gated": False, "has_biases": True,
    "is_tied": True, "positions": "learned",
    "source": "Radford et al., 2019, table 2, and its released weights",
}  # fmt: skip
# Every second layer of GPT-3 sees a band of unpublished width: counted as if dense.
GPT3 = GPT2 | {"max_length": 2048, "source": "Brown et al., 2020, table 2.1"}
NEOX = GPT3 | {
    "vocabulary": 50432, "is_tied": False, "positions": "RoPE on 1/4 of a head",
    "source": "Black et al., 2022, and EleutherAI/gpt-neox-20b",
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "vocabulary": 32000, "max_length": 2048, "is_gated": True, "has_biases": False,
    "is_tied": False, "positions": "RoPE", "source": "Touvron et al., LLaMA, 2023, table 2",
}  # fmt: skip
LLAMA2 = LLAMA | {"max_length": 4096, "source": "Touvron et al., Llama 2, 2023, table 1"}
LLAMA3 = LLAMA | {
    "vocabulary": 128256, "max_length": 8192,
    "source": "Llama Team, 2024, table 3, and its first release",
}  # fmt: skip
MISTRAL = LLAMA3 | {"vocabulary": 32000, "window": 4096, "source": "Jiang et al., 2023, table 1"}
MIXTRAL = LLAMA | {
    "max_length": 32768, "mixture": Mixture(8, 2, 14336),
    "source": "Jiang et al., Mixtral, 2024, table 1",
}  # fmt: skip
PHI3 = LLAMA | {
    "vocabulary": 32064, "max_length": 4096, "window": 2047,
    "source": "Abdin et al., 2024, and microsoft/Phi-3-mini-4k-instruct",
}  # fmt: skip
GEMMA2 = LLAMA | {
    "vocabulary": 256000, "max_length": 8192, "is_tied": True, "window": 4096, "global_every": 2,
    "norms_per_layer": 4, "softcap": 50, "logit_softcap": 30,
    "source": "Gemma Team, 2024 (Gemma 2), table 1",
}  # fmt: skip
GEMMA3 = LLAMA | {
    "vocabulary": 262208, "max_length": 131072, "is_tied": True, "window": 1024, "global_every": 6,
    "norms_per_layer": 4, "qk_norm": "head", "positions": "RoPE, two bases",
    "source": "Gemma Team, 2025 (Gemma 3), and google/gemma-3-27b-it, its part for text",
}  # fmt: skip
OLMO2 = LLAMA | {
    "vocabulary": 100352, "max_length": 4096, "qk_norm": "full",
    "source": "Team OLMo, 2024 (OLMo 2), and allenai/OLMo-2-1124-7B",
}  # fmt: skip
QWEN3 = LLAMA | {
    "vocabulary": 151936, "max_length": 40960, "qk_norm": "head",
    "source": "Qwen Team, 2025 (Qwen3), tables 1 and 2, and its checkpoints",
}  # fmt: skip
SMOLLM3 = LLAMA | {
    "vocabulary": 128256, "max_length": 65536, "is_tied": True,
    "positions": "RoPE, not in each 4th layer", "source": "HuggingFaceTB/SmolLM3-3B, 2025",
}  # fmt: skip
GPT_OSS = LLAMA | {
    "vocabulary": 201088, "max_length": 131072, "window": 128, "global_every": 2,
    "has_attention_biases": True, "has_sinks": True, "source": "OpenAI, gpt-oss model card, 2025",
}  # fmt: skip
DEEPSEEK3 = LLAMA | {
    "vocabulary": 129280, "max_length": 163840, "positions": "RoPE on 1/3 of a head",
    "mixture": Mixture(256, 8, 2048, shared=2048, dense_layers=3, has_router_bias=True),
    "latent": Latent(1536, 512, 128, 64, 128), "source": "DeepSeek-AI, 2024 (DeepSeek-V3), 4.2",
}  # fmt: skip
QWEN3_NEXT = LLAMA | {
    "vocabulary": 151936, "max_length": 262144, "qk_norm": "head", "has_gate": True,
    "positions": "RoPE on 1/4 of a head", "delta": Delta(4, 16, 32, 128),
    "mixture": Mixture(512, 10, 512, shared=512, has_shared_gate=True),
    "source": "Qwen/Qwen3-Next-80B-A3B-Instruct, 2025",
}  # fmt: skip
GLM5 = DEEPSEEK3 | {
    "vocabulary": 154880, "max_length": 202752, "positions": "RoPE on 1/4 of a head",
    "latent": Latent(2048, 512, 192, 64, 256), "indexer": Indexer(32, 128, 2048),
    "source": "GLM-5, 2026, as transformers' GlmMoeDsaConfig has it",
}  # fmt: skip
PRESETS = {
    name: Preset(name, year, *sizes, **family)
    for name, year, sizes, family in (  # layers, E, H, Hkv, D, F
        ("BERT-Base", 2018, (12, 768, 12, 12, 64, 3072), BERT),
        ("BERT-Large", 2018, (24, 1024, 16, 16, 64, 4096), BERT),
        ("GPT-2 Small", 2019, (12, 768, 12, 12, 64, 3072), GPT2),
        ("GPT-2 Large", 2019, (36, 1280, 20, 20, 64, 5120), GPT2),
        ("GPT-3", 2020, (96, 12288, 96, 96, 128, 49152), GPT3),
        ("GPT-NeoX-20B", 2022, (44, 6144, 64, 64, 96, 24576), NEOX),
        ("LLaMA-7B", 2023, (32, 4096, 32, 32, 128, 11008), LLAMA),
        ("Llama-2-70B", 2023, (80, 8192, 64, 8, 128, 28672), LLAMA2),
        ("Mistral-7B", 2023, (32, 4096, 32, 8, 128, 14336), MISTRAL),
        ("Mixtral-8x7B", 2024, (32, 4096, 32, 8, 128, 14336), MIXTRAL),
        ("Phi-3-mini", 2024, (32, 3072, 32, 32, 96, 8192), PHI3),
        ("Llama-3-8B", 2024, (32, 4096, 32, 8, 128, 14336), LLAMA3),
        ("Llama-3-70B", 2024, (80, 8192, 64, 8, 128, 28672), LLAMA3),
        ("Gemma-2-9B", 2024, (42, 3584, 16, 8, 256, 14336), GEMMA2),
        ("OLMo-2-7B", 2024, (32, 4096, 32, 32, 128, 11008), OLMO2),
        ("DeepSeek-V3", 2024, (61, 7168, 128, 128, 192, 18432), DEEPSEEK3),
        ("Gemma-3-27B", 2025, (62, 5376, 32, 16, 128, 21504), GEMMA3),
        ("Qwen3-8B", 2025, (36, 4096, 32, 8, 128, 12288), QWEN3),
        ("Qwen3-30B", 2025, (48, 2048, 32, 4, 128, 6144),
         QWEN3 | {"mixture": Mixture(128, 8, 768)}),
        ("SmolLM3-3B", 2025, (36, 2048, 16, 4, 128, 11008), SMOLLM3),
        ("gpt-oss-20b", 2025, (24, 2880, 64, 8, 64, 2880),
         GPT_OSS | {"mixture": Mixture(32, 4, 2880, has_biases=True)}),
        ("gpt-oss-120b", 2025, (36, 2880, 64, 8, 64, 2880),
         GPT_OSS | {"mixture": Mixture(128, 4, 2880, has_biases=True)}),
        ("Qwen3-Next", 2025, (48, 2048, 16, 2, 256, 5120), QWEN3_NEXT),
        ("DeepSeek-V3.2", 2025, (61, 7168, 128, 128, 192, 18432),
         DEEPSEEK3 | {"indexer": Indexer(64, 128, 2048),
                      "source": "DeepSeek-AI, 2025 (DeepSeek-V3.2), and its checkpoint"}),
        ("GLM-5", 2026, (78, 6144, 64, 64, 256, 12288), GLM5),
    )
}  # fmt: skip


def find(name: str) -> Preset:
    """Return the preset called ``name``; case, spaces and punctuation are ignored.

    >>> find("gpt3").name, find("llama 3 8b").num_kv_heads
    ('GPT-3', 8)
    """
    if not isinstance(name, str):
        raise TypeError(f"preset is {name!r}: expected a name, one of {', '.join(PRESETS)}")
    for preset in PRESETS.values():
        if _letters(preset.name) == _letters(name):
            return preset
    raise ValueError(f"preset is {name!r}: expected one of {', '.join(PRESETS)}")


def _letters(name: str) -> str:
    return "".join(sign for sign in name.casefold() if sign.isalnum())
