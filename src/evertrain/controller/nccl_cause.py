"""Who holds NCCL's operations up, in what all ranks have written down?

By the rules of `locate.nccl_heads`; the answer is in the words of every cause of stuck or slow communication.
"""

from __future__ import annotations

from msgspec.structs import replace

from evertrain.locate import nccl_heads
from evertrain.model.collectives import Component, RootCause, Step
from evertrain.model.tracing import HeadCause, HeadComponent, Picture
from evertrain.trace import pictures
from evertrain.trace.scene import Scene

STUCK_S = 1.0
"""What has moved nothing for so long at the end is stuck."""
_COMPONENTS: dict[HeadComponent, Component] = {
    "host": "outside", "gpu": "compute", "proxy": "host", "pcie": "host", "network": "network", "none": "none",
}  # fmt: skip


def of_scene(scene: Scene, seconds: float) -> RootCause | None:
    """By the last seconds; None: NCCL's plugin has written nothing here."""
    tracks = list(scene.of("nccl"))
    ranks = [pictures.RankRecords(one.rank, one.records, -one.wall_ns) for one in tracks]
    shown = list(pictures.of_nccl(ranks))
    if not shown:
        return None
    end_s = shown[-1].t_s
    seen = [one for one in shown if one.t_s > end_s - seconds]
    nodes = {one.rank: one.node for one in tracks}
    return as_root(nccl_heads.judge(seen), nodes, is_stuck=_is_stuck(seen[-1]), blind=scene.problems)


def _is_stuck(last: Picture) -> bool:
    waits = [*(one.stuck_s for one in last.operations), *(one.stuck_s for one in last.flows)]
    return bool(waits) and min(waits) > STUCK_S


def as_root(found: HeadCause, nodes: dict[int, str], *, is_stuck: bool, blind: tuple[str, ...] = ()) -> RootCause:
    """The same, said as every root cause is."""
    channels = f"only channels {', '.join(map(str, found.channels))}: a path, not the rank" if found.channels else ""
    cause = RootCause(
        symptom="stuck" if is_stuck else "slow",
        component=_COMPONENTS[found.component],
        link=found.link,
        confidence=found.confidence,
        evidence=(*found.evidence, channels) if channels else found.evidence,
        blind=blind,
    )
    if found.component == "none":
        return cause
    path = tuple(
        Step(rank, nodes.get(rank, ""), f"waits for rank {towards}", (towards,))
        for rank, towards in zip(found.path, found.path[1:], strict=False)
    )
    return replace(
        cause,
        ranks=found.ranks,
        nodes=tuple(dict.fromkeys(nodes[rank] for rank in found.ranks if rank in nodes)),
        time=found.first_s,
        path=path,
    )


def stronger(outside: RootCause, inside: RootCause | None) -> RootCause:
    """Of what the ranks' own records say and what NCCL's say: who never came to an operation explains what is seen
    inside of it; else the inside is nearer to the cause."""
    if inside is None or not inside.is_named:
        return outside
    if outside.is_named and outside.component in ("outside", "storage"):
        return outside
    return replace(inside, blind=tuple(dict.fromkeys((*outside.blind, *inside.blind))))
