"""`evertrain node list | allow | drain`: which nodes are there, which are out and why, and who may leave or come back.

Exit code 0: done; 1: it cannot be done, or not now; 2: wrong usage.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

from evertrain.cli import client, look
from evertrain.cli.parsing import did_you_mean
from evertrain.cli.registry import KnownJob
from evertrain.model.errors import TroubleError, UsageError

WHAT = {
    "list": "nodes with their state and ranks; of those that are out, why and how they come back",
    "allow": "let an evicted node back; between two runs of the job this holds for the next one",
    "drain": "take a node out: a standby takes over its ranks, or the job goes on with fewer (--nnodes MIN:MAX)",
}
HELP = """usage: evertrain node {list,allow NODE,drain NODE} [flags]

%s

Each takes --job NAME, --run-dir DIR and --json.
"""

DRAINED_S = 600.0
"""So long a node that is being taken out is waited for."""
POLL_S = 0.5
"""So often: with thousands of nodes the answer, about all of them, is work for the controller."""
ANSWERED_S = 10.0
"""So long it may take until it is decided that a node may come back."""

Json = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    commands: dict[str, Callable[[KnownJob, str, bool], None]] = {"list": _list, "allow": _allow, "drain": _drain}
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(HELP % "\n".join(f"  {name:<8}{what}" for name, what in WHAT.items()), end="")
        return 0 if argv else 2
    command = argv[0]
    if command.startswith("-"):
        raise UsageError(f"what about the nodes? `evertrain node {{{','.join(commands)}}}` comes before {command}")
    if command not in commands:
        raise UsageError(f"unknown command node {command}{did_you_mean(command, commands)}")
    parser = look.parser(f"node {command}", WHAT[command])
    if command != "list":
        parser.add_argument("node", metavar="NODE", help="its name, as `evertrain node list` shows it")
    parser.add_argument("--json", action="store_true", help="JSON on stdout and nothing else")
    args = parser.read(argv[1:])
    if not getattr(args, "node", "x"):
        raise UsageError("NODE is missing: a name as `evertrain node list` shows it")
    commands[command](look.find(args.job, args.run_dir), getattr(args, "node", ""), args.json)
    return 0


# -- list ------------------------------------------------------------------------------------------------------------


def _list(job: KnownJob, node: str, as_json: bool) -> None:
    nodes = _seen(job)
    if as_json:
        print(json.dumps(nodes))
    else:
        _show(nodes)


def _seen(job: KnownJob) -> list[Json]:
    """From the live controller, else from the event log."""
    if (answers := look.ask(job, "/v1/nodes")) is not None:
        live: list[Json] = answers[0]
        return live
    from evertrain.controller import node_views

    return look.read(job, lambda log: node_views.nodes_of(log, time.time()))


def _show(nodes: list[Json]) -> None:
    from evertrain.cli import tables

    out = tables.console()
    table = tables.plain_table("node", "state", "ranks", "since", "self-check", "why")
    for node in nodes:
        table.add_row(
            node["id"],
            tables.coloured(node["state"]),
            _spans(node["ranks"]) or "-",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(node["since"])) if node["since"] is not None else "-",
            _check(node["self_check"]),
            # of a node that takes part there is nothing to explain
            node["because"] if node["state"] not in ("active", "standby") else "",
        )
    out.print(table)
    for node in nodes:
        if node["returns"]:
            out.print(f"{node['id']} comes back {node['returns']}")


def _spans(ranks: list[int]) -> str:
    """`0-3, 8`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _check(check: Json | None) -> str:
    if check is None:
        return "-"
    if not check["passed"]:
        return f"failed: {'; '.join(check['failed'])}"
    return f"passed ({check['checks']})" + (f"; yet {'; '.join(check['odd'])}" if check["odd"] else "")


# -- allow -----------------------------------------------------------------------------------------------------------


def _allow(job: KnownJob, node: str, as_json: bool) -> None:
    vain = f"does not let {node} back"
    if look.lives(job):
        asked = look.tell(job, f"/v1/nodes/{quote(node, safe='')}/allow", {}, vain)
        seen = _wait(job, node, lambda one: _answer(one, asked["time"]) is not None, ANSWERED_S)
        said = _answer(seen, asked["time"])
        line = f": {said['because']}" if said is not None else "; it is not decided yet, see `evertrain node list`"
        print(json.dumps(seen) if as_json else f"job {job.job} lets {node} back{line}")
        return
    from evertrain.cli import lock
    from evertrain.controller import node_views

    # else a controller might write at the same time, and never read what stands here
    with lock.kept_from_running(job):
        because = "asked for by the user"
        refusal = look.read(job, lambda log: node_views.allow_later(log, node, because, time.time()))
    if refusal:
        raise TroubleError(f"job {job.job} {vain}: {refusal}")
    found = next(one for one in _seen(job) if one["id"] == node)
    print(json.dumps(found) if as_json else f"job {job.job} does not run; its next run may use {node} again")


# -- drain -----------------------------------------------------------------------------------------------------------


def _drain(job: KnownJob, node: str, as_json: bool) -> None:
    vain = f"does not take {node} out"
    if not look.lives(job):
        raise TroubleError(f"job {job.job} does not run; there is nothing to take {node} out of")

    def ask() -> Json:
        return look.tell(job, f"/v1/nodes/{quote(node, safe='')}/drain", {}, vain)

    asked = ask()

    def over(seen: Json) -> bool:
        said = _answer(seen, asked["time"])
        if said is None and seen["asked"] is None and not seen["is_out"]:
            ask()  # the controller that was asked died before it had written anything down
        return bool(seen["is_out"]) or (said is not None and said["action"] != "evict")

    seen = _wait(job, node, over, DRAINED_S)
    said = _answer(seen, asked["time"])
    why = f": {said['because']}" if said is not None else ""
    if said is not None and said["action"] != "evict":
        raise TroubleError(f"job {job.job} {vain}{why}")
    if not seen["is_out"]:
        raise TroubleError(
            f"job {job.job}: {node} is not out after {DRAINED_S:.0f} s; it may go on without this command, "
            "see `evertrain node list`"
        )
    print(json.dumps(seen) if as_json else f"{node} is out of job {job.job}, and training goes on{why}")


def _answer(seen: Json, since: float) -> Json | None:
    """What was decided about the wish of that moment."""
    answer: Json | None = seen["answer"]
    return answer if answer is not None and answer["time"] >= since else None


def _wait(job: KnownJob, node: str, over: Callable[[Json], bool], limit_s: float) -> Json:
    """Look at the node until it is `over`, or the time is; the last look."""
    began = heard = time.monotonic()
    while True:
        lives = look.lives(job)
        try:
            nodes = client.of_run_dir(job.run_dir).get("/v1/nodes")
            heard = time.monotonic()
            seen: Json = next((one for one in nodes if one["id"] == node), {})
            if seen and (over(seen) or time.monotonic() - began > limit_s):
                return seen
            if not seen:
                raise TroubleError(f"job {job.job} does not know {node} any more")
        except client.Unreachable:
            if time.monotonic() - heard > look.CONTROLLER_AWAY_S:
                raise TroubleError(
                    f"job {job.job}: its controller has not answered for {look.CONTROLLER_AWAY_S:.0f} s; "
                    "see `evertrain node list`"
                ) from None
        if not lives:
            raise TroubleError(f"job {job.job} ended before {node} was out or back")
        time.sleep(POLL_S)
