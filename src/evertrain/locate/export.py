"""Which flight recorder dumps can torch's own analyzer read? The same dumps, with what is wrong in them put right.

gloo's recorder knows no group members (`KeyError` in the analyzer), leaves every operation `scheduled`, and records no
transfers. The analyzer stumbles over operations it does not know, over groups that are described in two ways, and, when
the oldest entries have been overwritten, over ranks that have recorded different numbers of operations. Everything else
stays as it was recorded.

    python -m torch.distributed.flight_recorder.fr_trace FOLDER -p rank_
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from evertrain.locate import recorder
from evertrain.locate.members import completed
from evertrain.model.recording import Group, Recordings

PREFIX = "rank_"
"""What the names of the files begin with; the rank follows."""

_VERSION = "2.10"
# what torch 2.13 accepts; it ends at the first entry of any other kind
_BACKENDS = frozenset({"nccl", "ncclx", "xccl", "gloo", "rccl", "rcclx", "mccl", "hccl"})
_OPERATIONS = frozenset({
    "broadcast", "_broadcast_oop", "reduce", "_reduce_oop", "all_gather", "all_gather_single", "all_gather_v",
    "all_reduce", "_all_gather_base", "all_gather_into_tensor_coalesced", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_v", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base", "gather", "scatter", "all_to_all",
    "all_to_all_single", "all_to_all_v_single", "all_reduce_barrier", "barrier", "split", "new_window",
    "allreduce_coalesced", "ALLGATHER_coalesced", "REDUCE_SCATTER_coalesced", "send", "recv", "coalesced",
})  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "collective_seq_id": 0, "p2p_seq_id": 0, "is_p2p": False, "input_sizes": [], "output_sizes": [],
    "input_dtypes": [], "output_dtypes": [], "time_created_ns": 0,
}  # fmt: skip


def files(raw: Mapping[int, bytes], groups: Mapping[str, Group]) -> dict[str, bytes]:
    """File name to content, from the raw dump of each rank. Raises ValueError, naming the rank of what is no dump."""
    whole = _with_members(raw, groups)
    dumps = {rank: corrected(data, rank, whole) for rank, data in raw.items()}
    _align(dumps)
    return {f"{PREFIX}{rank}": pickled(content) for rank, content in sorted(dumps.items())}


def pickled(content: Mapping[str, Any]) -> bytes:
    """As torch writes it, and as its analyzer wants it."""
    return pickle.dumps(content, protocol=2)


def corrected(raw: bytes, rank: int, groups: Mapping[str, Group]) -> dict[str, Any]:
    """One dump as the analyzer takes it. Entries of groups whose members nobody knows are left out."""
    try:
        content = recorder.load(raw)
    except ValueError as error:
        raise ValueError(f"rank {rank}: {error}") from None
    entries = [
        one
        for at, told in enumerate(content.get("entries", ()))
        if isinstance(told, Mapping) and (one := _entry(told, at, groups)) is not None
    ]
    used = {one["process_group"][0] for one in entries}
    config = {
        name: {"name": name, "desc": _description(group), "ranks": str(list(group.members))}
        for name, group in groups.items()
        if group.members and (name in used or rank in group.members)
    }
    # the analyzer wants one version for all ranks, with a point in it
    return {**content, "version": _version(content), "pg_config": config, "entries": entries}


def _entry(told: Mapping[str, Any], at: int, groups: Mapping[str, Group]) -> dict[str, Any] | None:
    named = told.get("process_group")
    name = str(named[0] if isinstance(named, list | tuple) and named else told.get("pg_id", ""))
    group = groups.get(name)
    backend, _, operation = str(told.get("profiling_name", "")).partition(":")
    if group is None or not group.members:
        return None
    if backend not in _BACKENDS or operation.partition(" ")[0] not in _OPERATIONS:
        return None
    one = {**_DEFAULTS, "record_id": at, **told}
    one["process_group"] = (name, _description(group))
    if "collective_seq_id" not in told:
        one["collective_seq_id"] = told.get("seq_id", 0)
    if told.get("state") != "completed":
        one["state"] = "completed" if told.get("retired") is True else told.get("state") or "scheduled"
    for when in ("time_discovered_started_ns", "time_discovered_completed_ns"):
        one[when] = told.get(when) or None
    return one


def _with_members(raw: Mapping[int, bytes], groups: Mapping[str, Group]) -> dict[str, Group]:
    """The groups that are known, those that dumps describe, and those whose members follow from who uses them."""
    read = []
    for rank, data in raw.items():
        try:
            read.append(recorder.read(data, rank))
        except ValueError as error:
            raise ValueError(f"rank {rank}: {error}") from None
    found = recorder.together([Recordings({}, dict(groups)), *read])
    return completed(found)


def _align(dumps: Mapping[int, dict[str, Any]]) -> None:
    """Begin each group where all its members have a record of it.

    The analyzer does so by the number of the record in the whole dump, which compares nothing where ranks record
    different operations; with numbers that begin at 0 everywhere it leaves that alone.
    """
    first: dict[str, dict[int, int]] = defaultdict(dict)
    overwritten: set[int] = set()
    for rank, dump in dumps.items():
        if dump["entries"] and dump["entries"][0]["record_id"] > 0:
            overwritten.add(rank)
        for one in dump["entries"]:
            if not one["is_p2p"]:
                first[one["process_group"][0]].setdefault(rank, one["collective_seq_id"])
    begin = {
        name: max((number for rank, number in by_rank.items() if rank in overwritten), default=0)
        for name, by_rank in first.items()
    }
    for dump in dumps.values():
        dump["entries"] = [
            one
            for one in dump["entries"]
            if one["is_p2p"] or one["collective_seq_id"] >= begin[one["process_group"][0]]
        ]
        for at, one in enumerate(dump["entries"]):
            one["record_id"] = at


def _description(group: Group) -> str:
    return group.description or "undefined"


def _version(content: Mapping[str, Any]) -> str:
    told = str(content.get("version", ""))
    return told if told.replace(".", "", 1).isdigit() and told.count(".") == 1 else _VERSION
