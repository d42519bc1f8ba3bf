"""Train the model of ``minimha.models.world`` and write its weights, ``world.npz``.

    pip install -e '.[training]'
    python tests/world/train.py        # minutes of one core

The architecture is GPT-2's, and the tensors carry its names. What made the model learn in minutes:

- The position embedding starts as sinusoids, and each head with W_k = W_q and W_o = W_vᵀ: it
  copies words from places near by and from places like its own (Trockman and Kolter, "Mimetic
  Initialization of Self-Attention Layers", 2023).
- The target after each word is the grammar's shares of the words that may follow in this kind of
  passage, not the one that was drawn: the luck of the draw is no noise in the gradient.

The text is drawn as it is needed, so that no sentence is learned by heart.
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from minimha.models import world
from minimha.models.world import grammar, questions

CONFIG = {
    "model_type": "gpt2", "n_layer": 3, "n_head": 4, "n_embd": 64, "n_positions": 64,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
BATCH, PEAK_RATE, WARM_UP = 32, 3e-3, 100


class Linear(nn.Module):
    """x W + b, with W of shape (in, out) as in GPT-2's checkpoints."""

    def __init__(self, width: int, out: int, std: float = 0.1) -> None:
        super().__init__()
        self.weight = nn.Parameter(std * torch.randn(width, out))
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); x is (B, L, E)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict(
            {"c_attn": Linear(width, 3 * width), "c_proj": Linear(width, width)}
        )
        W_q, W_k, W_v = self.attn["c_attn"].weight.data.chunk(3, dim=1)
        W_k.copy_(W_q)
        self.attn["c_proj"].weight.data.copy_(W_v.T)
        self.mlp = nn.ModuleDict(
            {"c_fc": Linear(width, 4 * width), "c_proj": Linear(4 * width, width, std=0.04)}
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.attn["c_attn"](self.ln_1(x)).chunk(3, dim=-1)
        )
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](heads.transpose(1, 2).flatten(2))
        hidden = functional.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        return x + self.mlp["c_proj"](hidden)


class GPT2(nn.Module):
    """Logits (B, L, V) of the next word after each of (B, L) words."""

    def __init__(self, vocabulary: int, config: dict[str, Any]) -> None:
        super().__init__()
        E = config["n_embd"]
        self.wte = nn.Embedding(vocabulary, E)
        self.wpe = nn.Embedding(config["n_positions"], E)
        self.h = nn.ModuleList(Block(E, config["n_head"]) for _ in range(config["n_layer"]))
        self.ln_f = nn.LayerNorm(E)
        angles = torch.arange(config["n_positions"])[:, None] * 100 ** -(torch.arange(0, E, 2) / E)
        nn.init.normal_(self.wte.weight, std=0.1)
        self.wpe.weight.data = 0.3 * torch.cat([angles.sin(), angles.cos()], dim=1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.T


class Text:
    """Text drawn from the grammar, each row from a passage's first word on.

    Passages that the model will be asked about are left out.
    """

    def __init__(self, vocabulary: list[str], seed: int) -> None:
        self.ids = {word: i for i, word in enumerate(vocabulary)}
        self.draw = random.Random(seed)
        self.held_out = questions.held_out()
        self.lengths = {len(words) for words in self.held_out}

    def batch(self) -> tuple[Tensor, Tensor]:
        """Words (B, L), and the shares of the words that may follow each (B, L, V)."""
        length = CONFIG["n_positions"] + 1
        words = np.zeros((BATCH, length), np.int64)
        targets = np.zeros((BATCH, length, len(self.ids)), np.float32)
        for row in range(BATCH):
            steps = self._steps(length)
            words[row] = [self.ids[word] for word, _ in steps]
            for i, (_, following) in enumerate(steps):
                targets[row, i, [self.ids[word] for word in following]] = list(following.values())
        return torch.from_numpy(words[:, :-1]), torch.from_numpy(targets[:, 1:])

    def _steps(self, length: int) -> list[tuple[str, dict[str, float]]]:
        """Words, each with the shares of what could have stood there."""
        steps: list[tuple[str, dict[str, float]]] = []
        while len(steps) < length:
            passage = list(grammar.walk(grammar.any_kind(self.draw), self.draw))
            words = tuple(word for word, _ in passage)
            if not any(words[:n] in self.held_out for n in self.lengths):
                steps += passage
        return steps[:length]


def train(vocabulary: list[str], num_steps: int, seed: int) -> GPT2:
    """Train on the small world's text."""
    torch.manual_seed(seed)
    model, text = GPT2(len(vocabulary), CONFIG), Text(vocabulary, seed)

    def loss() -> Tensor:
        words, targets = text.batch()
        log_p = model(words).log_softmax(dim=-1)
        return functional.kl_div(log_p, targets, reduction="sum") / words.numel()

    descend(model, loss, num_steps)
    return model


def descend(model: GPT2, loss: Callable[[], Tensor], num_steps: int) -> None:
    """AdamW; the rate rises for WARM_UP steps, stays, and falls to 0 over the second half."""
    torch.set_num_threads(1)  # the sums' order, and with it every weight, then does not vary
    optimizer = torch.optim.AdamW(model.parameters(), PEAK_RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / WARM_UP, 2 * (1 - step / num_steps))
    )
    for step in range(num_steps):
        found = loss()
        optimizer.zero_grad()
        found.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 200 == 199:
            print(f"step {step + 1}: {found.item():.4f} nats", flush=True)


def save(model: GPT2, config: dict[str, Any], vocabulary: list[str], path: Path) -> None:
    """Write weights in float16, config.json and vocabulary, as ``world.read`` reads them."""
    weights = {name: w.detach().half().numpy() for name, w in model.state_dict().items()}
    text = json.dumps(config | {"vocab_size": len(vocabulary)})
    np.savez_compressed(path, config=text, vocabulary=vocabulary, **weights)
    print(f"{path}: {path.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=world.WEIGHTS)
    args = parser.parse_args()
    vocabulary = grammar.vocabulary()
    save(train(vocabulary, args.steps, args.seed), CONFIG, vocabulary, args.output)


if __name__ == "__main__":
    main()
