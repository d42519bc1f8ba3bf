"""``next`` and ``heads``: words with their probabilities, what leads to them, and bad input."""

import csv
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from command_line import refused, shown
from models import plain

from minimha.models.world import grammar

REPOSITORY = Path(__file__).parents[2]
TEXT = "the cats that saw the dog"


def exported(run, *line):
    return json.loads(shown(run, "next", *line, "--format", "json"))


def words(found):
    return {one["word"]: one["probability"] for one in found["words"]}


@pytest.mark.parametrize("text", ["the cat sat on the", TEXT, "anna gave tom the key . now"])
def test_the_most_probable_words_are_the_grammars(run, text):
    found = exported(run, text)
    exact = grammar.next_words(text.split())
    probabilities = [one["probability"] for one in found["words"]]
    assert probabilities == sorted(probabilities, reverse=True)
    for word, p in exact.items():
        assert words(found)[word] == pytest.approx(p, abs=0.02)


def test_bars_have_the_probabilities_and_the_rest(run):
    out = shown(run, "next", "the cat sat on the")
    lines = [line.split() for line in out.splitlines() if line.startswith("    ")]
    assert [line[0] for line in lines] == ["mat", "sofa", "chair"]
    assert all(float(line[2]) == pytest.approx(p, abs=0.02)
               for line, p in zip(lines, (0.5, 0.3, 0.2), strict=True))  # fmt: skip
    assert "The other 126 have 0.000 together." in out


def test_temperature_and_cuts_change_the_probabilities(run):
    p = words(exported(run, "the cat sat on the"))
    mat, sofa, chair = p["mat"], p["sofa"], p["chair"]
    two = words(exported(run, "the cat sat on the", "--top-k", "2", "--top", "2"))
    assert two == pytest.approx({"mat": mat / (mat + sofa), "sofa": sofa / (mat + sofa)})
    sharp = words(exported(run, "the cat sat on the", "--temperature", "0.5"))
    assert sharp["mat"] / sharp["chair"] == pytest.approx((mat / chair) ** 2)


def test_all_has_what_came_and_what_was_expected(run):
    found = exported(run, TEXT, "--all")
    assert [row["word"] for row in found["positions"]] == TEXT.split()
    begun = TEXT.split()
    for n, row in enumerate(found["positions"][:-1], 1):
        exact = grammar.next_words(begun[:n])[begun[n]]
        assert row["next"] == begun[n]
        assert row["probability"] == pytest.approx(exact, abs=0.03)
    assert found["words"][0]["word"] == "were"
    out = shown(run, "next", TEXT, "--all")
    assert "were 1.000" in out


def test_a_long_text_shows_its_last_words(run):
    text = "the cat sat on the mat . " * 6
    out = shown(run, "next", text, "--all")
    assert "… 18 earlier tokens" in out
    assert len(out.splitlines()) == 26


def test_the_lens_ends_in_the_prediction(run):
    found = exported(run, TEXT, "--lens")
    assert [row["after"] for row in found["layers"]] == [
        "embeddings", "layer 0", "layer 1", "layer 2",
    ]  # fmt: skip
    assert found["layers"][-1]["words"] == found["words"]
    last = words(exported(run, TEXT))
    assert {w: words(found)[w] for w in ("were",)} == pytest.approx({"were": last["were"]})
    assert "layer 2: were" in shown(run, "next", TEXT, "--lens")


def test_words_are_drawn_by_a_seed(run):
    line = "anna", "--generate", "12", "--seed", "3"
    first, second = exported(run, *line), exported(run, *line)
    assert first == second
    assert len(first["generated"]) == 12
    begun = ["anna"]
    for word in first["generated"]:  # each of which the grammar has there
        assert grammar.next_words(begun).get(word, 0) > 0
        begun.append(word)
    assert shown(run, "next", *line).strip() == first["text"]


def test_a_removed_head_is_shown_beside_the_whole_model(run):
    removed = "--without-head", "2.0", "--without-head", "2.3", "--without-head", "1.3"
    found = exported(run, TEXT, *removed)
    assert found["without_heads"] == ["L2H0", "L2H3", "L1H3"]
    assert found["ablation"] == "zero"
    by_word = {one["word"]: one for one in found["words"]}
    assert by_word["were"]["probability"] > 0.99
    assert by_word["were"]["without"] < by_word["were"]["probability"]
    assert "heads L2H0, L2H3, L1H3 give zeros" in shown(run, "next", TEXT, *removed)
    out = shown(run, "next", TEXT, *removed[:2], "--ablation", "mean")
    assert "head L2H0 gives its mean output" in out


def test_every_step_is_exported_and_the_probabilities_are_there(run):
    found = json.loads(shown(run, "next", "the cat", "--trace", "--format", "json"))
    names = [step["name"] for step in found["steps"]]
    assert {"embedded", "weights[layer 2]", "final_normed", "logits", "probabilities"} <= {*names}
    p = next(step for step in found["steps"] if step["name"] == "probabilities")["value"]
    np.testing.assert_allclose(np.sum(p, axis=1), 1)


