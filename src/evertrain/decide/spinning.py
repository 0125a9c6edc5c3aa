"""Which ranks use processor time and yet do not move? Those that wait, and ask again and again whether they still must.

A CUDA synchronise spins at full CPU, and so does NCCL. A rank that stands at the same place of its program in two
captures, waits there for its device or the network, and neither reads, writes nor touches new memory, is not at work.
"""

from __future__ import annotations

from evertrain.locate.grouping import Merged, moved, wait_class
from evertrain.locate.places import WAITING_FOR_PEERS
from evertrain.model.activity import RankActivity
from evertrain.model.config import HangConfig
from evertrain.model.stacks import Position


def standing(now: Merged, earlier: Merged | None, config: HangConfig) -> tuple[int, ...]:
    """The ranks that wait so in both captures; without an earlier one nothing can be said."""
    if earlier is None or earlier.attempt != now.attempt:
        return ()
    before, went = _waiting(earlier), moved(earlier, now)
    return tuple(
        sorted(
            rank
            for rank, pid in _waiting(now)
            if (rank, pid) in before and (rank, pid) not in went and _is_quiet(now.activities.get(rank), config)
        )
    )


def _waiting(merged: Merged) -> set[tuple[int, int]]:
    """Ranks, with their pids, that were seen nowhere else."""
    places: dict[tuple[int, int], bool] = {}
    for one in merged.positions:
        if one.kind == "trainer":
            for member in one.members:
                key = (member.rank, member.pid)
                places[key] = places.get(key, True) and _waits(one)
    return {key for key, waits in places.items() if waits}


def _waits(position: Position) -> bool:
    return position.place in WAITING_FOR_PEERS or (not position.state and wait_class(position.waits_in) == "network")


def _is_quiet(one: RankActivity | None, config: HangConfig) -> bool:
    if one is None or one.io_bytes_per_s is None or one.faults_per_s is None:
        return False
    return one.io_bytes_per_s < config.idle_io_bytes_per_s and one.faults_per_s < config.idle_faults_per_s
