"""The command line: what it shows, what it writes, and what it says to bad input."""

import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from command_line import shown

from minimha import attention, backends
from minimha.cli import main
from minimha.cli.output import RESULT_FORMATS, TABLE_FORMATS, TRACE_FORMATS
from minimha.explain.numbers import in_units

REPOSITORY = Path(__file__).parents[2]
COMMANDS = ["examples", "example", "attend", "flash", "lab", "sizes", "kernels", "backends"]


@pytest.fixture
def numbers(tmp_path):
    """q.csv, k.csv and v.csv, document 004's matrices."""
    rows = {"q": "1,0\n0,1\n1,1\n", "k": "1,0\n1,1\n0,1\n", "v": "1,0\n0,2\n3,1\n"}
    for name, text in rows.items():
        (tmp_path / f"{name}.csv").write_text(text)
    return "attend --q q.csv --k k.csv --v v.csv"


def steps(run, line, *more):
    return json.loads(shown(run, f"{line} --format json", *more))["steps"]


def values(run, line, name, *more):
    found = [s["value"] for s in steps(run, line, *more) if s["name"] == name]
    return found[0] if len(found) == 1 else found


# What is shown


def test_examples_lists_every_document_with_source_and_sentence(run):
    out = shown(run, "examples")
    for text in ("000", "001", "002", "003", "004", "The cat sat", "'Worked"):
        assert text in out


@pytest.mark.parametrize(
    ("line", "title"),
    [
        ("example", "the-cat-sat (document 003): The cat sat"),
        ("example --tokens 3", "the-cat-sat (document 003): The cat sat"),
        ("example --tokens 1", "two-heads (document 000): one token, two heads"),
        ("example --document 3", "the-cat-sat (document 003): The cat sat"),
        ("example --document 000", "two-heads (document 000): one token"),
        ("example --document 004", "given-qkv (document 004): Q, K and V given"),
        ("example --tokens 5", "5 tokens: The quick brown fox jumps, 2 heads"),
        ("example --tokens 6 --heads 4 --kv-heads 2 --d-model 8",
         "6 tokens: The bank approved the loan yesterday, 4 heads on 2 key/value heads"),
        ("example --tokens 3 --heads 2", "3 tokens: The cat sat, 2 heads"),
        ("example two-heads", "two-heads (document 000): one token, two heads"),
        ("example bank-drawn", "bank-drawn (document 002): The bank approved the loan"),
        ("example 002", "bank-drawn (document 002): The bank approved the loan yesterday"),
        ("example bank", "bank: the bank of a loan and the bank of a river"),
        ("example 004", "given-qkv (document 004): Q, K and V given"),
        ("example translation", "translation: The boy trains the puppy → Le garçon"),
        ("example heads-002", "heads-002: The bank approved the loan yesterday, heads set by hand"),
        ("example gpt2", "gpt2: The cat sat, a layer of GPT-2"),
        ("example bert", "bert: [CLS] the cat sat [SEP], a layer of BERT"),
        ("example llama", "llama: The cat sat, a layer of LLaMA"),
        ("example gpt-oss", "gpt-oss: The quick brown fox jumps, a layer of gpt-oss"),
        ("example deepseek-v3.2", "deepseek-v3.2: The quick brown fox jumps, a layer of DeepSeek"),
        ("example qwen3-next", "qwen3-next: The cat sat, two layers of Qwen3-Next"),
        ("example --rope", "3 tokens: The cat sat, 2 heads, rotary positions"),
        ("example --cross", "5 tokens: Le garçon entraîne le chiot, attending to The boy trains"),
        ("example --tokens 1 --cross oui", "1 token: Attention, attending to oui, 2 heads"),
        ("flash --tokens 4", "flash: Translation quality would collapse"),
    ],
)  # fmt: skip
def test_which_example(run, line, title):
    assert shown(run, line).startswith(title)


def test_a_sentence_of_ones_own(run):
    found = steps(run, "example", "--sentence", "we attend to what we need")
    assert [s["name"] for s in found][-3:] == ["concat", "W_o", "output"]
    x = found[0]["value"]
    assert x[0] == x[4]


def test_rope_shows_the_angles_and_what_they_turn(run):
    names = [s["name"] for s in steps(run, "example --rope")]
    assert [name for name in names if "rotated" in name or "[" in name] == [
        "cos[q]", "sin[q]", "cos[k]", "sin[k]", *["q_rotated"] * 2, *["k_rotated"] * 2
    ]  # fmt: skip


def test_cross_shows_the_other_sentence(run):
    found = {s["name"]: s for s in steps(run, "example", "--cross", "a new sentence")}
    assert np.shape(found["weights"]["value"]) == (5, 3)
    assert found["k"]["formula"] == "K = X_enc W_k"
    lines = shown(run, "example --only weights", "--cross", "a new sentence").splitlines()
    assert ["a", "new", "sentence"] in [line.split() for line in lines]


def test_the_translation_s_three_stages_have_a_heatmap_each(run):
    out = shown(run, "example translation --only weights")
    for title in ("weights, encoder, head 0", "weights, decoder", "weights, cross"):
        assert title in out


def test_tokens_3_shows_what_the_document_prints_and_what_is_wrong(run):
    out = shown(run, "example --tokens 3")
    assert "printed 0.268, exact 0.268941: truncated, not rounded" in out
    assert "printed 2, X W_v gives 0.000000: does not follow from the W_v = I given" in out
    assert "2.340  0.660" in out
    assert "raw scores" in out


def test_causal_and_scale_may_be_switched(run):
    assert "masked" not in {s["name"] for s in steps(run, "example --tokens 5 --no-causal")}
    assert "scaled" not in {s["name"] for s in steps(run, "example --tokens 5 --no-scale")}
    weights = values(run, "example --tokens 3 --scale", "weights")
    np.testing.assert_allclose(weights[1], [0.330238, 0.669762, 0], atol=1e-6)
    masked = values(run, "example --document 004 --causal", "masked")
    assert masked[0][1:] == ["-inf", "-inf"]


def test_decimals_and_only(run):
    out = shown(run, "example --tokens 3 --only weights --decimals 6")
    assert "0.268941" in out
    assert "scores" not in out.replace("raw scores", "")


def test_kernels_lists_both_ladders(run):
    rungs = {r["rung"]: r for r in json.loads(shown(run, "kernels --format json"))}
    assert {"cpu.rung1_rows", "cpu.rung5_decode", "cuda.rung1_rows", "cuda.rung2_tiles"} <= set(
        rungs
    )
    assert rungs["cpu.rung2_tiles"]["measured"].startswith("6 × as fast as rung 1")
    assert all(any(c.isdigit() for c in rung["measured"]) or "no GPU" in rung["measured"]
               for rung in rungs.values())  # fmt: skip
    only = json.loads(shown(run, "kernels --rung cpu.rung5_decode --format json"))
    assert [r["rung"] for r in only] == ["cpu.rung5_decode"]


