"""`evertrain trace rca`: communication is stuck or slow; who has begun it, and how do the others wait for it?

Looks at all ranks of a living job now, or at the rings of a dead one. With `--incident` it shows what was found then.

Exit code 0: somebody is named; 1: there is nothing to look at; 3: communication is not the cause, as far as it shows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from evertrain.cli import look, trace_source
from evertrain.cli.registry import KnownJob
from evertrain.model.collectives import RootCause, Step
from evertrain.model.errors import TroubleError, UsageError

if TYPE_CHECKING:
    from evertrain.model.windows import JobWindow

NOW_S, BEFORE_S = 5.0, 15.0
_MARGIN_S = 0.5
_MOST_NOW_S = 600.0
NOBODY = 3
_WORDS = {
    "compute": "it computes for longer",
    "host": "its process does not get to run",
    "sender": "what it sends does not get out",
    "receiver": "it does not read what has come",
    "network": "the network",
    "outside": "it is outside of all collectives",
    "storage": "it waits for data or storage",
    "none": "communication is not the cause",
}


def main(argv: Sequence[str]) -> int:
    parser = look.parser("trace rca", "Communication is stuck or slow: who has begun it, and who waits for whom?")
    parser.add_argument("name", nargs="?", metavar="JOB|DIR", help="a job, or a folder with the rings of a dead one")
    parser.add_argument("--incident", metavar="ID", help="what was found when this incident was open")
    parser.add_argument(
        "--since",
        metavar="S",
        default=f"{NOW_S:g}",
        help="it has gone wrong for so many seconds (default: 5, or since anything ended)",
    )
    parser.add_argument("--json", action="store_true", help="JSON on stdout and nothing else")
    args = parser.read(argv)
    since = trace_source.seconds_of(args.since, "--since")
    found, what = _found(args, since)
    if args.json:
        print(json.dumps(msgspec.to_builtins(found)))
    else:
        from evertrain.cli import tables

        out = tables.console()
        for line in lines(found, what):
            out.print(line, soft_wrap=True)
    return 0 if found.is_named else NOBODY


def _found(args: Any, since: float) -> tuple[RootCause, str]:
    if args.incident is None and args.job is None and args.name is not None and Path(args.name).exists():
        return of_folder(Path(args.name), since), args.name
    job = look.find(args.job or args.name, args.run_dir)
    if args.incident is not None:
        return _of_incident(job, args.incident), f"incident {args.incident} of {job.job}"
    if look.lives(job):
        return of_job(job, since), job.job
    return of_folder(job.run_folder, since), job.job


def of_job(job: KnownJob, since: float) -> RootCause:
    """A living one; if nothing has ended for longer than this, it is looked at again, so far back."""
    from evertrain.controller.communication import of_window

    status = look.at(job).status
    expected = {int(one["rank"]): str(one["node"]) for one in status["workers"]}
    window = _ask(job, since)
    longer = _still_s(window)
    if longer > since:
        window = _ask(job, min(longer, _MOST_NOW_S))
    is_inside_seen = any("NCCL" in line for line in status["active"])
    wish = {"seconds": since + _MARGIN_S, "writers": ["nccl"]}
    inside = trace_source.fetched(job, wish) if is_inside_seen else None
    found = of_window(window, None, expected, inside)
    if status["state"] == "running":
        return found
    where = f"the job is {status['state']}, in attempt {status['attempt']}: ranks do not do what they do in training"
    return replace(found, blind=(where, *found.blind))


def _ask(job: KnownJob, now_s: float) -> JobWindow:
    return trace_source.fetched(job, {"seconds": max(BEFORE_S, 3 * now_s), "now_s": now_s + _MARGIN_S})


def _still_s(window: JobWindow) -> float:
    from evertrain.model import windows

    try:
        looks = [windows.unpack_trace(part.packed) for part in window.parts]
    except ValueError as error:
        raise TroubleError(str(error)) from error
    return min((one.still_s for node in looks for one in node.ranks if one.still_s is not None), default=0.0)


def of_folder(where: Path, since: float) -> RootCause:
    """The rings of a dead job."""
    from evertrain.controller import nccl_cause
    from evertrain.locate.collectives import judge
    from evertrain.trace import looking
    from evertrain.trace import scene as scenes

    if not where.exists() or not scenes.ring_files(where):
        raise TroubleError(f"{where}: no trace rings are there; those of a job that was ended went with it")
    scene = scenes.of_folder(where)
    looks = looking.of_scene(scene, now_s=since + _MARGIN_S, before_s=BEFORE_S)
    still = [one.still_s for node in looks for one in node.ranks if one.still_s is not None]
    if still and min(still) > since:
        now_s = min(min(still), _MOST_NOW_S) + _MARGIN_S
        looks = looking.of_scene(scene, now_s=now_s, before_s=max(BEFORE_S, 3 * now_s))
    return nccl_cause.stronger(judge(looks), nccl_cause.of_scene(scene, since + _MARGIN_S))


def _of_incident(job: KnownJob, text: str) -> RootCause:
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"--incident {text}: not a number")
    found = next((one for one in look.at(job).incidents if one["id"] == int(text)), None)
    if found is None:
        raise TroubleError(f"job {job.job} has no incident {text}; `evertrain incidents` lists them")
    if not found.get("component"):
        raise TroubleError(f"incident {text} of job {job.job} was not explained by the records of collectives")
    return _as_cause(found)


def _as_cause(incident: Mapping[str, Any]) -> RootCause:
    links = incident["links"]
    return RootCause(
        symptom="slow" if "slow" in incident["cause"] else "stuck",
        component=incident["component"],
        ranks=tuple(incident["ranks"]),
        nodes=tuple(incident["nodes"]),
        link=tuple(links[0]) if links else None,
        time=incident["time"],
        confidence=incident["confidence"],
        evidence=tuple(incident["evidence"]),
        path=msgspec.convert(incident["path"], tuple[Step, ...]),
    )


# --- words


def lines(found: RootCause, what: str) -> Iterator[str]:
    from evertrain.cli.plain import plain
    from evertrain.locate.words import named

    symptom = f"{plain(what)}: communication is {found.symptom}"
    if found.time is not None:
        moment = time.strftime("%H:%M:%S", time.localtime(found.time)) + f".{int(found.time % 1 * 10)}"
        symptom += f" since {moment}" + (f" (clocks agree within {found.bound_s:g} s)" if found.bound_s else "")
    if found.is_named:
        who = named(found.ranks)
        where = f" on {', '.join(map(plain, found.nodes))}" if found.nodes else ""
        between = f", between rank {found.link[0]} and rank {found.link[1]}" if found.link is not None else ""
        yield f"{symptom}: {who}{where}{between}; {_WORDS[found.component]} (confidence {found.confidence:.2f})"
    else:
        # a job that stands does so for everybody to see; that it is slow was only asked
        head = symptom if found.symptom == "stuck" else plain(what)
        yield f"{head}: {_WORDS['none']}, as far as can be seen (confidence {found.confidence:.2f})"
    if found.path:
        yield ""
        yield from map(plain, drawn(found.path, found.ranks))
    yield ""
    yield from (f"  evidence   {plain(line)}" for line in found.evidence)
    yield from (f"  blind      {plain(line)}" for line in found.blind)
    if not found.is_named:
        yield "  next       `evertrain stacks` shows where the processes stand"


def drawn(path: Sequence[Step], suspects: Sequence[int]) -> Iterator[str]:
    """The suspects, and below each who waits for it, and for those, and so on."""
    of_rank = {one.rank: one for one in path}
    told: set[int] = set()

    def below(rank: int, indent: str) -> Iterator[str]:
        waiting = [one for one in path if rank in one.waits_for and one.rank not in told and one.rank != rank]
        told.update(one.rank for one in waiting)
        for at, one in enumerate(waiting):
            is_last = at == len(waiting) - 1
            yield f"{indent}{'└─' if is_last else '├─'} {_step(one)}"
            yield from below(one.rank, f"{indent}{'   ' if is_last else '│  '}")

    told.update(suspects)
    for rank in suspects:
        step = of_rank.get(rank)
        yield f"  {_step(step) if step is not None else f'rank {rank}'}"
        yield from below(rank, "  ")


def _step(one: Step) -> str:
    who = f"rank {one.rank}" + (f" on {one.node}" if one.node else "")
    return one.what if one.what.startswith(f"rank {one.rank} ") else f"{who} {one.what}"
