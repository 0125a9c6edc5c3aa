"""How are ranks, operations and processes called in a line for people?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from evertrain.locate.standing import Standing
from evertrain.model.activity import Operation
from evertrain.model.recording import Group

_OPERATIONS = {
    "allreduce": "all_reduce", "allgather": "all_gather", "allgather_base": "all_gather_into_tensor",
    "reduce_scatter_base": "reduce_scatter_tensor", "alltoall": "all_to_all", "alltoall_base": "all_to_all_single",
}  # fmt: skip
_MOST_SPANS = 12


def span(numbers: Iterable[int]) -> str:
    """0-4, 6-7"""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    told = ["-".join(map(str, one)) for one in spans[:_MOST_SPANS]]
    return ", ".join(told) + (", …" if len(spans) > _MOST_SPANS else "")


def named(ranks: Iterable[int]) -> str:
    """rank 5; ranks 0-4, 6"""
    found = list(ranks)
    return f"rank{'s' * (len(found) != 1)} {span(found)}"


def operation(one: Operation, groups: Mapping[str, Group]) -> str:
    name, _, peers = one.op.partition(" ")
    name = _OPERATIONS.get(name.strip("_"), name.strip("_")) + (f" {peers}" if peers else "")
    return f"{name} number {one.seq} of group {groups.get(one.group, one.group)}"


def stack(one: Standing) -> str:
    """The innermost frames, up to the first that is the script's own."""
    frames = one.position.frames[:3] if one.position is not None else ()
    if not frames:
        return "no stack could be read" + (f": {one.position.failure}" if one.position and one.position.failure else "")
    return "in " + " < ".join(map(str, frames))
