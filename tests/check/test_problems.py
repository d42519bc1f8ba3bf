import inspect

import ml_dtypes
import numpy as np
import pytest

from minimha import attention
from minimha.check.arranged import arranged
from minimha.check.expanded import ARRANGING
from minimha.check.problems import graded, layer_problems

OPTIONS = set(inspect.signature(attention).parameters) - {"q", "k", "v", "backend", "tap"}
OPTIONS -= {*ARRANGING}  # no graded problem has these; reports list each of them
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_representable(dtype):
    for problem in graded(dtype):
        for name in "qkv":
            x = problem.arguments[name]
            with np.errstate(over="ignore"):
                narrow = x.astype(DTYPES[dtype]).astype(np.float32)
            np.testing.assert_array_equal(narrow, x, err_msg=problem.name)


def test_problems_have_names_of_their_own_and_cannot_be_written_to():
    problems = graded()
    assert len({problem.name for problem in problems}) == len(problems)
    for problem in problems:
        arrays = [x for x in problem.arguments.values() if isinstance(x, np.ndarray)]
        assert not any(x.flags.writeable for x in arrays)


def test_problems_are_drawn_as_they_were():
    """Answers that were computed elsewhere belong to the problems of this version."""
    x = graded()[0].arguments
    assert x["q"][0, 0, 0].tolist() == [-0.4375, 0.8125, -0.0625, -0.4375]


def test_every_option_is_asked_for_and_its_first_problem_has_no_other():
    seen = {}
    for problem in graded():
        for option in problem.options:
            seen.setdefault(option, set(problem.options))
    assert set(seen) == OPTIONS
    alone = OPTIONS - {"q_offset"}  # which means something only beside another option
    assert all(seen[option] == {option} for option in alone)


def test_what_no_graded_problem_has_is_asked_for_in_arranged_problems():
    assert set(ARRANGING) <= {option for problem in arranged() for option in problem.options}


def test_positions_and_masks_have_a_square_problem():
    """For functions that need Lq = Lk."""
    options = {"is_causal", "window_size", "attn_mask", "attn_bias", "kv_lengths", "alibi_slopes"}
    square = set()
    for problem in graded():
        q, k = problem.arguments["q"], problem.arguments["k"]
        if q.shape == k.shape and len(problem.options) == 1:
            square |= set(problem.options)
    assert options <= square


def test_what_differs_by_head_is_asked_where_heads_share_keys():
    grouped = set()
    for problem in graded():
        H, Hkv = problem.arguments["q"].shape[1], problem.arguments["k"].shape[1]
        by_head = {n for n, x in problem.options.items() if H in np.shape(x)[-3:][:1]}
        grouped |= by_head if 1 < Hkv < H else set()
    assert {"alibi_slopes", "sinks", "attn_mask", "attn_bias"} <= grouped


def test_attention_answers_every_problem():
    for problem in graded():
        found = attention(**problem.arguments, backend="dense")
        output = found[0] if problem.arguments.get("return_lse") else found
        q, v = problem.arguments["q"], problem.arguments["v"]
        assert output.shape == (*q.shape[:3], v.shape[3])


def test_layers_say_what_they_are_made_of():
    for problem in layer_problems():
        assert {f"W_{name}" for name in "qkvo"} <= set(problem.layer)
        x, W = problem.arguments["x"], problem.layer["W_o"]
        assert x.shape[-1] == problem.layer["W_q"].shape[0] == W.shape[1]
        assert sum(problem.chunks) in (0, x.shape[1])


def test_an_unknown_dtype_is_named():
    with pytest.raises(ValueError, match="dtype is 'float8'"):
        graded("float8")
