"""Answers of functions with and without given deviations."""

import ml_dtypes
import numpy as np

from minimha.check.answer import Answer
from minimha.check.catalogue_delta import CLEARING, NAN_LEAKS
from minimha.check.prepared import Impossible
from minimha.check.search import deviated, known
from minimha.check.wrong_attention import HIDDEN_ROWS

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# Deviations of which a function answers with the first of the other outputs that are accepted.
ANOTHER = {"nan_leaks", *HIDDEN_ROWS, *NAN_LEAKS, *CLEARING, "delta_decay_overflows"}
ROUNDED_BY = {  # deviations that come to rounding in the dtype itself, which is right
    "float32": set(),
    "float16": {
        "inputs_in_tf32", "inputs_in_float16", "weights_in_float16", "delta_state_in_16_bits",
    },
    "bfloat16": {
        "inputs_in_bfloat16", "inputs_in_tf32", "inputs_in_float16", "weights_in_bfloat16",
        "softcap_approximated", "delta_state_in_16_bits", "index_in_float8",
    },
}  # fmt: skip


def answers(problems, deviations, dtype="float32", prepared=None):
    """What a function with ``deviations``, identifiers and values, answers to each problem."""
    prepared = prepared or [known(problem, dtype).prepared for problem in problems]
    return [
        answer(problem, x, deviations, dtype) for problem, x in zip(problems, prepared, strict=True)
    ]


def answered_by(function, problems):
    """The answers of a NumPy function; an exception is a refusal."""
    found = []
    for problem in problems:
        arguments = {n: x.copy() if n in "qkv" else x for n, x in problem.arguments.items()}
        try:
            with np.errstate(all="ignore"):
                result = function(**arguments)
        except (TypeError, ValueError, NotImplementedError) as error:
            found.append(Answer(None, refusal=str(error)))
            continue
        output, lse = result if isinstance(result, tuple) else (result, None)
        found.append(Answer(np.asarray(output, np.float32), lse))
    return found


def answer(problem, prepared, deviations, dtype):
    try:
        found = deviated(prepared, deviations)
    except Impossible as error:
        return Answer(None, refusal=str(error))
    output = found.output
    if ANOTHER & set(deviations) and found.others:
        output = found.others[0]
    if {"dead_rows_numbers", "nan_becomes_number"} & set(deviations):
        output = np.where(found.is_free, 0.75, output)
    lse = found.lse
    if "lse_of_dead_rows" in deviations:
        lse = np.where(np.isneginf(lse), -1e9, lse)
    with np.errstate(all="ignore"):
        rounded = output.astype(DTYPES[dtype]).astype(np.float32)
        given = lse.astype(np.float32) if problem.arguments.get("return_lse") else None
    return Answer(rounded, given, dtype=dtype)
