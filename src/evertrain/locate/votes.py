"""On which rank do the others of a slow job wait? Several captures vote: who computes while the others wait?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from evertrain.locate import words
from evertrain.locate.grouping import Merged
from evertrain.locate.places import WAITING_FOR_PEERS
from evertrain.model.stacks import Located

_MOST = 0.6
"""So much of its looks a straggler computes,"""
_FEW = 0.4
"""... and the others at most so much of theirs."""
_ROUNDS = 3


def vote(rounds: Sequence[Merged], *, mesh: Mapping[str, int] | None = None) -> Located:
    """The verdict on rounds of one attempt; nobody is named where no rank stands out in most of them."""
    votes: Counter[int] = Counter()
    for one in rounds:
        votes.update(_odd(one))
    needed = max(_ROUNDS, len(rounds) // 2 + 1)
    named = tuple(sorted(rank for rank, count in votes.items() if count >= needed))
    numbers = tuple(one.number for one in rounds)
    if not named:
        line = f"no rank stands out in {needed} of {len(rounds)} rounds"
        return Located(kind="unknown", evidence=(line,), captures=numbers)
    nodes = tuple(dict.fromkeys(rounds[-1].nodes.get(rank, "") for rank in named))
    return Located(
        kind="slow",
        ranks=named,
        nodes=nodes,
        category="straggler",
        confidence=0.7,
        evidence=(f"{words.named(named)} computed while the others waited, in {needed} of {len(rounds)} rounds",),
        captures=numbers,
    )


def _odd(merged: Merged) -> set[int]:
    looks: Counter[int] = Counter()
    outside: Counter[int] = Counter()
    for position in merged.positions:
        if position.kind == "trainer":
            for member in position.members:
                looks[member.rank] += member.looks
                outside[member.rank] += member.looks * (position.place not in WAITING_FOR_PEERS)
    share = {rank: outside[rank] / count for rank, count in looks.items() if count}
    busy = {rank for rank, part in share.items() if part >= _MOST}
    return (
        busy
        if busy and all(share[rank] <= _FEW for rank in share.keys() - busy) and 2 * len(busy) < len(share)
        else set()
    )