@pytest.mark.skipif(bool(find_spec("numba_cuda")), reason="numba-cuda is installed")
def test_what_ptxas_says_needs_numba_cuda(run):
    status, out, err = run("kernels --ptx")
    assert (status, out) == (2, "")
    assert "numba-cuda, which compiles the CUDA rungs, is not installed" in err


@pytest.mark.skipif(not find_spec("numba_cuda"), reason="numba-cuda is not installed")
def test_what_ptxas_says(run):
    records = json.loads(shown(run, "kernels --ptx --rung cuda.rung1_rows --format json"))
    assert {(r["arch"], r["dtype"], r["head_dim"]) for r in records} >= {
        ("sm_80", "float32", 64), ("sm_90", "float32", 128),
    }  # fmt: skip
    by_ptxas = "registers stack spill warnings per_product tile_local all_local"
    counts = "local mma ldmatrix cp_async"
    assert list(records[0]) == f"rung kernel arch dtype head_dim {by_ptxas} {counts}".split()
    assert (records[0]["mma"], records[0]["per_product"]) == (0, None)


def test_backends_say_why_not(run):
    out = shown(run, "backends")
    assert "dense    yes" in out
    reason = backends()["cuda"]
    assert reason is None or reason in " ".join(out.split())


def test_flash_shows_each_block_and_the_same_end(run):
    found = {s["name"]: s["value"] for s in steps(run, "flash --tokens 6 --block-queries 3")}
    assert np.allclose(found["output"], found["output[tiled]"])
    assert {"Q[i=1]", "K[i=1,j=2]", "S[i=1,j=2]", "m[i=1,j=2]", "l[i=1,j=2]", "O[i=1,j=2]"} <= set(
        found
    )
    assert found["kept[naive]"] == 72


def test_sizes_of_all_presets_fit_a_terminal(run):
    lines = shown(run, "sizes --dtype bfloat16").splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("each at its longest, in bfloat16")
    cells = {line[:11].strip(): line[11:].split("  ") for line in lines[2:]}
    found = {name: [cell.strip() for cell in row if cell.strip()] for name, row in cells.items()}
    assert found["BERT-Base"][:3] == ["109 M", "12/12", "512"]
    assert found["BERT-Base"][4:] == ["-", "-", "-"]
    assert found["GPT-3"][:3] == ["175 B", "96/96", "2048"]
    assert found["GPT-3"][5:] == ["9.00 GiB", "0 %"]
    assert found["Llama-3-8B"][5:] == ["1.00 GiB", "75 %"]
    assert found["Llama-3-70B"][5:] == ["2.50 GiB", "87.5 %"]


def test_sizes_beyond_a_models_length_are_left_open(run):
    lines = shown(run, "sizes --length 1024").splitlines()
    assert lines[0].startswith("at 1024 tokens, in float16")
    bert, gpt2 = (next(line for line in lines if line.startswith(name)) for name in ("BERT", "GPT"))
    assert bert.split()[4:] == ["≤", "512", "-", "-", "-", "-"]
    assert gpt2.split()[5] == "1024"
    by_name = {r["name"]: r for r in json.loads(shown(run, "sizes --length 1024 --format json"))}
    for name in ("length", "prefill_flops", "decode_flops", "kv_cache_bytes", "saved_by_groups"):
        assert by_name["BERT-Base"][name] is None
        assert by_name["GPT-3"][name] is not None


def test_sizes_of_one_preset_in_units_and_exactly(run):
    line = "sizes --preset llama-3-8b --length 4096"
    found = dict(row.split("  ", 1) for row in shown(run, line).splitlines()[2:])
    found = {name: value.strip() for name, value in found.items()}
    assert max(map(len, shown(run, line).splitlines())) <= 80
    assert found["parameters"] == "8.03 B"
    assert found["weights in float16"] == "15.0 GiB"
    assert found["KV cache of 4096 tokens in float16"] == "512 MiB"
    assert found["grouped heads save: KV cache"] == "1.50 GiB"
    assert found["grouped heads save: parameters"] == "805 M"
    exact = json.loads(shown(run, f"{line} --dtype float32 --format json"))
    assert exact["parameters"]["total"] == 8030261248
    assert exact["kv_cache_bytes"] == 2**30
    assert exact["saved_by_groups"]["kv_cache_bytes"] == 3 * 2**30
    assert exact["prefill_flops"]["attention"] == 4 * 32 * 32 * 128 * sum(range(4097))
    assert "KV cache" not in shown(run, "sizes --preset bert-base")


def test_sizes_of_one_preset_leave_out_what_is_zero(run):
    out = shown(run, "sizes --preset gpt3")
    assert not {"0", "0 FLOP", "0 B"} & {line[40:].strip() for line in out.splitlines()}
    assert "grouped heads save" not in out
    assert "num_segments" not in out
    exact = json.loads(shown(run, "sizes --preset gpt3 --format json"))
    assert exact["saved_by_groups"]["kv_cache_bytes"] == exact["num_segments"] == 0


@pytest.mark.parametrize("name", ["s.csv", "s.json"])
def test_sizes_for_programs_are_exact(run, tmp_path, name):
    shown(run, f"sizes --preset gpt2-small --format {name[2:]} --output {name}")
    assert b"124439808" in (tmp_path / name).read_bytes().replace(b"\0", b"")


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (0, "", "0"), (999, "", "999"), (1000, "", "1.00 K"), (124439808, "", "124 M"),
        (99_960_000, "", "100 M"), (999_600_000, "", "1.00 B"), (9_999, "", "10.0 K"),
        (0, "B", "0 B"), (1023, "B", "1023 B"), (1024, "B", "1.00 KiB"),
        (1_299_227_607, "B", "1.21 GiB"), (1023 * 2**20, "B", "1023 MiB"),
        (2**30 - 1, "B", "1.00 GiB"), (5 * 2**50, "B", "5120 TiB"),
        (722_385_206_403_072, "FLOP", "722 TFLOP"), (999, "FLOP", "999 FLOP"),
    ],
)  # fmt: skip
def test_units_have_three_digits(number, unit, text):
    assert in_units(number, unit) == text


def test_piped_output_is_plain_and_unwrapped():
    environment = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "COLUMNS")}
    done = subprocess.run(
        [sys.executable, "cli.py", "example", "--document", "004"],
        cwd=REPOSITORY, capture_output=True, text=True, encoding="utf-8",
        env={**environment, "COLUMNS": "40"}, check=True,
    )  # fmt: skip
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) > 120
    assert done.stderr == ""


@pytest.mark.parametrize("line", ["examples", "kernels", "sizes", "sizes --preset mistral-7b"])
def test_a_piped_table_is_at_most_100_columns_wide(run, line):
    assert max(map(len, shown(run, line).splitlines())) <= 100


