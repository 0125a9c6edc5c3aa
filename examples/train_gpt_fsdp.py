"""The same GPT with FSDP2: each rank holds, saves and restores only its own shard.

evertrain run --nproc-per-node 4 examples/train_gpt_fsdp.py --steps 200
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig, arguments, draw, held_out_loss, load_text, loss_of, sha256
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import evertrain


def train(args: argparse.Namespace) -> None:
    rank = dist.get_rank()
    replay = evertrain.replay_config()
    if replay:  # on some of the nodes, to find the one that computes wrongly
        args.layers, args.steps = replay.layers or args.layers, replay.steps

    torch.manual_seed(1)  # the same model on all ranks, before it is sharded
    model = GPT(GPTConfig(layers=args.layers, width=args.width, context=args.context))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate)
    text = load_text()
    train_text, held_out = text[:-65536], text[-65536:]
    torch.manual_seed(1000 + rank)  # other data and dropout on each

    checkpointer = evertrain.Checkpointer({"model": model, "optimizer": optimizer})
    start = checkpointer.load() or 0  # no settle: FSDP2 gives the same bits as it is
    if rank == 0:
        print(f"{dist.get_world_size()} ranks, going on after step {start}")

    for step in range(start + 1, args.steps + 1):
        began = time.perf_counter()
        tokens, targets = draw(train_text, args.batch, args.context)
        loss = loss_of(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        evertrain.report(step=step, loss=loss, tokens=tokens.numel())
        checkpointer.save(step)
        if rank == 0 and step % args.print_every == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}  {1000 * (time.perf_counter() - began):.0f} ms")
        if step % args.evaluate_every == 0:
            with evertrain.phase("evaluate"):
                unseen = held_out_loss(model, held_out, 64, args.context)
            if rank == 0:
                print(f"step {step:4d}  loss {unseen:.4f} on text it has not seen")

    whole = [parameter.full_tensor() for parameter in model.parameters() if isinstance(parameter, DTensor)]
    if rank == 0:
        digest = sha256(whole)
        if args.out and not replay:
            args.out.write_text(f"{digest}\n")
        print(f"final parameters sha256 {digest}")


def main() -> None:
    dist.init_process_group("gloo")
    train(arguments())  # leaves no model behind: torch 2.13 can hang where the group is destroyed before DDP
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
