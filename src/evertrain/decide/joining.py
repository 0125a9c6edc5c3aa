"""Who takes part in a job on several machines, and in which order?

    `run` on a node ──join──▶ seat ──all seats taken──▶ settled: ranks are numbered, the first attempt may start

The first node serves the job and has a seat from the start. A node keeps its place from run to run, because its disk
holds the checkpoints of the ranks that it had. One whose `run` was ended and is called again gets its seat back. Each
tests its machine when it has come (`standbys.check_number`); one that is broken gets no ranks, and is tested again.

    settled and short of nodes: `run` on a node ──join──▶ known, its agent may speak ──the ladder enlists it──▶ standby

Once the nodes are settled others are let in only where the job has fewer than it should, not counting those whose place
another one is wanted for: strangers, or nodes that were lost or evicted, under their own names.
"""

from __future__ import annotations

import re
from itertools import count

import msgspec

from evertrain.decide.picture import Picture
from evertrain.decide.state import JobState
from evertrain.model import records as r
from evertrain.model.config import MachinesConfig
from evertrain.model.records import AnyRecord
from evertrain.model.spec import Seats

_TESTS_S = 5.0
"""So long a node that has come may take to test its machine; who says nothing is not accused of anything."""
_ARRIVES_S = 10.0
"""From the seat to the first word of the agent; a seat that is silent for longer is free again."""