def test_one_layer_and_one_head_as_text(run):
    out = shown(run, "next", "the cat sat", "--layer", "1", "--head", "2")
    assert "weights[layer 1] · head 2" in out
    assert "Left out here: " in out
    assert "layer 0" not in out
    assert "softmax weights, layer 1, head 2" in out  # the heatmap


@pytest.mark.parametrize(
    ("step", "cell", "line"),
    [
        ("final_mean", "sat", "final_mean: μ[sat] = ("),
        ("final_normed", "sat,3", "/ √("),
        ("normed[layer 1]", "sat,3", " + 1e-05) + "),
        ("activated[layer 1]", "sat,3", "(1 + tanh(√(2/π) · ("),
        ("feed_forward[layer 1]", "sat,3", "feed_forward[layer 1]: F[sat,3] = "),
        ("logits", "sat,on", "logits: logits[sat,on] = "),
        ("probabilities", "sat,on", "probabilities: p[sat,on] = exp("),
    ],
)
def test_cells_are_written_out(run, step, cell, line):
    out = shown(run, "next", "the cat sat", "--query", "sat", "--only", step, "--cell", cell)
    assert line in out.partition("\ncell ")[2]
    assert "given" not in out.partition("\ncell ")[2]


def test_a_long_vocabulary_is_printed_by_its_likeliest_words(run):
    out = shown(run, "next", "the cat sat on the", "--only", "logits")
    assert "L × V = 5 × 16 of 129" in out
    heads = next(line for line in out.splitlines() if line.split()[:1] == ["mat"])
    assert heads.split()[:3] == ["mat", "sofa", "chair"]


def test_heads_are_found(run):
    out = shown(run, "heads", "--format", "json")
    found = json.loads(out)
    rows = {row["head"]: row for row in found["tables"][0]["rows"]}
    assert len(rows) == 13
    assert rows["L2H0"]["does"] == "agreement"
    assert rows["L2H0"]["agreement"] > 0.9
    assert rows["uniform"]["agreement"] < 0.25
    text = shown(run, "heads")
    assert "in L1H3, L2H0, L2H3 to the subject of the verb" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100


def test_sentences_of_a_file(run, tmp_path):
    (tmp_path / "s.txt").write_text("the cat sat on the mat .\n\nthe dog slept on the rug .\n")
    found = json.loads(shown(run, "heads --sentences s.txt --format json"))
    assert "Over 2 sentences" in found["about"]
    assert "agreement" not in found["tables"][0]["rows"][0]


def test_pictures_are_xml_with_every_word(run):
    for line, said in ((["next", "the cat sat on the"], "sofa"), (["heads"], "induction"),
                       (["next", TEXT, "--lens"], "layer 1: was")):  # fmt: skip
        status, picture, err = run("", *line, "--format", "svg")
        assert (status, err) == (0, "")
        assert said in " ".join(ET.fromstring(picture).itertext())


def test_csv_is_a_table(run):
    rows = list(csv.DictReader(shown(run, "next", TEXT, "--format", "csv").splitlines()))
    assert rows[0]["word"] == "were"
    assert float(rows[0]["probability"]) > 0.99