def test_the_package_is_run_as_the_command_is():
    done = subprocess.run(
        [sys.executable, "-m", "minimha", "exmaple"],
        cwd=REPOSITORY, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("minimha: argument command: invalid choice: 'exmaple'")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "cp850"])
def test_a_pipe_without_the_signs_of_mathematics_gets_others(encoding):
    done = subprocess.run(
        [sys.executable, "cli.py", "example", "--cell", "The,sat", "--only", "masked"],
        cwd=REPOSITORY, capture_output=True, check=True, encoding=encoding,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )  # fmt: skip
    assert "?" not in done.stdout
    for line in (
        "S_ij <- S_ij if query i may see key j, else -inf",
        "The    1  -inf  -inf\n    cat    0     1  -inf\n",
        "[1 -inf -inf] [0 1 -inf] [1 1 2]",
        "masked: S[The,sat] = -inf, hidden by the mask",
    ):
        assert line in done.stdout


@pytest.mark.skipif(os.name != "posix", reason="pipes close otherwise elsewhere")
def test_a_reader_that_has_seen_enough_is_no_error():
    line = f"{sys.executable} cli.py example --tokens 12 --heads 4 | head -n 1"
    done = subprocess.run(line, shell=True, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stderr == ""


def test_without_a_command_there_is_help(run):
    out = shown(run, "")
    for command in COMMANDS:
        assert command in out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert "--format" in capsys.readouterr().out


def test_an_example_loads_nothing_that_other_commands_need():
    run = "import sys; from minimha.cli import main; main(['example']); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", run], cwd=REPOSITORY, capture_output=True, text=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"}, encoding="utf-8", check=True,
    )  # fmt: skip
    loaded = set(done.stdout.splitlines()[-1].split())
    foreign = {"minimha.bench", "minimha.models", "minimha.kernels.ladder", "minimha.cli.inputs"}
    foreign |= {"minimha.cli.bench", "minimha.cli.next"}
    assert "minimha.cli.example" in loaded
    assert not foreign & loaded


# The reader's own numbers


def test_attend_takes_csv_files(run, numbers):
    np.testing.assert_allclose(
        values(run, numbers, "output"),
        [[0.994440, 1.0], [1.401112, 1.203336], [0.993020, 1.255235]],
        atol=1e-6,
    )


def test_attend_takes_every_option_as_a_flag(run, numbers, tmp_path):
    (tmp_path / "mask.csv").write_text("1,1,0\n1,1,1\n1,1,1\n")
    (tmp_path / "bias.csv").write_text("0,1,0\n-inf,0,0\n0,0,2\n")
    (tmp_path / "picks.csv").write_text("0,1\n1,-1\n1,2\n")
    flags = (
        "--causal --q-offset 1 --window 2,none --attn-mask mask.csv --attn-bias bias.csv "
        "--kv-lengths 2 --alibi-slopes 0.5 --scale -0.7 --softcap 1.5 --sinks=-1 --return-lse "
        "--key-indices picks.csv --backend dense"
    )
    found = {s["name"]: s["value"] for s in steps(run, f"{numbers} {flags}")}
    q, k, v = ([[1, 0], [0, 1], [1, 1]], [[1, 0], [1, 1], [0, 1]], [[1, 0], [0, 2], [3, 1]])
    output, lse = attention(
        q, k, v, is_causal=True, q_offset=1, window_size=(2, None),
        attn_mask=np.array([[1, 1, 0], [1, 1, 1], [1, 1, 1]], bool),
        attn_bias=[[0, 1, 0], [-np.inf, 0, 0], [0, 0, 2]], kv_lengths=2, alibi_slopes=[0.5],
        scale=-0.7, softcap=1.5, sinks=[-1], return_lse=True, key_indices=[[0, 1], [1, -1], [1, 2]],
    )  # fmt: skip
    np.testing.assert_array_equal(found["output"], output)
    np.testing.assert_array_equal(found["lse"], lse)
    np.testing.assert_array_equal(found["picked"], [[1, 1, 0], [0, 1, 0], [0, 1, 1]])
    assert {"scaled", "capped", "biased", "masked", "weights"} <= set(found)


def test_attend_takes_a_problem_file_and_a_flag_wins(run, tmp_path):
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(4, 2, 3)), rng.normal(size=(2, 5, 3)), rng.normal(size=(2, 5, 1))
    mask = rng.random((2, 5)) < 0.5
    options = {"is_causal": True, "q_offset": 3, "scale": 0.5, "window_size": [2, 2]}
    expected = attention(q, k, v, attn_mask=mask, **options)
    arrays = {"q": q, "k": k, "v": v, "attn_mask": mask}
    np.savez(tmp_path / "problem.npz", **arrays, **options)
    record = {name: array.tolist() for name, array in arrays.items()} | options | {"softcap": None}
    (tmp_path / "problem.json").write_text(json.dumps(record))
    for name in ("problem.npz", "problem.json"):
        np.testing.assert_array_equal(values(run, f"attend {name}", "output"), expected)
        changed = values(run, f"attend {name} --no-causal --scale 2", "output")
        again = attention(q, k, v, attn_mask=mask, **{**options, "is_causal": False, "scale": 2.0})
        np.testing.assert_array_equal(changed, again)


def test_attend_reads_infinities_and_masks_of_ones_from_json(run, tmp_path):
    record = {
        "q": [[1.0]], "k": [[1.0], [2.0]], "v": [[5.0], [7.0]],
        "attn_bias": [["-inf", 0]], "attn_mask": [[1, 1]], "return_lse": True, "backend": "tiled",
    }  # fmt: skip
    (tmp_path / "p.json").write_text(json.dumps(record))
    assert values(run, "attend p.json", "output") == [[7.0]]
    assert values(run, "attend p.json", "lse") == [2.0]


def test_attend_labels_tokens(run, numbers):
    out = shown(run, f"{numbers} --only scores --labels", "ein zwei drei")
    assert "ein  zwei  drei" in out


def test_attend_labels_a_query_by_its_position(run, numbers, tmp_path):
    (tmp_path / "q.csv").write_text("1,0\n0,1\n")
    line = f"{numbers} --only scores --causal --q-offset 1 --labels"
    lines = shown(run, line, "ein zwei drei").splitlines()
    assert [line.split()[:1] for line in lines].index(["zwei"]) == 9
    assert lines[10].split()[0] == "drei"


def test_attend_says_what_the_rows_of_weights_sum_to(run, numbers):
    for flags, sentence in (
        ("", "A row sums to 1."),
        ("--kv-lengths 0", "A query that sees no key has a row of zeros."),
        ("--sinks 1", "The rest of each row goes to its sink."),
    ):
        out = shown(run, f"{numbers} --only weights {flags}")
        assert sentence in out
        assert ("sums to 1" in out) == (not flags)


