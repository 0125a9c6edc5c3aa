"""How many nodes, and how many ranks on each?

torchrun's words (`--nnodes 2:4`, `--nproc-per-node gpu`) without importing torch: CPUs and NVIDIA or AMD devices are
counted from the system; only for what the system does not tell is the ranks' own interpreter asked.
"""

from __future__ import annotations

import os
import subprocess
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evertrain.cli.flags import was_given
from evertrain.model.errors import UsageError
from evertrain.model.spec import Seats


@dataclass(frozen=True)
class Nodes:
    """Nodes that train and nodes that wait."""

    active: int
    standby: int
    names: tuple[str, ...]
    """Those of this machine."""
    least: int | None = None
    """So few may go on training when others are lost; None: the job never shrinks."""

    @property
    def all(self) -> int:
        return self.active + self.standby


def played(active: int, standby: int = 0, least: int | None = None) -> Nodes:
    """Nodes that are all played on this machine."""
    return Nodes(active, standby, tuple(f"node-{number}" for number in range(active + standby)), least)


def joining(seats: Seats, name: str) -> Nodes:
    """Nodes of which one is this machine, under a name that it asks for."""
    return Nodes(seats.most, seats.standby, (name,), _fewer(seats.least, seats.most))


def _fewer(least: int, active: int) -> int | None:
    """MIN of a range, where that leaves anything to give up."""
    return least if least < active else None


def seats(args: Namespace) -> Seats | None:
    """How many machines are asked for; None where it is one."""
    least, most = _range(args.nnodes)
    if args.standby < 0:
        raise UsageError(f"--standby {args.standby}: a number of spare nodes, 0 or more")
    # with a range from 1 on, a job without an endpoint is one that does not want company
    wanted = least > 1 or (most + args.standby > 1 and (args.rdzv_endpoint or was_given(args, "master_addr")))
    return Seats(least, most, args.standby) if wanted else None


def nodes(args: Namespace) -> Nodes:
    """What `--nnodes`, `--local-nodes` and `--standby` say together of this one machine."""
    least, most = _range(args.nnodes)
    standby, local = args.standby, args.local_nodes
    if local is None:
        return _this_machine(args, most, standby)
    if local < 1:
        raise UsageError(f"--local-nodes {local}: at least 1 node")
    if local <= standby:
        raise UsageError(f"--local-nodes {local} leaves nothing to train beside --standby {standby}")
    active = local - standby
    if was_given(args, "nnodes") and not least <= active <= most:
        raise UsageError(
            f"--nnodes {args.nnodes} with --standby {standby} needs --local-nodes {most + standby}, not {local}"
        )
    if not 0 <= args.node_rank < local:
        raise UsageError(f"--node-rank {args.node_rank}: nodes are numbered 0 to {local - 1}")
    return played(active, standby, _fewer(least, active) if was_given(args, "nnodes") else None)


def _this_machine(args: Namespace, most: int, standby: int) -> Nodes:
    if standby:
        raise UsageError(f"--standby {standby} needs --local-nodes {most + standby}: spares are nodes of this machine")
    if args.node_rank != 0:
        raise UsageError(f"--node-rank {args.node_rank} does not fit --nnodes {args.nnodes}: nodes are numbered from 0")
    return played(1)


def _range(text: str) -> tuple[int, int]:
    first, colon, second = text.partition(":")
    try:
        least = int(first)
        most = int(second) if colon else least
    except ValueError:
        raise UsageError(f"--nnodes {text!r}: a number, or a range MIN:MAX") from None
    if not 0 < least <= most:
        raise UsageError(f"--nnodes {text}: at least 1, and MIN not above MAX")
    return least, most


def ranks_per_node(text: str, python: str, environ: Mapping[str, str], nodes: int = 1) -> int:
    """The number that `--nproc-per-node` stands for, on each of `nodes` that share this machine."""
    try:
        number = int(text)
    except ValueError:
        return max(1, _counted(text, python, environ) // nodes)
    if number < 1:
        raise UsageError(f"--nproc-per-node {text}: at least 1 rank a node")
    return number


def _counted(text: str, python: str, environ: Mapping[str, str]) -> int:
    if text == "cpu":
        return len(os.sched_getaffinity(0))
    if text == "gpu":
        if found := count_gpus(environ):
            return found
        raise UsageError("--nproc-per-node gpu: no GPU is visible here; `cpu`, `auto` or a number")
    if text == "auto":
        return count_gpus(environ) or _asked(python, "accelerator", environ) or len(os.sched_getaffinity(0))
    if text == "xpu":
        if found := _asked(python, "xpu", environ):
            return found
        raise UsageError("--nproc-per-node xpu: no XPU is visible here; `cpu`, `auto` or a number")
    raise UsageError(f"--nproc-per-node {text!r}: a number, or one of auto, cpu, gpu, xpu")


def count_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """NVIDIA or AMD devices that a process with this environment would see."""
    if present := len(list(root.glob("dev/nvidia[0-9]*"))):
        return _visible(present, environ.get("CUDA_VISIBLE_DEVICES"))
    if present := _amd_devices(root):
        return _visible(present, environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")))
    return 0


def _visible(present: int, chosen: str | None) -> int:
    """CUDA's rule: the list counts up to its first invalid entry, one named twice voids it; names (`GPU-…`, `MIG-…`)
    are taken on trust."""
    if chosen is None:
        return present
    seen: set[str] = set()
    for entry in (part.strip() for part in chosen.split(",")):
        is_number = entry.lstrip("-").isdigit()
        if entry in seen:
            return 0
        if not entry or (is_number and not 0 <= int(entry) < present):
            break
        seen.add(entry)
    return len(seen)


def _amd_devices(root: Path) -> int:
    # nodes without SIMD units are CPUs
    properties = root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")
    return sum(1 for file in properties if "simd_count 0\n" not in file.read_text() + "\n")


def _asked(python: str, module: str, environ: Mapping[str, str]) -> int:
    """Ask the ranks' torch. Seconds, but only where the system has no other answer."""
    if module == "accelerator" and not _may_have_accelerator():
        return 0
    question = f"import torch; print(torch.{module}.device_count() if torch.{module}.is_available() else 0)"
    try:
        answer = subprocess.run(
            [python, "-c", question], env=dict(environ), capture_output=True, text=True, timeout=120, check=True
        )
        return int(answer.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0


def _may_have_accelerator() -> bool:
    # Intel, Habana, Ascend and others: without a device file there is nothing that torch could find
    return any(any(Path("/dev").glob(pattern)) for pattern in ("dri/render*", "accel/*", "davinci*", "cambricon*"))
