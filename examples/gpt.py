"""A small GPT over bytes, and a text that every machine has: the source code of Python's standard library.

Shared by train_gpt.py, train_gpt_fsdp.py and train_3d.py, which show the training loop.
"""

from __future__ import annotations

import argparse
import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def arguments(**sizes: int) -> argparse.Namespace:
    """The options of all scripts, and sizes with defaults that only one of them has."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--context", type=int, default=64, help="bytes per sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--print-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--evaluate-every", type=int, default=100, metavar="STEPS")
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--out", type=Path, help="file for the hash of the final parameters")
    return parser.parse_args()


@dataclass(frozen=True)
class GPTConfig:
    layers: int = 4
    heads: int = 4
    width: int = 160
    context: int = 64
    vocabulary: int = 256
    dropout: float = 0.1


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.norm_1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm_2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
            nn.Dropout(config.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # head by head, so that a part of the columns is some of the heads: tensor parallelism splits columns
        split = self.qkv(self.norm_1(x)).view(batch, length, -1, 3, width // self.heads)
        q, k, v = split.permute(3, 0, 2, 1, 4)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def load_text(megabytes: int = 2) -> Tensor:
    """The first megabytes of the standard library's modules, in alphabetical order, as bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= megabytes << 20:
            break
    return torch.frombuffer(text[: megabytes << 20], dtype=torch.uint8)


def draw(text: Tensor, batch: int, context: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """A random batch: `context` bytes each, and the bytes that follow them."""
    starts = torch.randint(len(text) - context - 1, (batch,), generator=generator)
    pieces = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
    return pieces[:, :-1], pieces[:, 1:]


def held_out_loss(model: nn.Module, text: Tensor, batch: int, context: int) -> float:
    """The loss on the end of a text; draws no random numbers."""
    pieces = text[-batch * (context + 1) :].view(batch, context + 1).long()
    model.eval()
    with torch.no_grad():
        loss = loss_of(model(pieces[:, :-1]), pieces[:, 1:])
    model.train()
    return loss.item()


def sha256(parameters: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
