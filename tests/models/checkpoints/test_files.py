"""Folders of checkpoints: what is read, and the sentence that says why one is not."""

import gc
import json
import os
import pickle
import re
import struct
import sys
import time
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from models import plain

from minimha.models import load
from minimha.models.checkpoints import from_tensors

IDS = [1, 2, 3, 4]
LLAMA = plain.LLAMA
SPLIT = re.compile(r"\b(q|k|v|gate|up)_proj")  # what Phi stores as one
GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def tensors():
    return plain.llama_tensors(np.random.default_rng(0))


# What Linux says of this process's mapped files, and whether it has pages of 2 MB.
SMAPS, HUGE = Path("/proc/self/smaps"), Path("/sys/kernel/mm/transparent_hugepage")


@pytest.fixture
def folder(tmp_path, tensors):
    return plain.write(tmp_path / "model", LLAMA, tensors)


def refused(sentence, call, *args):
    with pytest.raises((TypeError, ValueError), match=re.escape(sentence)) as raised:
        call(*args)
    assert "\n" not in str(raised.value)


def test_float32_stays_in_the_file_and_gives_the_same_logits(folder, tensors):
    model = load(folder)
    np.testing.assert_array_equal(model.logits(IDS), from_tensors(LLAMA, tensors).logits(IDS))
    W = model.blocks[0].feed_forward.W_in
    assert not W.flags.owndata
    assert not W.flags.writeable


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_sixteen_bits_stay_in_the_file_and_give_the_same_logits(tmp_path, tensors, dtype):
    narrow = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    wide = {name: tensor.astype(np.float32) for name, tensor in narrow.items()}
    model = load(plain.write(tmp_path, LLAMA, narrow))
    W, got = model.blocks[0].feed_forward.W_in, model.logits(IDS)
    assert W.format == np.dtype(dtype).name
    assert not W.data.flags.owndata
    assert not W.data.flags.writeable
    assert got.dtype == np.float32
    expected = from_tensors(LLAMA, wide).logits(IDS)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)  # sums in another order
    again = from_tensors(LLAMA, narrow).logits(IDS)
    np.testing.assert_allclose(again, expected, rtol=1e-5, atol=1e-5)


def sharded(folder, tensors):
    """The same checkpoint in two files with an index."""
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    index = {name: f"model-{n % 2 + 1}-of-2.safetensors" for n, name in enumerate(names)}
    for shard in set(index.values()):
        part = {name: tensors[name] for name in names if index[name] == shard}
        plain.write(folder, None, part, shard)
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return path


def test_shards_are_one_checkpoint(folder, tensors):
    whole = load(folder).logits(IDS)
    index = sharded(folder, tensors)
    np.testing.assert_array_equal(load(folder).logits(IDS), whole)
    (folder / "model-2-of-2.safetensors").unlink()
    refused("model-2-of-2.safetensors is missing", load, folder)
    for damaged in ('{"weight_map": {"a": "../b.safetensors"}}', '{"weight_map": 3}', "[", "{}"):
        index.write_text(damaged)
        refused("index.json is damaged: expected a weight_map from tensors to files", load, folder)


def test_a_checkpoint_without_a_tokenizer_takes_numbers_alone(folder):
    model = load(folder)
    assert model.tokenizer is None
    refused("ids is text, but the model has no tokenizer", model.logits, "the cat")