def test_attend_labels_each_packed_sequence_with_its_own_words(run, numbers):
    out = shown(run, f"{numbers} --only weights --cu-seqlens-q 0,2,3 --labels", "ein zwei drei")
    matrices = out.partition("heatmap")[0]
    rows = [line.split()[0] for line in matrices.splitlines() if line.startswith("    ")]
    assert [word for word in rows if word in ("ein", "zwei", "drei")] == [
        "ein", "ein", "zwei", "drei", "drei",  # a line of heads, then the rows of each matrix
    ]  # fmt: skip


def test_attend_labels_keys_when_offsets_differ(run, tmp_path):
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=(2, 1, 2, 3)) for name in "qkv"}
    np.savez(tmp_path / "p.npz", **arrays, q_offset=[0, 1], is_causal=True)
    out = shown(run, "attend p.npz --only k --only scores --labels", "ein zwei")
    lines = [line.split() for line in out.splitlines()]
    assert ["ein", "zwei"] in lines
    assert [line[0] for line in lines if line and line[0] in ("ein", "zwei", "0", "1")].count(
        "zwei"
    ) == 2


def test_control_characters_are_shown_and_not_obeyed(run):
    for format in ("text", "svg", "html", "json", "latex", "markdown"):
        out = shown(run, f"example --format {format} --sentence", "a\x1b[2J\x01 b")
        assert "\x1b" not in out
        assert "\x01" not in out


def test_a_sentence_document_takes_settings(run):
    title = "6 tokens: The bank approved the loan yesterday, 3 heads"
    assert shown(run, "example --document 002 --heads 3 --d-model 6").startswith(title)


def test_a_link_is_followed(run, tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    shown(run, "example --output link.json --force")
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text(encoding="utf-8"))["example"]


LINES = ("example", "examples", "--version", "example --help", "example --format json")
FULL = "minimha: output: No space left on device\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no disk to fill")
@pytest.mark.parametrize(
    ("line", "streams", "status", "seen"),
    [
        *((line, ">&-", 0, "") for line in LINES),
        *((line, ">&- 2>&- <&-", 0, "") for line in LINES),
        *((line, ">/dev/full", 2, FULL) for line in LINES),
        ("dance", "2>&-", 2, ""),
        ("dance", "2>/dev/full", 2, ""),
        ("example --tokens 12 --heads 4", "2>&1 | head -n 1 >/dev/null", 0, ""),
        ("dance", "2>&1 >/dev/null | true", 2, ""),
    ],
)
def test_closed_and_full_streams_need_no_traceback(tmp_path, line, streams, status, seen):
    script = f"{sys.executable} cli.py {line} {streams}; echo ${{PIPESTATUS[0]}} >{tmp_path}/status"
    done = subprocess.run(["bash", "-c", script], cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", seen)
    assert int((tmp_path / "status").read_text()) == status


def test_a_file_takes_the_place_of_no_closed_stream(tmp_path):
    line = f"{sys.executable} cli.py example --output {tmp_path}/x.json >&- 2>&-"
    assert subprocess.run(line, shell=True, cwd=REPOSITORY).returncode == 0
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["example"]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (
            ["attend", "--q", "\x1b[31mno.csv", "--k", "k", "--v", "v"],
            "\\x1b[31mno.csv cannot be read",
        ),
        (["attend", "\u202egnp.json"], "\\u202egnp.json cannot be read"),
        (["example", "--output", "no\x9b/x.json"], "the folder no\\x9b does not exist"),
        (["example", "--\x1b]0;title\x07"], "unrecognized arguments: --\\x1b]0;title\\x07"),
        (["\udcff"], "\\udcff"),
    ],
)
def test_an_error_shows_what_a_terminal_would_obey(run, words, shown):
    status, out, err = run("", *words)
    assert (status, out) == (2, "")
    assert shown in err
    assert err.removesuffix("\n").isprintable()


def test_an_error_is_no_longer_than_a_page(run):
    status, _, err = run("example", "x" * 100_000)
    assert status == 2
    assert len(err) < 2100
    assert err.endswith("cosine, additive\n")


@pytest.mark.parametrize(
    "line", ["example --sentence=--", "example --heads=--", "attend --labels=--"]
)
def test_two_dashes_are_no_value(run, line):
    status, _, err = run(line)
    assert status == 2
    assert "'--' is no value" in err


def test_attend_in_tiles(run, numbers):
    names = [s["name"] for s in steps(run, f"{numbers} --backend tiled")]
    assert names[0] == "Q[i=0]"
    assert names[-1] == "output"


def test_its_own_json_is_understood_again(run, numbers, tmp_path):
    found = {s["name"]: s["value"] for s in steps(run, f"{numbers} --causal")}
    problem = {name: found[name] for name in ("q", "k", "v")} | {"attn_bias": found["masked"]}
    (tmp_path / "again.json").write_text(json.dumps({**problem, "scale": 0}))
    np.testing.assert_allclose(values(run, "attend again.json", "output"), found["output"])


# Writing


@pytest.mark.parametrize(
    ("command", "format"),
    [
        *itertools.product(("example",), TRACE_FORMATS),
        *itertools.product(("flash --tokens 3",), [f for f in TRACE_FORMATS if f != "xlsx"]),
        *itertools.product(
            ("examples", "backends", "kernels", "sizes", "sizes --preset gpt3", "lab"),
            TABLE_FORMATS,
        ),
        *itertools.product(("lab masking",), [f for f in RESULT_FORMATS if f != "png"]),
    ],
)
def test_every_format_of_every_command_can_be_written(run, tmp_path, command, format):
    if format == "png" and not (shutil.which("rsvg-convert") or find_spec("cairosvg")):
        pytest.skip("no rasteriser is installed (Debian's librsvg2-bin)")
    assert run(f"{command} --format {format} --output result") == (0, "", "")
    written = tmp_path / "result"
    files = list(written.iterdir()) if written.is_dir() else [written]
    assert all(file.stat().st_size > 0 for file in files)
    assert [file.name for file in tmp_path.iterdir()] == ["result"]


@pytest.mark.parametrize("format", ["json", "markdown", "latex", "svg", "html"])
def test_what_is_written_is_what_is_printed(run, tmp_path, format):
    out = shown(run, f"example --format {format}")
    shown(run, f"example --format {format} --output result")
    assert (tmp_path / "result").read_text(encoding="utf-8") == out


def test_the_ending_of_the_file_says_the_format(run, tmp_path):
    starts = {".json": "{", ".md": "# the-cat-sat", ".tex": "\\doc", ".svg": "<svg"}
    for ending, start in starts.items():
        shown(run, f"example --output result{ending}")
        assert (tmp_path / f"result{ending}").read_text(encoding="utf-8").startswith(start)


def test_csv_makes_a_folder_or_takes_an_empty_one(run, tmp_path):
    (tmp_path / "there").mkdir()
    for name in ("there", "new"):
        shown(run, f"example --format csv --output {name}")
        assert (tmp_path / name / "13_weights.csv").read_text().startswith("1.0,0.0,0.0\n")


