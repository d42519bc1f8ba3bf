"""Functions that have the deviations that they are told to have."""

import ml_dtypes
import numpy as np

from minimha.check.answer import Answer
from minimha.check.deviated import HIDDEN_ROWS, deviate
from minimha.check.layer_deviated import PreparedLayer, deviate_layer
from minimha.check.prepared import Impossible
from minimha.check.search import Problems

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def answers(problems, deviations, dtype="float32", prepared=None):
    """What a function with ``deviations``, identifiers and values, answers to each problem."""
    prepared = prepared or Problems(problems, dtype).prepared
    return [
        answer(problem, x, deviations, dtype) for problem, x in zip(problems, prepared, strict=True)
    ]


def answer(problem, prepared, deviations, dtype):
    try:
        of = deviate_layer if isinstance(prepared, PreparedLayer) else deviate
        found = of(prepared, deviations)
    except Impossible as error:
        return Answer(None, refusal=str(error))
    output = found.output
    if {"nan_leaks", *HIDDEN_ROWS} & set(deviations) and found.others:
        output = found.others[0]
    lse = found.lse
    if "lse_of_dead_rows" in deviations:
        lse = np.where(np.isneginf(lse), -1e9, lse)
    with np.errstate(all="ignore"):
        rounded = output.astype(DTYPES[dtype]).astype(np.float32)
        given = lse.astype(np.float32) if problem.arguments.get("return_lse") else None
    return Answer(rounded, given, dtype=dtype)
