"""Trains a small GPT with DDP on the CPU. The few lines with `evertrain` make it survive whatever happens to a rank.

evertrain run --nproc-per-node 4 examples/train_gpt.py --steps 200
torchrun --nproc-per-node 4 examples/train_gpt.py --steps 200          # runs too, but does not survive
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig, arguments, draw, held_out_loss, load_text, loss_of, sha256
from torch.nn.parallel import DistributedDataParallel

import evertrain


def train(args: argparse.Namespace) -> None:
    rank = dist.get_rank()
    replay = evertrain.replay_config()
    if replay:  # on some of the nodes, to find the one that computes wrongly
        args.layers, args.steps = replay.layers or args.layers, replay.steps

    torch.manual_seed(1)  # the same model on all ranks
    model = DistributedDataParallel(GPT(GPTConfig(layers=args.layers, width=args.width, context=args.context)))
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    text = load_text()
    train_text, held_out = text[:-65536], text[-65536:]
    torch.manual_seed(1000 + rank)  # other data and dropout on each

    job = evertrain.init()
    checkpointer = evertrain.Checkpointer({"model": model, "optimizer": optimizer, "scheduler": scheduler})
    start = checkpointer.load() or 0
    evertrain.settle(model, torch.zeros(args.batch, args.context, dtype=torch.long))
    if rank == 0:
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        attempt = f", attempt {job.attempt}" if job else ""
        print(f"{millions:.1f} M parameters, {dist.get_world_size()} ranks{attempt}, going on after step {start}")

    for step in range(start + 1, args.steps + 1):
        began = time.perf_counter()
        tokens, targets = draw(train_text, args.batch, args.context)
        loss = loss_of(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

        evertrain.report(step=step, loss=loss, grad_norm=norm, tokens=tokens.numel())
        checkpointer.save(step)
        if rank == 0 and step % args.print_every == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}  {1000 * (time.perf_counter() - began):.0f} ms")
        if step % args.evaluate_every == 0:
            with evertrain.phase("evaluate"):
                unseen = held_out_loss(model.module, held_out, 64, args.context)
            if rank == 0:
                print(f"step {step:4d}  loss {unseen:.4f} on text it has not seen")

    if rank == 0:
        digest = sha256(model.parameters())
        if args.out and not replay:
            args.out.write_text(f"{digest}\n")
        print(f"final parameters sha256 {digest}")


def main() -> None:
    dist.init_process_group("gloo")
    train(arguments())  # leaves no model behind: torch 2.13 can hang where the group is destroyed before DDP
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