def test_force_replaces_and_leaves_the_rest_of_a_folder_alone(run, tmp_path):
    (tmp_path / "x.json").write_text("precious")
    shown(run, "example --output x.json --force")
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["example"]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.txt").write_text("precious")
    shown(run, "example --format csv --output folder --force")
    assert (tmp_path / "folder" / "mine.txt").read_text() == "precious"
    assert (tmp_path / "folder" / "01_x.csv").exists()


def test_force_keeps_mode_owner_and_hard_links(run, tmp_path):
    for name in ("alone.json", "one.json"):
        (tmp_path / name).write_text("old")
        (tmp_path / name).chmod(0o600)
    os.link(tmp_path / "one.json", tmp_path / "other.json")
    if os.geteuid() == 0:
        os.chown(tmp_path / "alone.json", 1, 1)
    before = (tmp_path / "alone.json").stat()
    for name in ("alone.json", "one.json"):
        shown(run, f"example --output {name} --force")
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    after = (tmp_path / "alone.json").stat()
    assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)
    assert (tmp_path / "one.json").samefile(tmp_path / "other.json")
    assert json.loads((tmp_path / "other.json").read_text(encoding="utf-8"))["example"]


def test_new_files_honour_the_umask(run, tmp_path):
    before = os.umask(0o027)
    try:
        shown(run, "example --output x.json")
        shown(run, "example --format csv --output folder")
    finally:
        os.umask(before)
    modes = {
        n: (tmp_path / n).stat().st_mode & 0o777 for n in ("x.json", "folder", "folder/01_x.csv")
    }
    assert modes == {"x.json": 0o640, "folder": 0o750, "folder/01_x.csv": 0o640}


def without_links(*names):
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("link", [os.link, without_links])
def test_of_two_processes_with_one_output_the_second_is_refused(run, tmp_path, monkeypatch, link):
    monkeypatch.setattr("os.link", link)
    monkeypatch.setattr("minimha.cli.output.check_free", lambda name, force: None)  # both passed it
    shown(run, "example --tokens 1 --output x.json")
    first = (tmp_path / "x.json").read_bytes()
    status, _, err = run("example --tokens 3 --output x.json")
    assert (status, err) == (
        2, "minimha: --output x.json exists already: add --force to replace it\n"
    )  # fmt: skip
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x.json", first)]


@pytest.mark.parametrize(
    "line", ["--output x.json", "--output x.json --force", "--format csv --output x"]
)
def test_what_is_written_is_on_the_disk_before_it_has_its_name(run, monkeypatch, line):
    calls = []

    def recorded(kind, really):
        return lambda *args: (calls.append(kind), really(*args))

    for name in ("fsync", "link", "replace", "rename"):
        kind = "fsync" if name == "fsync" else "named"
        monkeypatch.setattr(f"os.{name}", recorded(kind, getattr(os, name)))
    shown(run, f"example {line}")
    assert calls[-1] == "named"
    assert set(calls[:-1]) == {"fsync"}


@pytest.mark.skipif(os.name != "posix", reason="signals are otherwise elsewhere")
@pytest.mark.usefixtures("signals_that_arrive")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_leaves_a_whole_file_and_no_other(tmp_path, name):
    number = getattr(signal, name)
    (tmp_path / "x.json").write_text("old")
    program = (
        "import os, signal, sys; from minimha.cli import main; replace = os.replace\n"
        f"def late(*names): os.kill(os.getpid(), {int(number)}); return replace(*names)\n"
        "os.replace = late\n"
        f"sys.exit(main(['example', '--force', '--output', {str(tmp_path / 'x.json')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True)
    assert done.returncode == (130 if name == "SIGINT" else -number)
    assert done.stderr == b""
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert json.loads((tmp_path / "x.json").read_bytes())["example"]


def test_steps_of_two_runs_are_never_mixed(run, tmp_path):
    line = "example --tokens 4 --format csv --output folder"
    shown(run, line)
    before = {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir()}
    status, _, err = run(f"{line} --heads 1 --force")
    assert status == 2
    assert "--output folder holds 02_W_q_head0.csv, which this run does not write" in err
    assert {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir()} == before
    shown(run, f"{line} --seed 2 --force")


def test_one_process_at_a_time_writes_into_a_folder(run, tmp_path):
    (tmp_path / "folder" / ".minimha-new").mkdir(parents=True)
    for force in ("", " --force"):
        status, _, err = run(f"example --format csv --output folder{force}")
        assert status == 2
        assert "another process is writing into this folder, or was killed" in err
    assert [path.name for path in (tmp_path / "folder").iterdir()] == [".minimha-new"]


def test_of_two_processes_that_make_one_folder_the_second_is_refused(run, tmp_path, monkeypatch):
    fsync = os.fsync

    def overtaken(descriptor):
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "folder" / "01_x.csv").write_text("theirs")
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", overtaken)
    status, _, err = run("example --format csv --output folder")
    assert (status, err) == (
        2, "minimha: --output folder cannot be written: Directory not empty\n"
    )  # fmt: skip
    found = [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))]
    assert found == ["folder", "folder/01_x.csv"]


@pytest.mark.skipif(os.name != "posix", reason="there is no limit to the size of a file elsewhere")
@pytest.mark.parametrize(
    "line", ["--output x.json --force", "--output y.json", "--output z --format csv"]
)
def test_a_full_disk_leaves_what_was_there(tmp_path, line):
    (tmp_path / "x.json").write_text("precious")
    command = f"ulimit -f 0; exec {sys.executable} {REPOSITORY / 'cli.py'} example {line}"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.endswith("cannot be written: File too large\n")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("x.json", "precious")]


def test_a_link_to_itself_is_refused(run, tmp_path):
    (tmp_path / "loop.json").symlink_to("loop.json")
    status, _, err = run("example --output loop.json --force")
    assert (status, err) == (
        2, "minimha: --output loop.json cannot be written: Too many levels of symbolic links\n"
    )  # fmt: skip


def test_an_input_may_be_replaced_by_its_result(run, tmp_path):
    problem = '{"q": [[1]], "k": [[1]], "v": [[2]]}'
    (tmp_path / "p.json").write_text(problem)
    status, _, _ = run("attend p.json --output p.json")
    assert (status, (tmp_path / "p.json").read_text()) == (2, problem)
    shown(run, "attend p.json --output p.json --force")
    assert json.loads((tmp_path / "p.json").read_text())["steps"][-1]["value"] == [[2]]


# Bad input