def test_a_model_of_ones_own(run, tmp_path):
    pytest.importorskip("tokenizers", reason="the tokenizer of the checkpoint needs it")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tensors = plain.gpt2_tensors(np.random.default_rng(0))
    folder = plain.write(tmp_path / "m", plain.GPT2, tensors)
    tokenizer = Tokenizer(WordLevel({f"w{n}": n for n in range(23)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    exact = {name: W.astype(float) for name, W in tensors.items()}
    logits = plain.gpt2_logits(exact, np.array([3, 5]))[-1]
    p = np.exp(logits - logits.max())
    p /= p.sum()
    found = words(exported(run, "w3 w5", "--model", "m"))
    for word, probability in found.items():
        assert probability == pytest.approx(p[int(word[1:])], abs=1e-5)
    (tmp_path / "s.txt").write_text("w1 w2 w1 w2\n")
    assert "induction" in shown(run, "heads --model m --sentences s.txt")


def own_model(folder, tensors, **changes):
    """A GPT-2 with a tokenizer of 23 words."""
    tokenizers = pytest.importorskip("tokenizers", reason="the checkpoint's tokenizer needs it")
    plain.write(folder, plain.GPT2 | changes, tensors)
    words = {f"w{n}": n for n in range(23)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_a_model_of_nan_says_so(run, tmp_path):
    tensors = plain.gpt2_tensors(np.random.default_rng(0))
    own_model(tmp_path / "m", {name: W * np.float32("nan") for name, W in tensors.items()})
    for options in (
        [],
        ["--lens"],
        ["--all"],
        ["--generate", "2", "--format", "json"],
        ["--trace"],
    ):
        out = refused(run, "next", "w3 w5", "--model", "m", *options)
        assert "the model's logits are NaN or infinite: they give no probabilities" in out
    (tmp_path / "s.txt").write_text("w1 w2 w1 w2\n")
    out = refused(run, "heads --model m --sentences s.txt")
    assert "the model's weights of attention are NaN" in out


def test_writing_stops_after_the_token_that_ends_a_text(run, tmp_path):
    tensors = plain.gpt2_tensors(np.random.default_rng(0))
    own_model(tmp_path / "m", tensors)
    line = "w3 w5", "--model", "m", "--generate", "6", "--top-k", "1"
    words = exported(run, *line)["generated"]
    own_model(tmp_path / "m", tensors, eos_token_id=int(words[2][1:]))
    assert exported(run, *line)["generated"] == words[: words.index(words[2]) + 1]


def test_a_model_that_does_not_fit_into_memory_is_named(run, tmp_path, monkeypatch):
    def load(path):
        raise MemoryError

    monkeypatch.setattr("minimha.models.load", load, raising=False)
    assert "the weights of m do not fit into memory" in refused(run, "next", "w3", "--model", "m")


def test_a_message_is_put_into_the_chat_template(run, tmp_path):
    pytest.importorskip("jinja2", reason="jinja2, which renders the template, is missing")
    own_model(tmp_path / "m", plain.gpt2_tensors(np.random.default_rng(0)))
    line = "next", "w3 w5", "--model", "m"
    assert "m has no chat template: expected chat_template" in refused(run, *line, "--chat")
    template = "w7 {% for m in messages %}{{ m.content }} w9{% endfor %}"
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    whole = "w7 w3 w5 w9", "--model", "m"
    for options in ([], ["--generate", "4"], ["--lens"], ["--all"], ["--trace"]):
        found, wanted = (
            exported(run, *line[1:], "--chat", *options),
            exported(run, *whole, *options),
        )
        for key in ("words", "generated", "positions", "layers", "steps"):
            assert found.get(key) == wanted.get(key)
    answer = exported(run, *whole, "--generate", "4", "--top-k", "1")["generated"]
    out = shown(run, *line, "--chat", "--generate", "4", "--top-k", "1")
    assert out.split() == answer
    template = "{{ raise_exception('roles must alternate') }}"
    (tmp_path / "m" / "chat_template.jinja").write_text(template)
    out = refused(run, *line, "--chat")
    assert "chat_template.jinja cannot be rendered: roles must alternate" in out


BAD = [
    (["the kitten sat"], "129 words: 'kitten' (nearest: kitchen, then, "),
    ([" "], "TEXT is empty"),
    (["the", "--temperature", "0"], "the likeliest token alone is --top-k=1"),
    (["the", "--top-k", "0"], "--top-k is 0: expected an integer of at least 1"),
    (["the", "--top-p", "2"], "--top-p is 2.0: expected a number from 0 to 1"),
    (["the", "--generate", "65"], "--generate is 65 after 1 token: the model has only 64"),
    (["the cat " * 40], "the text has 80 tokens: the model has only 64 positions"),
    (["the", "--layer", "3"], "no layer 3 here: the layers are 0 to 2"),
    (["the", "--head", "4"], "no head 4 here: the heads are 0 to 3"),
    (["the", "--without-head", "3.0"], "no head '3.0': expected layer and head, from L0H0 to L2H3"),
    (["the", "--without-head", "1"], "no head '1': expected layer and head"),
    (["the", "--ablation", "mean"], "add --without-head"),
    (["the", "--all", "--layer", "1"], "--all shows words and no steps: leave out --layer"),
    (["the", "--trace", "--top-k", "2"], "change no step"),
    (["the", "--format", "npz"], "npz holds the steps and not the words alone: add --trace"),
    (["the", "--all", "--format", "svg"], "--all has no picture"),
    (["the", "--model", "nowhere"], "expected one with config.json, or a .gguf file"),
    (["the", "--chat"], "--chat needs a model with a chat template: a model that ships has none"),
    (["the", "--model", "none"], "none has no tokenizer (in a folder, tokenizer.json)"),
]


@pytest.mark.parametrize(("line", "sentence"), BAD)
def test_bad_input_gets_a_sentence(run, tmp_path, line, sentence):
    plain.write(tmp_path / "none", plain.GPT2, plain.gpt2_tensors(np.random.default_rng(0)))
    assert sentence in refused(run, "next", *line)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_pipe_that_knows_few_characters(encoding):
    for line in (["next", "the cat sat on the"], ["next", TEXT, "--lens"], ["heads"]):
        done = subprocess.run(
            [sys.executable, "cli.py", *line], cwd=REPOSITORY, capture_output=True, check=True,
            timeout=120, env={**os.environ, "PYTHONIOENCODING": encoding},
        )  # fmt: skip
        assert done.stderr == b""
        assert "█" not in done.stdout.decode(encoding)


def test_the_next_word_loads_neither_numba_nor_what_it_does_not_use():
    run = "import sys\nfrom minimha.cli import main\nmain(['next', 'the cat'])\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", run], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "minimha.models.world" in loaded
    unused = {"numba", "tokenizers", "csv", "minimha.models.interpretability"}
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":  # before, NumPy loads it itself
        unused.add("numpy.ma")
    assert not unused & loaded