class Wish(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a node says when it wants to join."""

    host: str
    instance: str
    """Of this call of `run`: asking twice changes nothing."""
    nproc_per_node: int
    version: str
    seats: Seats | None = None
    """How many nodes it was told that there are."""
    job: str | None = None
    """The job it means, where the user named one."""
    node_rank: int | None = None


class Refusal(msgspec.Struct, frozen=True):
    because: str


def admit(
    state: JobState, picture: Picture, wish: Wish, *, job: str, version: str, now: float
) -> r.NodeJoined | Refusal:
    """The seat of a node that wants to join, new or its own from before, or why there is none."""
    run = state.run
    if run is None or state.ended is not None or state.closing:
        return Refusal(f"job {job} is ending; run the command again when it has ended")
    if wish.job is not None and wish.job != job:
        return Refusal(f"job {job} is served here, not {wish.job}")
    if run.seats is None:
        return Refusal(f"job {job} has all its nodes on one machine (there is no --nnodes)")
    if wish.version != version:
        return Refusal(f"evertrain {version} serves job {job}; this node has {wish.version}")
    if wish.seats is not None and wish.seats != run.seats:
        return Refusal(
            f"job {job} has {_in_words(run.seats)}, this node was told {_in_words(wish.seats)} (--nnodes, --standby)"
        )
    if wish.nproc_per_node != run.nproc_per_node:
        return Refusal(
            f"job {job} has {run.nproc_per_node} ranks on each node, this one would have {wish.nproc_per_node} "
            "(--nproc-per-node)"
        )
    if (mine := next((seen for seen in state.joined.values() if seen.instance == wish.instance), None)) is not None:
        return mine
    if why := _rank_is_taken(state, run.seats, picture, wish, now):
        return Refusal(why)
    seated = state.roster or (run.nodes[0], *(node for node in state.joined if _is_here(state, picture, node, now)))
    is_short = len(seated) - len(_to_replace(state)) + len(_on_their_way(state, picture, now)) < run.seats.all
    name = _free_name(state, picture, wish.host, is_short, now)
    if name is None:
        return Refusal(f"job {job} has its {len(seated)} nodes: {', '.join(seated[:8])}")
    return r.NodeJoined(time=now, node=name, instance=wish.instance, node_rank=wish.node_rank)


def _in_words(seats: Seats) -> str:
    nodes = str(seats.most) if seats.least == seats.most else f"{seats.least}:{seats.most}"
    return f"{nodes} nodes" + (f" and {seats.standby} in standby" if seats.standby else "")


def _rank_is_taken(state: JobState, seats: Seats, picture: Picture, wish: Wish, now: float) -> str:
    assert state.run is not None
    if wish.node_rank is None:
        return ""
    if not 0 <= wish.node_rank < seats.all:
        return f"--node-rank {wish.node_rank}: nodes are numbered 0 to {seats.all - 1}"
    # the number of a node that is out, or soon will be, is not held by anybody
    leaving = _to_replace(state)
    part = tuple(node for node in state.roster or state.known_nodes() if node not in leaving)
    held = {
        seen.node_rank: seen.node
        for seen in state.joined.values()
        if seen.node in part and _is_here(state, picture, seen.node, now)
    }
    if state.run.node_rank is not None and state.run.nodes[0] in part:
        held[state.run.node_rank] = state.run.nodes[0]
    holder = held.get(wish.node_rank)
    return "" if holder is None else f"--node-rank {wish.node_rank} is taken by {holder}"


def _free_name(state: JobState, picture: Picture, host: str, is_short: bool, now: float) -> str | None:
    """The host's name, numbered where several nodes are on one host; None where there is no seat for it."""
    base = node_name(host)
    for number in count(1):
        name = base if number == 1 else f"{base}-{number}"
        if name not in state.known_nodes():
            return name if is_short else None
        if name in state.joined and not _is_here(state, picture, name, now) and (is_short or name in state.roster):
            return name
    raise AssertionError("unreachable")


def _on_their_way(state: JobState, picture: Picture, now: float) -> list[str]:
    """Who has been let in after the nodes were settled, and does not take part yet."""
    if not state.roster:
        return []
    out = (*state.roster, *state.memory.blocked)
    return [node for node in state.joined if node not in out and _is_here(state, picture, node, now)]


def _to_replace(state: JobState) -> frozenset[str]:
    """Who has a place that another one is wanted for: lost nodes, and those that an incident waits to be rid of."""
    lost = {node for node in state.roster if node in state.nodes and state.nodes[node].state == "lost"}
    wait = state.waiting.wait if state.waiting is not None else None
    return frozenset(lost.union(wait.instead_of if wait is not None else ()).intersection(state.roster))


def arrivals(state: JobState, picture: Picture) -> list[str]:
    """Nodes that are here, do not take part and are not kept out, as far as the job is short of nodes."""
    run = state.run
    if run is None or not state.roster or state.closing:
        return []
    all_ = run.seats.all if run.seats is not None else len(run.nodes)
    wanted = all_ - len(state.roster) + len(_to_replace(state))
    if wanted <= 0:
        return []
    out = {*state.roster, *state.memory.blocked}
    return [node for node in state.known_nodes() if node not in out and picture.connected(node)][:wanted]


def _is_here(state: JobState, picture: Picture, node: str, now: float) -> bool:
    return picture.connected(node) or now - state.joined[node].time < _ARRIVES_S


def node_name(host: str) -> str:
    """A host's name without its domain; it becomes a folder's name as well."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", host.partition(".")[0]) or "node"


def settle(state: JobState, picture: Picture, config: MachinesConfig, now: float) -> list[AnyRecord]:
    """Number the nodes when enough have joined; give up when they have not come in time."""
    run = state.run
    if run is None or run.seats is None or state.roster or state.closing:
        return []
    seats = run.seats
    connected = [node for node in state.known_nodes() if picture.connected(node)]
    here = [node for node in connected if not _unfit(picture, node)]
    out = state.kept_out()
    here.sort(key=lambda node: node in out)
    newest = max([run.time, *(seen.time for seen in state.joined.values())])
    if len(here) >= seats.all or (len(here) >= seats.least and now - newest >= config.last_call_s):
        if any(_is_testing(picture, node, now) for node in here):
            return []
        # one that was evicted trains where nobody else is there; it is no standby
        members = [*here[: seats.most], *(node for node in here[seats.most : seats.all] if node not in out)]
        standby = max(0, len(members) - seats.most)
        return [r.NodesSettled(time=now, nodes=_in_order(state, members), standby=standby)]
    if now - newest < config.join_s:
        return []
    named = f" ({', '.join(here)})" if here else ""
    message = f"{len(here)} of {seats.all} nodes have come{named} within {now - run.time:.0f} s (machines.join_s)"
    message += _kept_out(picture, connected)
    return [r.JobEnded(time=now, state="failed", exit_code=1, message=message)]


def missing(state: JobState, picture: Picture) -> str:
    """What the start waits for, in words; empty when the nodes are settled."""
    if state.run is None or state.run.seats is None or state.roster:
        return ""
    connected = [node for node in state.known_nodes() if picture.connected(node)]
    if not connected:
        return ""  # the first node itself is about to speak
    here = [node for node in connected if not _unfit(picture, node)]
    named = f" ({', '.join(here)})" if here else ""
    said = f"{len(here)} of {state.run.seats.all} nodes are here{named}; run the same command on the others"
    return said + _kept_out(picture, connected)


def _unfit(picture: Picture, node: str) -> str:
    """Why a node that has come cannot take part; empty: nothing is known against it."""
    report = picture.report(node)
    answer = report.self_check if report is not None else None
    return "; ".join(f"{check.name}: {check.detail}" for check in answer.failed) if answer is not None else ""


def _is_testing(picture: Picture, node: str, now: float) -> bool:
    report = picture.report(node)
    return report is not None and report.self_check is None and now - picture.nodes[node].since < _TESTS_S


def _kept_out(picture: Picture, nodes: list[str]) -> str:
    unfit = [f"{node} stays out, its self-check has failed: {why}" for node in nodes if (why := _unfit(picture, node))]
    return "".join(f"; {line}" for line in unfit)


def _in_order(state: JobState, here: list[str]) -> tuple[str, ...]:
    """Who asked for a place has it, then who had one in the run before; the rest fills the gaps as it came."""
    assert state.run is not None
    asked = {node: seen.node_rank for node, seen in state.joined.items() if seen.node_rank is not None}
    if state.run.node_rank is not None:
        asked[state.run.nodes[0]] = state.run.node_rank
    before = {node: place for place, node in enumerate(state.earlier_roster)}
    places: dict[int, str] = {}
    for wanted in (asked, before):
        for node in here:
            place = wanted.get(node)
            if place is not None and place < len(here) and node not in places.values():
                places.setdefault(place, node)
    rest = iter([node for node in here if node not in places.values()])
    order = [places[place] if place in places else next(rest) for place in range(len(here))]
    # who was evicted before trains only where there is nobody else
    return tuple(sorted(order, key=lambda node: node in state.kept_out()))