def test_a_tokenizer_beside_it_reads_text(folder):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers, which reads it, is missing")
    words = tokenizers.models.WordLevel({"the": 0, "cat": 1, "sat": 2, "?": 3}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    model = load(folder)
    np.testing.assert_array_equal(model.logits("the cat sat"), model.logits([0, 1, 2]))
    assert model.tokenizer.decode([0, 1]) == "the cat"
    assert model.tokenizer.label(np.int64(2)) == "sat"
    (folder / "tokenizer.json").write_text("{}")
    refused("tokenizer.json is no tokenizer: ", load, folder)


def test_labels_of_subwords_show_their_space_and_bytes(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers, which reads it, is missing")
    from minimha.models.tokens import from_file

    vocabulary = {"Ġcat": 0, "s": 1, "Ã": 2, "Ċ": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    read = from_file(tmp_path / "tokenizer.json")
    assert [read.label(n) for n in range(4)] == ["_cat", "s", "Ã", "\\n"]


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path, folder):
    refused("nowhere is no folder: expected one with config.json", load, tmp_path / "nowhere")
    refused("model.safetensors is no folder", load, folder / "model.safetensors")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused("config.json is missing", load, empty)
    for text, why in (
        ("{", "is no JSON: "),
        ("[" * 99999, "is no JSON: "),
        ("[]", "holds list: expected an object"),
    ):
        (empty / "config.json").write_text(text)
        refused(f"config.json {why}", load, empty)
    (empty / "config.json").write_text(json.dumps(LLAMA))
    refused("model.safetensors is missing", load, empty)


def test_a_pickle_is_refused_with_the_way_out_and_never_opened(tmp_path, folder):
    for name in ("pytorch_model.bin", "model.pt"):
        pickled = tmp_path / f"with {name}"
        pickled.mkdir(exist_ok=True)
        (pickled / "config.json").write_text(json.dumps(LLAMA))
        (pickled / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
        for path in (pickled, pickled / name):
            refused(f"{name} is a pickle, which can run any code", load, path)
            refused("AutoModelForCausalLM.from_pretrained(folder).save_pretrained", load, path)
    (folder / "pytorch_model.bin").write_bytes(b"")
    load(folder)  # which has safetensors too


def test_damaged_files_are_refused(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    (size,) = struct.unpack("<Q", whole[:8])
    for damaged, why in (
        (whole[:5], "is damaged: it ends before its header"),
        (whole[: size // 2], f"is damaged: its header would have {size} bytes"),
        (whole[:-4], "cannot be read: tensor "),
        (b"\xff" * 8 + whole[8:], "is damaged: its header would have 18446744073709551615 bytes"),
        (whole[:8] + b"[" + whole[9:], "cannot be read: "),
        (whole.replace(b'"F32"', b'"I32"', 1), "is I32, expected one of F16, F32, F64, BF16"),
        (whole.replace(b"[0, ", b"[-4,", 1), "cannot be read: tensor "),
    ):
        path.write_bytes(damaged)
        refused(why, load, folder)


def test_regions_that_overlap_or_leave_gaps_are_refused(folder, tensors):
    path = folder / "model.safetensors"
    W = tensors[GATE]
    for offsets in ([(0, W.nbytes)] * 3, [(0, W.nbytes), (W.nbytes + 4, 2 * W.nbytes + 4)]):
        header = {
            f"{n}": {"dtype": "F32", "shape": W.shape, "data_offsets": at}
            for n, at in enumerate(offsets)
        }
        text = json.dumps(header).encode()
        data = bytes(max(end for _, end in offsets))
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)
        refused("cannot be read: its tensors overlap, or leave gaps", load, folder)


def test_names_left_over_are_refused_before_they_are_widened(tmp_path, tensors):
    more = {f"extra.{n}": np.ones((64, 1024), "float16") for n in range(100)}
    folder = plain.write(tmp_path, LLAMA, tensors | more)
    tracemalloc.start()
    try:
        refused("tensor extra.0 and 99 more are left over", load, folder)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_an_unknown_architecture_is_refused_before_anything_large_is_read(folder):
    (folder / "config.json").write_text(json.dumps(LLAMA | {"model_type": "phi"}))
    (folder / "tokenizer.json").write_text("[")
    (folder / "model.safetensors").write_bytes(b"")
    refused("is 'phi', which needs one norm for parallel parts (the nearest", load, folder)
    for changes, sentence in (
        ({"hidden_act": "mish"}, "config.json's hidden_act is 'mish': expected one of relu"),
        ({"model_type": "olmo3", "layer_types": [1]}, "config.json's layer_types is [1]: expected"),
        ({"model_type": "gemma3"}, "config.json's text_config's num_hidden_layers is missing"),
        ({"model_type": "gpt_neox", "rotary_pct": 2}, "rotary_dim is 4: expected at most"),
        ({"model_type": "roberta", "pad_token_id": 11}, "pad_token_id is 11: expected at most 10"),
    ):
        (folder / "config.json").write_text(json.dumps(LLAMA | changes))
        refused(sentence, load, folder)


NAMES = ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", NAMES)
def test_pipes_and_devices_are_refused(folder, name):
    path = folder / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    refused(f"{name} is no regular file", load, folder)
    path.unlink()
    path.symlink_to("/dev/zero")
    refused(f"{name} is no regular file", load, folder)
    gguf = folder / "model.gguf"
    os.mkfifo(gguf)
    if (folder / "config.json").is_file():
        pytest.importorskip("gguf", reason="gguf, which reads the file, is missing")
        refused("model.gguf is no regular file", load, gguf)


def test_a_file_that_is_too_long_is_refused_unread(folder):
    for name in NAMES[:3]:
        with (folder / name).open("ab") as file:
            file.truncate(3 * 2**30)  # of which the disk holds nothing
        refused(f"{name} is too long: expected at most ", load, folder)
        (folder / name).unlink()
        if name == "config.json":
            (folder / name).write_text(json.dumps(LLAMA))


def stranger(**changes):
    """A tokenizer.json with two words, and what a stranger wrote into it."""
    words = {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"}
    return {
        "version": "1.0", "added_tokens": [], "normalizer": None, "truncation": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "padding": None, "model": words,
    } | changes  # fmt: skip


NESTED = {
    "type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False
}  # fmt: skip
GROWING = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
FIXED = {
    "strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
    "pad_type_id": 0, "pad_token": "?",
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.skipif(sys.platform != "linux", reason="the limits of a process are Linux's")
@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": NESTED},
        {"normalizer": {"type": "Sequence", "normalizers": [GROWING] * 3}},
        {"padding": FIXED},
    ],
)
def test_a_strangers_tokenizer_has_limits_of_time_and_memory(folder, changes, capfd):
    pytest.importorskip("tokenizers", reason="tokenizers, which reads it, is missing")
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(stranger(**changes)))
    model = load(folder)
    if "padding" in changes:
        assert model.encode("a").tolist() == [0]
    else:
        refused(f"{path} is no tokenizer", model.encode, "a" * 40 + "b")
    assert model.tokenizer.decode([0, 1]) == "a ?"  # in a new process, if the first one ended
    assert capfd.readouterr().err == ""


def test_a_tokenizer_of_a_file_is_copied_and_ends(folder):
    pytest.importorskip("tokenizers", reason="tokenizers, which reads it, is missing")
    (folder / "tokenizer.json").write_text(json.dumps(stranger()))
    tokenizer = load(folder).tokenizer
    assert pickle.loads(pickle.dumps(tokenizer)).encode("a ?") == [0, 1]
    process = tokenizer._child._process
    del tokenizer
    gc.collect()
    assert process.poll() is not None  # it ends with its tokenizer


def test_tokens_that_end_a_text(folder, tensors):
    for written, eos in (({}, ()), ({"eos_token_id": 2}, (2,)), ({"eos_token_id": [2, 5]}, (2, 5))):
        assert from_tensors(LLAMA | written, tensors).config.eos == eos
        (folder / "generation_config.json").write_text(json.dumps(written))
        assert load(folder).config.eos == eos
    for wrong in ("</s>", 1.5, [True], [[1], [2, 3]], {"a": 1}):
        sentence = "config.json's eos_token_id"
        refused(sentence, from_tensors, LLAMA | {"eos_token_id": wrong}, tensors)


def mutations(config):
    """A valid configuration with one hostile value after the other, or without a key."""
    hostile = [
        None, True, False, -1, 0, 1, 3, 2**24, 2**31, 10**30, 0.5, -1.0, float("nan"), float("inf"),
        1e-300, "", "silu", "default", [], [[]], ["silu"], [1, 2], {}, {"a": 1}, {"factor": -1},
        {"rope_type": []}, {"rope_type": "linear", "factor": "2"}, {"rope_theta": 0},
        {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": -4},
        {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4,
         "original_max_position_embeddings": 8},
        {"full_attention": 3, "sliding_attention": {"rope_theta": "x"}},
    ]  # fmt: skip
    keys = {
        *config, "head_dim", "sliding_window", "layer_types", "rope_scaling", "rope_parameters",
        "attention_bias", "mlp_bias", "use_sliding_window", "max_window_layers", "eos_token_id",
        "partial_rotary_factor", "n_inner", "type_vocab_size", "hidden_activation", "softcap",
        "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
        "sliding_window_pattern", "rope_local_base_freq", "decoder_start_token_id", "num_layers",
        "quantization_config", "feed_forward_proj", "num_decoder_layers", "is_decoder",
        "no_rope_layers", "no_rope_layer_interval",
    }  # fmt: skip
    for key in sorted(keys):
        yield {name: value for name, value in config.items() if name != key}
        for value in hostile:
            yield config | {key: value}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "family", ["gpt2", "qwen3", "phi3", "olmo3", "smollm3", "gemma3_text", "bert", "t5"]
)
def test_a_hostile_setting_ends_in_a_sentence_or_in_a_model(family, tensors):
    gpt2 = plain.gpt2_tensors(np.random.default_rng(0))
    config, held = (plain.GPT2, gpt2) if family == "gpt2" else (LLAMA, tensors)
    norms = {
        f"model.layers.{n}.self_attn.{x}_norm.weight": np.ones(2) for n in (0, 1) for x in "qk"
    }
    biases = {
        f"model.layers.{n}.self_attn.{x}_proj.bias": np.ones(8 if x == "q" else 4)
        for n in (0, 1)
        for x in "qkv"
    }
    held = held | {"qwen2": biases, "qwen3": norms, "gemma3_text": norms}.get(family, {})
    if family == "phi3":
        for n in range(2):
            for fused, rows in (("self_attn.qkv_proj", 16), ("mlp.gate_up_proj", 24)):
                held[f"model.layers.{n}.{fused}.weight"] = np.ones((rows, 8), np.float32)
        held = {name: held[name] for name in held if not SPLIT.search(name)}
    if family == "olmo3":
        for n in range(2):
            norm = f"model.layers.{n}.{{}}.weight".format
            held[norm("self_attn.q_norm")], held[norm("self_attn.k_norm")] = np.ones(8), np.ones(4)
            held[norm("post_feedforward_layernorm")] = held.pop(norm("input_layernorm"))
    if "gemma" in family:
        config = config | {"head_dim": 2, "tie_word_embeddings": False}
        for n, name in np.ndindex(2, 2):
            part = ("pre", "post")[name]
            held = held | {f"model.layers.{n}.{part}_feedforward_layernorm.weight": np.ones(8)}
    if family in ("bert", "t5"):
        config = config | {
            "num_layers": 2, "d_model": 8, "num_heads": 4, "d_kv": 2, "d_ff": 12, "n_positions": 12,
        }  # fmt: skip
    config, loaded, sentences = config | {"model_type": family}, 0, []
    for changed in mutations(config):
        start = time.perf_counter()
        try:
            model = from_tensors(changed, held)
            loaded += 1
            model.logits(IDS, backend="dense")
        except (TypeError, ValueError) as error:
            sentences.append(str(error))
        assert time.perf_counter() - start < 2, changed
    assert loaded or family in ("bert", "t5")
    of_python = re.compile("unhashable|subscript|attribute|argument|operand|convert|index")
    assert not [sentence for sentence in sentences if of_python.search(sentence)]


def test_tensors_that_do_not_fit_are_named(tensors):
    missing = {name: tensor for name, tensor in tensors.items() if name != GATE}
    refused(f"tensor {GATE} is missing: expected shape (12, 8)", from_tensors, LLAMA, missing)
    refused(
        f"tensor {GATE} has shape (8, 12): expected (12, 8)",
        from_tensors, LLAMA, tensors | {GATE: tensors[GATE].T},
    )  # fmt: skip
    more = tensors | {"model.extra.weight": tensors[GATE]}
    refused("tensor model.extra.weight is left over", from_tensors, LLAMA, more)
    more["another"] = tensors[GATE]
    refused("tensor model.extra.weight and 1 more are left over", from_tensors, LLAMA, more)
    flags = tensors | {GATE: np.ones((12, 8), bool)}
    refused(f"tensor {GATE} has dtype bool", from_tensors, LLAMA, flags)
    tied = LLAMA | {"tie_word_embeddings": True}
    refused("lm_head.weight differs from the tensor that it repeats", from_tensors, tied, tensors)
    same = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    assert from_tensors(tied, same).W_vocab.base is not None


def test_parts_of_fused_matrices_have_the_rows_that_the_settings_say(tensors):
    phi, name = LLAMA | {"model_type": "phi3"}, "model.layers.0.self_attn.qkv_proj.weight"
    refused(f"tensor {name} is missing: expected 16 rows", from_tensors, phi, tensors)
    fused = tensors | {name: np.ones((17, 8))}
    refused(f"tensor {name} has shape (17, 8): expected 16 rows", from_tensors, phi, fused)


def test_buffers_of_old_checkpoints_are_no_weights(tensors):
    old = tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(1, np.float32)}
    from_tensors(LLAMA, old)
    old = plain.gpt2_tensors(np.random.default_rng(0)) | {
        "h.0.attn.bias": np.ones((1, 1, 12, 12), bool)
    }
    from_tensors(plain.GPT2, old)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"model_type": "granite"},
            "model_type is 'granite', which needs factors of embeddings, residuals and logits (the "
            "nearest that works is llama): expected one of gpt2",
        ),
        ({"model_type": "mamba"}, "model_type is 'mamba': expected one of gpt2, gpt_neox, llama"),
        ({"model_type": None}, "config.json's model_type is missing"),
        ({"hidden_size": None}, "config.json's hidden_size is missing"),
        ({"hidden_size": -8}, "config.json's hidden_size is -8: expected an integer of at least 1"),
        ({"num_attention_heads": 3}, "hidden_size is 8 and its num_attention_heads 3: the first"),
        ({"num_key_value_heads": 3}, "num_kv_heads is 3 but num_heads is 4"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000: expected at most"),
        ({"hidden_act": "mish"}, "config.json's hidden_act is 'mish': expected one of relu, gelu"),
        ({"rms_norm_eps": float("nan")}, "config.json's rms_norm_eps is nan"),
        ({"quantization_config": {}}, "config.json's quantization_config is {}: only None is"),
        ({"partial_rotary_factor": 1.5}, "rotary_dim is 3: pairs are rotated, so it must be even"),
        ({"rope_scaling": {"rope_type": "axial"}}, "rope_type is 'axial': expected one of default"),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            "config.json's rope's short_factor is missing",
        ),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1.0, 2.0], "long_factor": [1.0, 2.0]}},
            "short_factors has 2 numbers: expected one for each of 1 pairs",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": 2.0, "long_factor": [1.0]}},
            "short_factors is 2.0: expected a list of positive numbers",
        ),
        ({"rope_scaling": {"type": "dynamic"}}, "config.json's rope's factor is missing"),
        ({"rope_scaling": {"type": "linear"}}, "config.json's rope's factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5: expected a number"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0}},
            "config.json's rope's mscale is 1.0: not implemented",
        ),
        ({"rope_scaling": 3}, "config.json's rope_scaling is 3: expected an object"),
    ],
)
def test_settings_that_are_not_known_are_refused_by_name(tensors, changes, sentence):
    refused(sentence, from_tensors, LLAMA | changes, tensors)


