"""examples/train_3d.py, whose loss is no number from one step on: on one node, or everywhere in the first attempts.

    evertrain run … replayed.py --bad-node node-4 [--at STEP] [options of train_3d.py]
    evertrain run … replayed.py --bad-attempts 2

In a replay nothing of it happens: there EVERTRAIN_REPLAY_FAULT says who computes wrongly, as that node would.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import torch
import train_3d
from torch import Tensor

import evertrain

parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
parser.add_argument("--bad-node", default="")
parser.add_argument("--bad-attempts", type=int, default=0)
parser.add_argument("--at", type=int, default=5)
options, rest = parser.parse_known_args()

JOB = evertrain.init()
assert JOB is not None
IS_BAD = JOB.attempt <= options.bad_attempts or JOB.node == options.bad_node
draw, loss_of = train_3d.draw, train_3d.loss_of


class Done:
    """Steps, the one that is being done included."""

    steps = JOB.resume_step or 0


def next_batch(text: Tensor, batch: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    Done.steps += 1
    return draw(text, batch, context, generator)


def spoilt_loss(logits: Tensor, targets: Tensor) -> Tensor:
    loss = loss_of(logits, targets)
    return loss * float("nan") if Done.steps >= options.at else loss


def main() -> None:
    train_3d.draw = next_batch
    if IS_BAD and evertrain.replay_config() is None:
        train_3d.loss_of = spoilt_loss
    sys.argv[1:] = rest
    train_3d.main()


if __name__ == "__main__":
    main()
