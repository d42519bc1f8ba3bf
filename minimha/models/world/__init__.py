"""The small GPT-2 in this package, trained on sentences about a small world.

The training text was drawn from ``minimha.models.world.grammar``, so the exact probability of every
next word is known. The table is for up to 200 questions about each relation. A question is the
first passage of a text, or follows another passage. The table shows the share of right answers, and
the largest error of a word's probability. No training passage began like a question about a
receiver, a repetition or a description. Of the other kinds, the grammar has too few different
passages to leave any out of training::

                            first             after another
                            right   largest   right   largest
    seat                    1.000   0.019     1.000   0.019
    agreement               1.000   0.000     1.000   0.001
    he or she               1.000   0.000     1.000   0.000
    it or they              1.000   0.000     1.000   0.000
    too wide or too tired   1.000   0.006     1.000   0.016
    reason                  1.000   0.004     1.000   0.009
    bank of the river       1.000   0.000     1.000   0.000
    loan of the bank        1.000   0.000     1.000   0.000
    which bank              1.000   0.006     1.000   0.012
    receiver                1.000   0.002     1.000   0.001
    thing received          1.000   0.000     1.000   0.000
    repetition              1.000   0.000     1.000   0.000
    description             1.000   0.000     1.000   0.000

No question asks to whom something may be given, and there the model is sometimes wrong. After "anna
gave the lamp to", it predicts the giver with a probability of 0.005 to 0.045, where the grammar has
0. The mean is 0.028 over all givers and things given or sold.

The training text has no questions such as "where is the ball?". Models trained on such questions
chose at random among the places named before.

``tests/world/judge.py`` prints this table, and a test compares it with the weights.
"""

import json
from pathlib import Path
from typing import cast

import numpy as np

from minimha.models.checkpoints import from_tensors
from minimha.models.transformer import Transformer
from minimha.models.world.words import Words

__all__ = ["load"]

WEIGHTS = Path(__file__).with_name("world.npz")


def load() -> Transformer:
    """Return the small GPT-2 that this package contains, with its tokenizer.

    Examples
    --------
    >>> model = load()
    >>> logits = model.logits(model.tokenizer.encode("the cat sat on the"))
    >>> model.tokenizer.label(logits[-1].argmax())
    'mat'
    """
    return read(WEIGHTS)


def read(path: Path) -> Transformer:
    """Return the model in an .npz file, which has tensors, a vocabulary and a config.json."""
    with np.load(path) as stored:
        tensors = {name: stored[name] for name in stored.files}
    for name, x in tensors.items():
        if x.dtype == np.float16:  # so few numbers are widened once, not whenever they are used
            tensors[name] = x.astype(np.float32)
    config = json.loads(tensors.pop("config").item())
    words = Words(tensors.pop("vocabulary").tolist())
    return cast(Transformer, from_tensors(config, tensors, words))
