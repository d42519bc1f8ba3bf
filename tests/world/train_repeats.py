"""Train the model of ``minimha.models.repeats`` and write its weights, ``repeats.npz``.

    pip install -e '.[training]'
    python tests/world/train_repeats.py        # two minutes of one core

The model, its start and its optimizer are those of ``train.py``, with one layer less. Each text is
a random block of 4 to 32 letters that repeats to the end. The loss counts from the second letter of
the first repetition on, because those before cannot be predicted.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from world import train

from minimha.models import repeats

CONFIG = train.CONFIG | {"n_layer": 2}
BLOCKS = 4, 32  # letters of the shortest and of the longest block


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Letters (B, L + 1), and 1 for each of the last L that can be predicted (B, L)."""
    length = CONFIG["n_positions"]
    ids = torch.empty(train.BATCH, length + 1, dtype=torch.long)
    is_predictable = torch.zeros(train.BATCH, length)
    for row in range(train.BATCH):
        size = int(torch.randint(BLOCKS[0], BLOCKS[1] + 1, (1,), generator=generator))
        block = torch.randint(0, len(repeats.LETTERS), (size,), generator=generator)
        ids[row] = block.repeat(length // size + 2)[: length + 1]
        is_predictable[row, size:] = 1
    return ids, is_predictable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=repeats.WEIGHTS)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    model = train.GPT2(len(repeats.LETTERS), CONFIG)

    def loss() -> Tensor:
        ids, is_predictable = batch(generator)
        log_p = model(ids[:, :-1]).log_softmax(dim=-1).gather(-1, ids[:, 1:, None])[..., 0]
        return -(log_p * is_predictable).sum() / is_predictable.sum()

    train.descend(model, loss, args.steps)
    train.save(model, CONFIG, list(repeats.LETTERS), args.output)


if __name__ == "__main__":
    main()