@pytest.mark.parametrize("kinds", [3, ["full_attention"], ["full_attention", "local"], [[], []]])
def test_gemmas_layer_types_are_one_known_kind_per_layer(tensors, kinds):
    sentence = f"layer_types is {kinds}: expected sliding_attention or full_attention for each of"
    refused(sentence, from_tensors, LLAMA | {"model_type": "gemma2", "layer_types": kinds}, tensors)


def test_variants_of_gpt2_are_refused_by_name():
    tensors = plain.gpt2_tensors(np.random.default_rng(0))
    for setting, value in (
        ("scale_attn_by_inverse_layer_idx", True),
        ("scale_attn_weights", False),
        ("add_cross_attention", True),
    ):
        sentence = f"config.json's {setting} is {value}: only {not value} is implemented"
        refused(sentence, from_tensors, plain.GPT2 | {setting: value}, tensors)


@pytest.mark.skipif(
    not (HUGE.exists() and SMAPS.exists() and "VmFlags" in SMAPS.read_text()),
    reason="this system has no pages of 2 MB, or does not say how files are mapped",
)
def test_files_are_to_be_read_in_large_pages(folder):
    model = load(folder)
    mapped = SMAPS.read_text().partition(str(folder / "model.safetensors"))[2]
    assert "hg" in mapped.partition("VmFlags:")[2].partition("\n")[0].split()
    assert model.config.d_model == LLAMA["hidden_size"]
