"""`evertrain checkpoint list | verify | show | export`: which checkpoints are there, are they intact, what is in them?

Exit code 0: done and nothing wrong; 1: a copy is damaged or something is missing; 2: wrong usage.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evertrain.cli import look
from evertrain.cli.parsing import Parser, did_you_mean
from evertrain.model.errors import TroubleError, UsageError
from evertrain.model.words import counted

if TYPE_CHECKING:
    from evertrain.checkpoint.content import Content
    from evertrain.cli.copies import Step

HELP = """usage: evertrain checkpoint {list,verify,show,export} [STEP] [flags]

  list            every step of which there are copies here, and where
  verify [STEP]   read all copies and compare them with their checksums
  show [STEP]     what is in a step: entries, tensors, what it was made with
  export [STEP]   write one file that torch or safetensors loads; shards are put together

STEP is a number, or newest (the default of show and export). Each takes --job NAME, --run-dir DIR and --json;
`evertrain checkpoint export --help` tells more.
"""

Json = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    commands: dict[str, Callable[[Sequence[str]], int]] = {
        "list": _list,
        "verify": _verify,
        "show": _show,
        "export": _export,
    }
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0 if argv else 2
    if argv[0] not in commands:
        raise UsageError(f"unknown command checkpoint {argv[0]}{did_you_mean(argv[0], commands)}")
    return commands[argv[0]](argv[1:])


def _parser(command: str, description: str, *, step: str = "") -> Parser:
    parser = look.parser(f"checkpoint {command}", description)
    if step:
        parser.add_argument("step", nargs="?", metavar="STEP", help=step)
    parser.add_argument("--json", action="store_true", help="JSON on stdout and nothing else")
    return parser


# -- list ------------------------------------------------------------------------------------------------------------


def _list(argv: Sequence[str]) -> int:
    parser = _parser("list", "Every step of which there are copies here, and where.")
    parser.add_argument("--store", metavar="URL", help="the shared store (default: the one that checkpoints here name)")
    args = parser.read(argv)
    from evertrain.cli import copies

    job = look.find(args.job, args.run_dir)
    steps, trouble = copies.of_job(job, args.store)
    if trouble:
        print(f"evertrain: the shared store is not part of this: {trouble}", file=sys.stderr)
    if args.json:
        print(json.dumps({"job": job.job, "steps": [_listed(step) for step in steps]}))
    elif not steps:
        print(f"job {job.job} has no checkpoint here")
    else:
        print(f"job {job.job}, in {job.run_dir}")
        _print_steps(steps)
    return 0


def _listed(step: Step) -> Json:
    from evertrain.cli import copies

    return {
        "step": step.step,
        "attempt": step.attempt,
        "world_size": step.world_size,
        "time": step.time,
        "bytes": step.bytes,
        "tiers": {tier: step.ranks(tier) for tier in copies.TIERS},
        "store": step.folder,
        "missing": step.missing,
    }


def _print_steps(steps: Sequence[Step]) -> None:
    from evertrain.cli import copies, tables
    from evertrain.cli.memory import in_words

    table = tables.plain_table("step", "attempt", *copies.TIERS, "store", "size", "saved", "whole")
    for step in steps:
        counts = [len(step.ranks(tier)) for tier in copies.TIERS]
        table.add_row(
            str(step.step),
            str(step.attempt),
            *(f"{count} of {step.world_size}" if count else "-" for count in counts),
            "yes" if step.folder else "-",
            in_words(step.bytes) if step.bytes else "-",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(step.time)) if step.time else "-",
            "yes" if not step.missing else f"no, without {_ranks(step.missing)}",
        )
    tables.console().print(table)


# -- verify ----------------------------------------------------------------------------------------------------------


def _verify(argv: Sequence[str]) -> int:
    args = _parser("verify", "Read all copies and compare them with their checksums.", step="this one only").read(argv)
    from evertrain.checkpoint import content
    from evertrain.cli import copies

    job = look.find(args.job, args.run_dir)
    steps = copies.of_job(job)[0] if args.step is None else [copies.choose(job, args.step, in_store=True)]
    checked: list[Json] = []

    def note(step: int | None, rank: int | None, tier: str, path: str, why: str) -> None:
        # a job that runs overwrites its oldest slot all the time
        gone = why in ("gone", "unfinished") or "overwritten" in why
        state = "intact" if not why else "gone" if gone else "damaged"
        checked.append({"step": step, "rank": rank, "tier": tier, "path": path, "state": state, "why": why})

    for step in steps:
        for copy in step.copies:
            note(copy.step, copy.rank, copy.tier, copy.path, content.check(copy.path))
        if step.folder:
            note(step.step, None, "store", step.folder, _fault_in_store(step.folder))
    for file in copies.kept(job):
        if file.step in {step.step for step in steps}:
            note(file.step, None, "peers", file.path, file.fault())
    for path in copies.broken(job) if args.step is None else ():
        note(None, None, "disk", path, content.check(path))
    damaged = [one for one in checked if one["state"] == "damaged"]
    if args.json:
        print(json.dumps({"job": job.job, "copies": checked}))
    else:
        for one in damaged:
            known = ("step", "rank", "tier")
            who = ", ".join(f"{name} {one[name]}" for name in known if one[name] is not None)
            print(f"{who}: {one['why']} ({one['path']})")
        intact = sum(one["state"] == "intact" for one in checked)
        of_steps = counted(len(steps), "step")
        print(f"{intact} {'copy' if intact == 1 else 'copies'} of {of_steps} intact, {len(damaged)} damaged")
    return 1 if damaged else 0


def _fault_in_store(folder: str) -> str:
    from evertrain.checkpoint import store

    try:
        return "; ".join(store.verify(folder))
    except store.StoreError as error:
        return str(error)


# -- show ------------------------------------------------------------------------------------------------------------


def _show(argv: Sequence[str]) -> int:
    parser = _parser("show", "What is in a step: entries, tensors, what it was made with.", step="default: newest")
    parser.add_argument("--rank", type=int, help="one rank (default: the first that is here)")
    parser.add_argument("--tensors", action="store_true", help="each tensor with its type and shape")
    args = parser.read(argv)
    from evertrain.cli import copies

    job = look.find(args.job, args.run_dir)
    step = copies.choose(job, args.step)
    content = _readable(step, args.rank)
    if args.json:
        print(json.dumps(_shown(step, content)))
    else:
        _print_content(step, content, args.tensors)
    return 0


def _readable(step: Step, rank: int | None) -> Content:
    """The first copy that can be read."""
    from evertrain.checkpoint import content

    best = step.best()
    if rank is not None and rank not in best:
        raise TroubleError(f"no copy of rank {rank} is here, only of {_ranks(list(best))}")
    problems = []
    for copy in best[rank] if rank is not None else [copy for of_rank in best.values() for copy in of_rank]:
        try:
            return content.read(copy.path)
        except content.Unreadable as why:
            problems.append(f"{copy.path}: {why}")
    raise TroubleError("; ".join(problems))


def _shown(step: Step, content: Content) -> Json:
    import msgspec

    header = content.header
    return {
        "job": header.job,
        "step": step.step,
        "attempt": step.attempt,
        "rank": header.rank,
        "world_size": step.world_size,
        "time": step.time,
        "path": content.path,
        "code": header.code,
        "checksums": header.sums_crc is not None,
        **msgspec.to_builtins(content.directory),
    }


def _print_content(step: Step, content: Content, each: bool) -> None:
    from evertrain.cli import tables
    from evertrain.cli.memory import in_words

    out = tables.console()
    header, directory = content.header, content.directory
    out.print(f"step {step.step} of job {header.job}, attempt {step.attempt}, rank {header.rank} of {step.world_size}")
    made = directory.made_by
    if made:
        out.print(f"made with torch {made.get('torch')}, {made.get('threads')} threads, {made.get('cpu')}")
    if directory.groups:
        out.print(f"process groups of this rank: {'; '.join(_few(list(group)) for group in directory.groups)}")
    table = tables.plain_table("entry", "tensors", "bytes")
    for part in directory.parts:
        table.add_row(part.name, str(len(part.tensors)), in_words(part.bytes))
        for tensor in part.tensors if each else ():
            whole = f", part of {list(tensor.shard.shape)} from {list(tensor.shard.offset)}" if tensor.shard else ""
            table.add_row(f"  {tensor.name}", f"{tensor.dtype} {list(tensor.shape)}{whole}", in_words(tensor.bytes))
    out.print(table)
    out.print(f"in {content.path}")


# -- export ----------------------------------------------------------------------------------------------------------


def _export(argv: Sequence[str]) -> int:
    parser = _parser("export", "Write one file that torch or safetensors loads.", step="default: newest")
    parser.add_argument("--to", metavar="FILE", help="where to (default: JOB-step-N.pt or .safetensors here)")
    parser.add_argument("--format", choices=("torch", "safetensors"), default="torch", help="default: torch")
    parser.add_argument(
        "--only", metavar="ENTRY", action="append", default=[], help="this entry of the state; repeatable"
    )
    parser.add_argument("--rank", type=int, help="the state of one rank as it is, shards included")
    parser.add_argument("--python", metavar="EXE", help="an interpreter with torch (default: the active environment's)")
    args = parser.read(argv)
    from evertrain.cli import copies

    job = look.find(args.job, args.run_dir)
    step = copies.choose(job, args.step, lasting=True)
    missing = [rank for rank in range(step.world_size) if rank not in step.best()]
    if args.rank is None and missing:
        hint = f"{step.folder} has it for torch.distributed.checkpoint" if step.folder else "--rank takes one"
        raise TroubleError(f"step {step.step} is not whole here, without {_ranks(missing)}; {hint}")
    files = _intact(step, args.rank)
    _known(step, files, args.only)
    ending = "pt" if args.format == "torch" else "safetensors"
    to = Path(args.to or f"{job.job}-step-{step.step}.{ending}").absolute()
    if not to.parent.is_dir():
        raise UsageError(f"--to {to}: there is no folder {to.parent}")
    with tempfile.TemporaryDirectory(prefix="export-", dir=job.run_dir) as folder:
        held = copies.hold(step, files, folder)
        try:
            spec = {"files": held, "to": str(to), "format": args.format, "only": args.only}
            said = _run_export(args, {**spec, "shards": args.rank is not None})
        except TroubleError:
            if any(copies.is_gone(step, file) for file in held):
                raise TroubleError(copies.gone(step)) from None
            raise
    if args.json:
        print(json.dumps({"job": job.job, "step": step.step, "file": str(to), "bytes": to.stat().st_size}))
    else:
        print(f"step {step.step}: {said}, in {to}")
    return 0


def _intact(step: Step, rank: int | None) -> list[str]:
    """One intact file of each rank that is wanted."""
    from evertrain.checkpoint import content
    from evertrain.cli import copies

    best = step.best()
    if rank is not None and rank not in best:
        raise TroubleError(f"no copy of rank {rank} is here, only of {_ranks(list(best))}")
    files = []
    for one in best if rank is None else (rank,):
        problems = [(copy.path, content.check(copy.path)) for copy in best[one]]
        whole = [path for path, why in problems if not why]
        if not whole and any(copies.is_gone(step, path) for path, _ in problems):
            raise TroubleError(copies.gone(step))
        if not whole:
            raise TroubleError("; ".join(f"{path}: {why}" for path, why in problems))
        files.append(whole[0])
    return files


def _known(step: Step, files: Sequence[str], only: Sequence[str]) -> None:
    from evertrain.checkpoint import content

    entries = dict.fromkeys(part.name for file in files for part in content.read(file).directory.parts)
    for entry in only:
        if entry not in entries:
            raise UsageError(f"--only {entry}: step {step.step} has {', '.join(entries)}")


def _run_export(args: Namespace, spec: Json) -> str:
    from evertrain.cli import plan

    python = plan.interpreter(args.python, os.environ)
    source = Path(__file__).parents[2]
    start = "import sys; sys.path.append(sys.argv.pop(1)); from evertrain.worker.export import main; sys.exit(main())"
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(spec, file)
        file.flush()
        done = subprocess.run([python, "-P", "-c", start, str(source), file.name], capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise TroubleError(f"export with {python}: {last}")
    return done.stdout.strip()


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {_few(ranks)}"


def _few(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