BAD_LINES = [
    ("attend --q q.csv --k k.csv", "a problem file, or --q, --k and --v; --v is missing"),
    ("attend", "--q and --k and --v are missing"),
    ("attend p.json --q q.csv", "a problem file or --q, --k and --v, but both were given"),
    ("attend --q no.csv --k k.csv --v v.csv", "no.csv cannot be read: No such file"),
    ("attend --q . --k k.csv --v v.csv", ". cannot be read: Is a directory"),
    ("attend --q ragged.csv --k k.csv --v v.csv",
     "ragged.csv is ragged: line 2 has 1 number, line 1 has 2"),
    ("attend --q empty.csv --k k.csv --v v.csv", "empty.csv is empty: expected rows of numbers"),
    ("attend --q text.csv --k k.csv --v v.csv",
     "text.csv, line 2, field 1 is 'cat': expected a number"),
    ("attend --q latin.csv --k k.csv --v v.csv", "latin.csv is not text: expected UTF-8"),
    ("attend --q q.csv --k k.csv --v v2.csv", "v has Lk=2 but k has Lk=3"),
    ("attend --q q1.csv --k k.csv --v v.csv", "k has D=2 but q has D=1"),
    ("attend --q v2.csv --k k.csv --v v.csv --causal",
     "is_causal with Lq=2 and Lk=3 needs q_offset"),
    ("attend --q q.csv --k k.csv --v v.csv --attn-mask k2.csv",
     "--attn-mask holds 2: expected 1 (may attend) and 0 (may not)"),
    ("attend --q q.csv --k k.csv --v v.csv --labels one",
     "--labels has 1 words: expected one for each key (3) or query (3)"),
    ("attend --q q.csv --k k.csv --v v.csv --backend gpu", "backend is 'gpu': expected auto"),
    ("attend --q q.csv --k k.csv --v v.csv --backend cuda", "backend 'cuda' cannot run"),
    ("attend --q q.csv --k k.csv --v v.csv --scale big",
     "argument --scale: expected a number, got 'big'"),
    ("attend --q q.csv --k k.csv --v v.csv --window 1", "expected LEFT,RIGHT, two whole numbers"),
    ("attend --q q.csv --k k.csv --v v.csv --sinks a", "expected numbers separated by commas"),
    ("attend --q q.csv --k k.csv --v v.csv --kv-lengths 1.5", "expected whole numbers separated"),
    ("attend --q q.csv --k k.csv --v v.csv --key-indices half.csv",
     "--key-indices holds 0.5: expected whole numbers"),
    ("attend missing.json", "missing.json cannot be read: No such file or directory"),
    ("attend missing.npz", "missing.npz cannot be read: No such file or directory"),
    ("attend q.csv", "q.csv ends in '.csv': expected a .json, .npz or .zarr file"),
    ("attend broken.json", "broken.json is not JSON"),
    ("attend deep.json", "q is nested more than 8 deep: expected a matrix"),
    ("attend abyss.json", "abyss.json is nested too deeply"),
    ("attend twice.json", "the key 'q' occurs twice in one JSON object"),
    ("attend true.json", "q holds True: expected a number"),
    ("attend wide.json --q-offset 18446744073709551615", "q_offset is 18446744073709551615"),
    ("attend --q long.csv --k k.csv --v v.csv", "long.csv is not a CSV file: field larger"),
    ("attend corrupt.npz", "corrupt.npz is refused"),
    ("attend list.json", "list.json holds list: expected an object with q, k and v"),
    ("attend causal.json", "has the key 'causal': did you mean 'is_causal'? expected q, k, v"),
    ("attend q.csv --window -1,0", "(one that begins with a minus sign is joined on"),
    ("attend lacks.json", "lacks.json lacks the key 'v'"),
    ("attend function.json", "function.json has the key 'mask_mod': expected q, k, v, is_causal"),
    ("attend unknown.json", "unknown.json has the key 'dropout': expected q, k, v, is_causal"),
    ("attend word.json", "q holds 'cat': expected a number"),
    ("attend nested.json", "q is ragged: rows of one matrix must have equal lengths"),
    ("attend heads.json", "k has 3 heads but q has 4: H must be a multiple of Hkv (H=4, Hkv=3)"),
    ("attend ranks.json", "k has 3 dimensions, shape (1, 1, 1), but q has 2"),
    ("attend flat.json", "q has 1 dimension, shape (2,): expected 2 (L, D)"),
    ("attend object.npz", "object.npz is refused: expected an npz archive of plain arrays"),
    ("attend pickle.npz", "pickle.npz is refused"),
    ("attend array.npz", "array.npz is refused"),
    ("attend truncated.npz", "truncated.npz is refused"),
    ("attend raw.npz", "raw.npz is refused: expected an npz archive of plain arrays"),
    ("attend claims.npz", "claims.npz holds 1,099,511,627,778 numbers: expected at"),
    ("attend doubled.npz", "doubled.npz has a key twice: which one counts?"),
    ("attend names.npz", "names.npz has the key 'weights': expected q, k, v"),
    ("attend --q /dev/zero --k k.csv --v v.csv", "/dev/zero is a device or a socket, which may n"),
    ("attend --q pipe --k k.csv --v v.csv", "pipe is empty: expected rows of numbers"),
    ("attend --q under.csv --k k.csv --v v.csv", "under.csv, line 1, field 2 is '1_0': expected a"),
    ("attend --q words.csv --k k.csv --v v.csv", "words.csv, line 1, field 2 is '-Infinity'"),
    ("attend --q digits.csv --k k.csv --v v.csv", "digits.csv, line 1, field 2 is '１'"),
    ("attend --q q.csv --k k.csv --v v.csv --scale 1_0", "--scale: expected a number, got '1_0'"),
    ("attend --q q.csv --k k.csv --v v.csv --window 1_0,0", "two whole numbers or none, got '1_0,"),
    ("example --heads 99999999999999999999", "expected a whole number from 1 to 1048576, got '9"),
    ("example --tokens 1_0", "expected a whole number from 1 to 12, got '1_0'"),
    ("example --d-model 4096", "W_q would hold 4096 × 4096 = 16,777,216 numbers where 4,194,304"),
    ("flash --d-model 4096", "W_q would hold 4096 × 4096 = 16,777,216 numbers where 4,194,304"),
    ("example --tokens 0", "argument --tokens: expected a whole number from 1 to 12, got '0'"),
    ("example --tokens 13", "argument --tokens: expected a whole number from 1 to 12, got '13'"),
    ("example --tokens -1", "argument --tokens: expected a whole number from 1 to 12, got '-1'"),
    ("example --tokens three", "expected a whole number from 1 to 12, got 'three'"),
    ("example --tokens 3 --document 003", "--document: not allowed with argument --tokens"),
    ("example --document 007", "argument --document: invalid choice: '007'"),
    ("example --document 003 --heads 2", "--heads cannot change example the-cat-sat (document"),
    ("example --document 001 --causal", "example shapes (document 001) has neither a causal mask"),
    ("example --tokens 5 --heads 3", "d-model is 4 and heads is 3"),
    ("example --tokens 5 --heads 4 --kv-heads 3", "heads is 4 and kv-heads is 3"),
    ("example --heads 0", "argument --heads: expected a whole number from 1 to 1048576, got '0'"),
    ("example --tokens 5 --seed -1", "expected a whole number of at least 0, got '-1'"),
    ("example --decimals 40", "expected a whole number from 0 to 17, got '40'"),
    ("kernels --rung nope", "no rung 'nope' here: there are cpu.rung1_rows"),
    ("kernels --ptx --rung cpu.rung1_rows", "there are cuda.rung1_rows"),
    ("example nope", "no example 'nope': there are two-heads, shapes"),
    ("example gtp2", "no example 'gtp2' (did you mean gpt2?): there are two-heads, shapes"),
    ("example translation --heads 2", "--heads cannot change example translation, whose numbers"),
    ("example 000 --rope", "--rope cannot change example two-heads (document 000)"),
    ("example llama --cross", "--cross cannot change example llama"),
    ("example --cross --causal", "a causal mask has no meaning between two sentences"),
    ("example --cross=", "the sentence to attend to has no tokens"),
    ("example --only softmax", "no step 'softmax' here: the steps are x, W_q"),
    ("example --format pdf", "argument --format: the formats of a trace are text, json, markdown"),
    ("example --format npz", "--format npz needs --output: the name of a file to write"),
    ("example --format csv", "--format csv needs --output: the name of a folder to write"),
    ("example --format xlsx", "--format xlsx needs --output: the name of a file to write"),
    ("example --only weights --output x.xlsx", "which is not shown: a sheet holds every step"),
    ("flash --output x.xlsx", "FlashAttention is not written as xlsx, export it with --format"),
    ("examples --format svg",
     "argument --format: the formats of a table are text, json, markdown, csv, got 'svg'"),
    ("sizes --output x.npz", "x.npz ends in '.npz', which names no format of a table: add --f"),
    ("example --output no/where.json", "--output no/where.json: the folder no does not exist"),
    ("example --format csv --output no/where", "the folder no does not exist, make it first"),
    ("example --output broken.json", "broken.json exists already: add --force to replace it"),
    ("example --output x.pdf", "x.pdf ends in '.pdf', which names no format of a trace: add --"),
    ("example --output x.csv", "(csv writes a folder of steps)"),
    ("example --output pipe", "--output pipe is not a regular file: it will not be replaced"),
    ("example --output pipe --force", "--output pipe is not a regular file"),
    ("example --format csv --output full --force", "full holds 03_W_k.csv, which is not a regular"),
    ("example --document= --only x", "invalid choice: ''"),
    ("example --output .", "--output . is a folder: expected the name of a file"),
    ("example --format csv --output q.csv", "--output q.csv is a file: expected a folder"),
    ("example --format csv --output full", "--output full is not empty: add --force to write"),
    ("flash --block-keys 0", "argument --block-keys: expected a whole number from 1 to 1048576"),
    ("flash --tokens 99", "argument --tokens: expected a whole number from 1 to 12"),
    ("sizes --preset gpt5", "preset is 'gpt5': expected one of BERT-Base, BERT-Large, GPT-2 Small"),
    ("sizes --preset gpt3 --length 2049", "length is 2049 but GPT-3 was made for at most 2048"),
    ("sizes --length 262145", "--length is 262145 but no preset takes more than 262144 tokens"),
    ("sizes --length 0", "argument --length: expected a whole number from 1 to 1048576, got '0'"),
    ("sizes --dtype int8", "argument --dtype: invalid choice: 'int8'"),
    ("lab scales", "no experiment 'scales' (did you mean scale?): there are scale, similarity"),
    ("lab scale --seed -1", "argument --seed: expected a whole number of at least 0, got '-1'"),
    ("lab scale --seed one", "argument --seed: expected a whole number of at least 0, got 'one'"),
    ("lab --seed 3", "--seed needs an experiment: name one of scale, similarity, heads"),
    ("lab --format svg", "a list of experiments has no picture: name one of scale, similarity"),
    ("lab scale --format html", "the formats of a result are text, json, markdown, csv, svg"),
    ("lab scale --format png", "--format png needs --output: the name of a file to write"),
    ("lab scale --output x.tex", "x.tex ends in '.tex', which names no format of a result"),
    ("lab scale --output broken.json", "broken.json exists already: add --force to replace it"),
    ("lab scale masking", "unrecognized arguments: masking"),
    ("dance", "invalid choice: 'dance'"),
    ("example --dance", "unrecognized arguments: --dance"),
]  # fmt: skip


