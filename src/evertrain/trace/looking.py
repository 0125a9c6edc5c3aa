"""What do the rings of some ranks come to, for the search for a root cause? Of a living node, or of files.

All of it is what `summary` makes of one rank's records; who is at the other end of a connection between nodes is known
only when the looks at all nodes have come together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from evertrain.model.collectives import Communicator, Flow, NodeTrace, Period, RankTrace
from evertrain.model.windows import TracedGroup
from evertrain.trace import flows, layout, summary
from evertrain.trace.reading import Reader
from evertrain.trace.scene import Scene, Track, named
from evertrain.trace.summary import Look, Records

HISTORY_S = 60.0
"""So far back is it looked how far a rank has come in its communicators; who has been in one later has come further."""


def of_rings(
    rank: int,
    node: str,
    hook: Path,
    agent: Path,
    look: Look,
    *,
    step_times: Sequence[int] = (),
) -> RankTrace:
    """Of one rank of this node. What cannot be read is said."""
    try:
        records = read(hook, agent, look)
    except (OSError, ValueError) as error:
        return RankTrace(rank=rank, node=node, blind=f"its trace cannot be read: {error}")
    return summary.rank_trace(rank, node, records, look, step_times=step_times)


def read(hook: Path, agent: Path, look: Look) -> Records:
    """Raises OSError or ValueError."""
    start_ns = look.at_ns - int((look.now_s + look.before_s + 1.0) * 1e9)
    with Reader(hook) as reader:
        table = reader.table()
        seen = reader.window(min(start_ns, look.at_ns - int(HISTORY_S * 1e9)), look.at_ns)
    with Reader(agent) as reader:
        beside = reader.window(start_ns, look.at_ns)
    done = seen.operations[seen.operations["kind"] == layout.KINDS["done"]]
    return Records(done, table, beside.hosts, beside.flows)


def of_scene(scene: Scene, *, now_s: float, before_s: float, most: int = 256) -> list[NodeTrace]:
    """Of records that have been put together already, of a living or a dead job."""
    hooks = {(one.node, one.rank): one for one in scene.of("hook")}
    agents = {(one.node, one.rank): one for one in scene.of("agent")}
    comms = tuple(map(communicator, scene.groups.values()))
    found: dict[str, list[RankTrace]] = {}
    times: dict[str, float] = {}
    for (node, rank), track in sorted(hooks.items()):
        look = Look(track.last_ns, now_s, before_s, most)
        records = _of_tracks(track, agents.get((node, rank)))
        found.setdefault(node, []).append(summary.rank_trace(rank, node, records, look))
        times[node] = (track.last_ns + track.wall_ns) / 1e9
    return [
        NodeTrace(
            number=0,
            attempt=next(iter(hooks.values())).attempt,
            node=node,
            time=times[node],
            ranks=tuple(ranks),
            communicators=comms if at == 0 else (),
            blind=(*scene.missing, *scene.problems) if at == 0 else (),
        )
        for at, (node, ranks) in enumerate(found.items())
    ]


def _of_tracks(hook: Track, agent: Track | None) -> Records:
    done = hook.records.operations
    done = done[done["kind"] == layout.KINDS["done"]]
    beside = agent.records if agent is not None else hook.records
    return Records(done, hook.table, beside.hosts, beside.flows)


def communicator(group: TracedGroup) -> Communicator:
    """Raises ValueError where its number is none."""
    return Communicator(f"{int(group.id, 16):016x}", group.name, named(group), group.ranks)


# -- connections between nodes -----------------------------------------------------------------------------------------


def with_peers(looks: Iterable[NodeTrace]) -> list[NodeTrace]:
    """The same, with the peers of connections between their nodes."""
    looks = list(looks)
    ends = flows.paired([flows.Pair(one.rank, one.inode, one.own, one.peer) for look in looks for one in look.ends])
    return [replace(look, ranks=tuple(_named(rank, ends) for rank in look.ranks)) for look in looks] if ends else looks


def _named(rank: RankTrace, ends: Mapping[tuple[int, int], int]) -> RankTrace:
    if not any(one.peer < 0 for one in (*rank.now.flows, *rank.before.flows)):
        return rank
    return replace(rank, now=_period(rank.rank, rank.now, ends), before=_period(rank.rank, rank.before, ends))


def _period(rank: int, period: Period, ends: Mapping[tuple[int, int], int]) -> Period:
    named_flows = [_peer(rank, one, ends) for one in period.flows]
    return replace(period, flows=summary.by_peer(named_flows))


def _peer(rank: int, flow: Flow, ends: Mapping[tuple[int, int], int]) -> Flow:
    return replace(flow, peer=ends.get((rank, flow.inode), flow.peer)) if flow.peer < 0 else flow
