"""The same GPT in three dimensions: pipeline stages (1F1B), FSDP2 for the data, tensor parallel layers.

evertrain run --nproc-per-node 4 --mesh pp=2,dp=2 examples/train_3d.py --steps 200
evertrain run --nproc-per-node 8 --mesh pp=2,dp=2,tp=2 examples/train_3d.py --pp 2 --dp 2 --tp 2 --steps 200
"""

from __future__ import annotations

import argparse
import logging
import time

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig, arguments, draw, load_text, loss_of, sha256
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import evertrain


class Stage(nn.Module):
    """One pipeline stage's part of a GPT; its layers keep the names that they have in the whole model."""

    def __init__(self, whole: GPT, stage: int, stages: int) -> None:
        super().__init__()
        layers = len(whole.blocks)
        self.embeds = stage == 0
        self.predicts = stage == stages - 1
        if self.embeds:
            self.token, self.position, self.dropout = whole.token, whole.position, whole.dropout
        self.blocks = nn.ModuleDict(
            {
                str(number): whole.blocks[number]
                for number in range(layers * stage // stages, layers * (stage + 1) // stages)
            }
        )
        if self.predicts:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: Tensor) -> Tensor:
        if self.embeds:
            x = self.dropout(self.token(x) + self.position(torch.arange(x.shape[1], device=x.device)))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.predicts else x


def build(args: argparse.Namespace, mesh: DeviceMesh) -> Stage:
    torch.manual_seed(1)  # the same model on all ranks, before each takes its part
    whole = GPT(GPTConfig(layers=args.layers, width=args.width, context=args.context))
    model = Stage(whole, mesh.get_local_rank("pp"), args.pp)
    for block in model.blocks.values():
        plan = {
            "qkv": ColwiseParallel(),
            "out": RowwiseParallel(),
            "mlp.0": ColwiseParallel(),
            "mlp.2": RowwiseParallel(),
        }
        if args.tp > 1:
            parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def train(args: argparse.Namespace) -> None:
    replay = evertrain.replay_config()
    if replay:  # on some of the nodes, to find the one that computes wrongly: fewer replicas, layers and steps
        args.dp, args.layers = replay.dp, replay.layers or args.layers
    mesh = init_device_mesh("cpu", (args.pp, args.dp, args.tp), mesh_dim_names=("pp", "dp", "tp"))
    pp, dp, tp = mesh.get_coordinate() or ()
    model = build(args, mesh)
    stage = PipelineStage(model, pp, args.pp, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, args.microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate)
    text = load_text()
    train_text, held_out = text[:-65536], text[-65536:]
    torch.manual_seed(1000 + args.dp * pp + dp)  # other dropout on each, but on the parts of one layer the same
    speaks = model.predicts and dp == tp == 0

    def run(tokens: Tensor, targets: Tensor) -> float | None:
        """Forward, and backward unless the model only evaluates; the loss, which the last stage alone knows."""
        losses: list[Tensor] = []
        once = schedule.step if model.training else schedule.eval
        once(
            *([tokens] if model.embeds else []),
            target=targets if model.predicts else None,
            losses=losses if model.predicts else None,
        )
        return torch.stack(losses).mean().item() if losses else None

    checkpointer = evertrain.Checkpointer({"model": model, "optimizer": optimizer})
    start = checkpointer.load() or 0
    if replay:
        start = replay.from_step or 0
        args.steps = start + replay.steps
    if speaks:
        print(f"{args.pp} x {args.dp} x {args.tp} ranks, going on after step {start}")

    for step in range(start + 1, args.steps + 1):
        began = time.perf_counter()
        # all stages and all parts of a layer work on the same batch, each replica on another one
        batch = torch.Generator().manual_seed(args.dp * step + dp)
        tokens, targets = draw(train_text, args.batch, args.context, batch)
        optimizer.zero_grad()
        loss = run(tokens, targets)
        optimizer.step()

        evertrain.report(step=step, loss=loss, tokens=tokens.numel())
        checkpointer.save(step)
        if speaks and step % args.print_every == 0:
            print(f"step {step:4d}  loss {loss:.4f}  {1000 * (time.perf_counter() - began):.0f} ms")
        if step % args.evaluate_every == 0:
            with evertrain.phase("evaluate"):
                tokens, targets = draw(held_out, 64, args.context, torch.Generator().manual_seed(0))
                model.eval()
                unseen = run(tokens, targets)
                model.train()
            if speaks:
                print(f"step {step:4d}  loss {unseen:.4f} on text it has not seen")

    whole = whole_model(model, dp == tp == 0)
    if whole:
        digest = sha256(whole[name] for name in sorted(whole))
        if args.out and not replay:
            args.out.write_text(f"{digest}\n")
        print(f"final parameters sha256 {digest}")


def whole_model(model: Stage, is_first_of_stage: bool) -> dict[str, Tensor]:
    """The parameters of all stages, on rank 0."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # gathered over dp, then tp: slow but once
    own = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        own[name] = parameter.full_tensor().detach()
    stages = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own if is_first_of_stage else {}, stages)
    return {name: tensor for part in stages or [] for name, tensor in part.items()}


def main() -> None:
    dist.init_process_group("gloo")
    train(arguments(pp=2, dp=2, tp=1, microbatches=4))  # leaves no model behind when the group is destroyed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
