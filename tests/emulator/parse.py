"""PTX text to statements and operands."""

from __future__ import annotations

import re

import numpy as np

DTYPES = {
    "pred": np.bool_, "u8": np.uint8, "s8": np.int8,
    "u16": np.uint16, "s16": np.int16, "f16": np.float16,
    "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "u64": np.uint64, "s64": np.int64, "f64": np.float64,
}  # fmt: skip
SAME = {"b8": "u8", "b16": "u16", "b32": "u32", "b64": "u64",
        "bf16": "u16", "f16x2": "u32", "bf16x2": "u32"}  # fmt: skip
BYTES = {name: np.dtype(dtype).itemsize for name, dtype in DTYPES.items()}


def constant(kind, value):
    """A number, or the bits of one, as NumPy's number of that kind."""
    if isinstance(value, np.ndarray):
        return value.view(DTYPES[kind])
    if kind == "pred" or kind.startswith("f"):
        return np.array(value, DTYPES[kind])
    bits = 8 * BYTES[kind]
    return np.array(value & (1 << bits) - 1, DTYPES["u" + kind[1:]]).view(DTYPES[kind])


def kind_of(name):
    return SAME.get(name, name)


NO_STATEMENT = re.compile(r"\s+|\.loc\s[^\n]*")
LABEL = re.compile(r"([$\w]+):(?!:)")


def statements(body):
    """(label or None, text or None) of a PTX body, in order; scopes get names of their own."""
    found, scopes, number = [], [{}], 0
    position, end = 0, len(body)
    while position < end:
        if nothing := NO_STATEMENT.match(body, position):
            position = nothing.end()
        elif body[position] == "{":
            scopes.append({})
            number += 1
            position += 1
        elif body[position] == "}":
            scopes.pop()
            position += 1
        elif label := LABEL.match(body, position):
            found.append((label.group(1), None))
            position = label.end()
        else:
            stop = body.index(";", position)
            text = " ".join(body[position:stop].split())
            position = stop + 1
            if len(scopes) > 1:
                if text.startswith(".reg"):
                    for name in re.findall(r"%?[\w$]+", text.split(None, 2)[2]):
                        scopes[-1][name] = f"%{name.strip('%')}.{number}"
                    text = renamed(text, scopes[-1])
                else:
                    for scope in scopes[:0:-1]:
                        text = renamed(text, scope)
            found.append((None, text))
    return found


def renamed(text, names):
    return re.sub(r"%?[\w$]+", lambda word: names.get(word.group(), word.group()), text)


def pieces_of(text):
    """An instruction's operands: split at commas outside of brackets."""
    operands, depth, start = [], 0, 0
    for i, sign in enumerate(text):
        depth += (sign in "{[(") - (sign in "}])")
        if sign == "," and depth == 0:
            operands.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*operands, last] if last else operands


def listed(text):
    """Names in ``{a, b}``; a name by itself is a list of one."""
    return [name.strip() for name in text.strip("{} ").split(",")]
