"""The model that ships: a small GPT-2, trained on sentences of a small world.

The training text was drawn from ``minimha.models.world.grammar``, so the right probability of every
next word is known. The table is for up to 200 questions about each relation, in the first passage
of a text and in a later passage. It shows the share of right answers, and the largest difference
between a word's probability and the grammar's. No training passage began like a question about a
receiver, a repetition or a description; the grammar has too few of the other kinds to leave any
out::

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

No question asks who may receive something, and there the model is sometimes wrong: after "anna
gave the lamp to" it gives the giver a probability of 0.005 to 0.045, where the grammar gives 0. The
mean is 0.028 over all givers and things given or sold.

The world has no questions such as "where is the ball?". Models trained on them knew which places
had been named, but chose among them at random.

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
    """Return the small world's model, with its tokenizer.

    Examples
    --------
    >>> model = load()
    >>> logits = model.logits(model.tokenizer.encode("the cat sat on the"))
    >>> model.tokenizer.label(logits[-1].argmax())
    'mat'
    """
    with np.load(WEIGHTS) as stored:
        tensors = {name: stored[name] for name in stored.files}
    config = json.loads(tensors.pop("config").item())
    words = Words(tensors.pop("vocabulary").tolist())
    return cast(Transformer, from_tensors(config, tensors, words))