NPY_OF_8_TB = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1048576, 1048576)}"
NPY_OF_8_TB = b"\x93NUMPY\1\0\x76\0" + NPY_OF_8_TB.ljust(117) + b"\n"


@pytest.fixture
def bad_files(tmp_path, numbers):
    texts = {
        "ragged.csv": "1,2\n3\n", "empty.csv": "\n", "half.csv": "0\n0.5\n1\n",
        "text.csv": "1,2\ncat,3\n",
        "v2.csv": "1,0\n0,2\n", "q1.csv": "1\n2\n3\n", "k2.csv": "1,1,1\n1,2,1\n1,1,1\n",
        "broken.json": '{"q": [', "list.json": "[1]", "lacks.json": '{"q": [[1]], "k": [[1]]}',
        "unknown.json": '{"q": [[1]], "k": [[1]], "v": [[1]], "dropout": 0.1}',
        "function.json": '{"q": [[1]], "k": [[1]], "v": [[1]], "mask_mod": "near"}',
        "causal.json": '{"q": [[1]], "k": [[1]], "v": [[1]], "causal": true}',
        "deep.json": '{"q": ' + "[" * 20 + "1" + "]" * 20 + ', "k": [[1]], "v": [[1]]}',
        "abyss.json": "[" * 100_000,
        "twice.json": '{"q": [[1]], "k": [[1]], "v": [[1]], "q": [[2]]}',
        "true.json": '{"q": [[true, 2]], "k": [[1]], "v": [[1]]}',
        "wide.json": '{"q": [[1]], "k": [[1]], "v": [[1]]}',
        "long.csv": "1" * 200_000,
        "word.json": '{"q": [["cat"]], "k": [[1]], "v": [[1]]}',
        "nested.json": '{"q": [[1], [1, 2]], "k": [[1]], "v": [[1]]}',
        "heads.json": json.dumps({"q": [[[1]]] * 4, "k": [[[1]]] * 3, "v": [[[1]]] * 3}),
        "ranks.json": '{"q": [[1]], "k": [[[1]]], "v": [[[1]]]}',
        "under.csv": "1,1_0\n", "words.csv": "1,-Infinity\n", "digits.csv": "1,１\n",
        "flat.json": '{"q": [1, 2], "k": [[1]], "v": [[1]]}',
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.csv").write_bytes(b"\xff\xfe\x80,1\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("precious")
    (tmp_path / "full" / "03_W_k.csv").mkdir()
    os.mkfifo(tmp_path / "pipe")
    one = np.ones((1, 1))
    np.savez(tmp_path / "object.npz", q=np.array([{"a": 1}], object), k=one, v=one)
    (tmp_path / "pickle.npz").write_bytes(pickle.dumps({"q": 1}))
    with open(tmp_path / "array.npz", "wb") as stream:
        np.save(stream, one)
    np.savez(tmp_path / "truncated.npz", q=one, k=one, v=one)
    whole = (tmp_path / "truncated.npz").read_bytes()
    (tmp_path / "truncated.npz").write_bytes(whole[: len(whole) // 2])
    with zipfile.ZipFile(tmp_path / "raw.npz", "w") as archive:
        for name in "qkv":
            archive.writestr(name, b"1")
    np.savez(tmp_path / "doubled.npz", q=one, k=one, v=one)
    with zipfile.ZipFile(tmp_path / "doubled.npz", "a") as archive:
        archive.writestr("q", b"1")
    np.savez(tmp_path / "claims.npz", k=one, v=one)
    with zipfile.ZipFile(tmp_path / "claims.npz", "a") as archive:
        archive.writestr("q.npy", NPY_OF_8_TB)
    np.savez(tmp_path / "names.npz", q=one, k=one, v=one)
    with zipfile.ZipFile(tmp_path / "names.npz", "a") as archive:
        archive.writestr("weights.npy", NPY_OF_8_TB)  # nothing is read where a name is wrong
    np.savez_compressed(tmp_path / "corrupt.npz", q=np.arange(1e4).reshape(-1, 1), k=one, v=one)
    whole = bytearray((tmp_path / "corrupt.npz").read_bytes())
    whole[200:400] = bytes(200)
    (tmp_path / "corrupt.npz").write_bytes(whole)


@pytest.mark.usefixtures("bad_files")
@pytest.mark.parametrize(("line", "sentence"), BAD_LINES, ids=[line for line, _ in BAD_LINES])
def test_bad_input_gets_a_sentence_and_changes_nothing(run, tmp_path, line, sentence):
    def contents():
        return {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()}

    before = contents()
    status, out, err = run(line)
    assert (status, out) == (2, "")
    assert sentence in err
    assert err.startswith("minimha: ")
    assert err.count("\n") == 1
    assert contents() == before


def test_a_text_has_a_limit(run, numbers, monkeypatch):
    monkeypatch.setattr("minimha.cli.inputs.LARGEST_TEXT", 11)
    status, _, err = run(numbers)
    assert status == 2
    assert "q.csv is too long: expected at most 11 bytes of text" in err


@pytest.mark.parametrize(
    ("q", "rows", "sentence"),
    [
        (
            (5000, 1000),
            1,
            "q would hold 5000 × 1000 = 5,000,000 numbers where 4,194,304 can be kept",
        ),
        ((5000, 1), 5000, "scores would hold 5000 × 5000 = 25,000,000 numbers where 4,194,304 can"),
        (
            (9, 1000, 1),
            1000,
            "scores would hold 9 × 1000 × 1000 = 9,000,000 numbers where 4,194,304",
        ),
    ],
)
def test_what_is_too_large_to_trace_is_refused_before_it_is_computed(run, q, rows, sentence):
    k = np.ones((*q[:-2], rows, q[-1]))
    np.savez("large.npz", q=np.ones(q), k=k, v=k)
    status, _, err = run("attend large.npz")
    assert status == 2
    assert sentence in err


def test_many_blocks_cannot_be_traced(run):
    status, _, err = run("flash --block-queries 1 --block-keys 1 --sentence", "word " * 65)
    assert status == 2
    assert "65 tokens make 4,225 blocks where 4,096 can be traced" in err


def test_a_kernel_takes_more_than_a_trace_keeps(run, tmp_path):
    column = np.ones((5000, 1))
    np.savez(tmp_path / "tall.npz", q=column, k=column, v=column)
    out = shown(run, "attend tall.npz --backend cpu --format json")
    assert json.loads(out)["steps"][0]["shape"] == [5000, 1]


@pytest.mark.skipif(os.name != "posix", reason="there are no named pipes elsewhere")
def test_a_pipe_is_read_as_a_file_is(run, numbers, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # so that a writer can open it, at once
    with open(pipe, "w") as file, ThreadPoolExecutor(1) as writer:

        def write():
            with file:
                file.write("1,0\n0,1\n1,1\n" * 9000)

        writer.submit(write)
        try:
            found = values(run, numbers.replace("q.csv", "pipe") + " --backend cpu", "output")
        finally:
            os.close(reader)  # a writer whom nobody reads any more ends with an error
    expected = values(run, numbers, "output")
    np.testing.assert_allclose(found[-3:], expected, atol=1e-6)


def test_python_2_s_arrays_are_read_without_a_warning(run, tmp_path):
    start = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1L, 1L)}".ljust(117) + b"\n"
    with zipfile.ZipFile(tmp_path / "old.npz", "w") as archive:
        for name in "qkv":
            archive.writestr(f"{name}.npy", b"\x93NUMPY\1\0\x76\0" + start + np.ones(1).tobytes())
    assert values(run, "attend old.npz", "output") == [[1]]


def test_an_empty_sentence(run):
    status, _, err = run("example --sentence", " ")
    assert (status, err) == (2, "minimha: the sentence has no tokens: expected at least one word\n")


@pytest.mark.parametrize("format", ["text", "markdown", "latex", "svg"])
def test_what_is_too_large_to_read_is_not_printed_but_can_be_exported(run, tmp_path, format):
    line = f"example --format {format} --sentence"
    status, out, err = run(line, "word " * 40)
    assert (status, out) == (2, "")
    assert "scores is too large to print, 40 × 40 = 1,600 numbers where 1,024 can be read" in err
    assert "export it with --format json, npz or csv and --output PATH" in err
    assert "x   L × E" in shown(run, "example --only x --sentence", "word " * 40)
    shown(run, "example --output big.npz --sentence", "word " * 40)
    with np.load(tmp_path / "big.npz") as archive:
        assert archive["scores"].shape == (2, 40, 40)
    shown(run, "example --output big.html --sentence", "word " * 40)


def test_many_small_matrices_can_be_too_many(run):
    status, _, err = run("example --tokens 12 --heads 32 --d-model 32")
    assert status == 2
    assert "all steps together are too large to print" in err


def test_a_problem_without_end_is_refused_in_a_sentence(run, monkeypatch):
    def exhausted(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr("minimha.cli.attend.attention", exhausted)
    np.savez("p.npz", q=np.ones((1, 1)), k=np.ones((1, 1)), v=np.ones((1, 1)))
    status, _, err = run("attend p.npz")
    assert (status, err) == (
        2, "minimha: the problem does not fit into memory: take fewer tokens or heads\n"
    )  # fmt: skip


def test_nothing_is_left_when_writing_fails(run, tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device", "x.json")

    monkeypatch.setattr("os.replace", fail)
    (tmp_path / "x.json").write_text("precious")
    status, _, err = run("example --output x.json --force")
    assert (status, err) == (
        2, "minimha: --output x.json cannot be written: No space left on device\n"
    )  # fmt: skip
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("x.json", "precious")]
