"""What had each rank been told to do? PyTorch's flight recorder, in every layout, read into one shape.

Raw dumps (pickle or JSON; torch 2.2 to 2.13 wrote a bare list, then a dictionary with `entries`, `pg_config`,
`pg_status`, `nccl_comm_state`), and the summary of a set of dumps: for each rank how many entries it has and the first
ones that are pending.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from evertrain.locate import pickles
from evertrain.model.recording import PEER, Group, Operation, Recording, Recordings

_NUMBERS = re.compile(r"\d+")
_RANK_IN_NAME = re.compile(r"(\d+)(?:\.[A-Za-z]\w*)*$")
_MOST_ENTRIES = 20_000
"""The newest ones are looked at; the recorder keeps 2,000 by default."""
_LONGEST_NAME = 300
_MOST_SIZES = 16
"""Tensors, and dimensions, of an operation that are compared."""


def rank_of(name: str) -> int | None:
    """The rank that the name of a dump file ends with: `comm_lib_trace_rank_3`, `rank_3.json`."""
    found = _RANK_IN_NAME.search(name)
    return int(found[1]) if found and len(found[1]) < 8 else None


def is_pickle(data: bytes) -> bool:
    return data[:1] == b"\x80" and data[1:2] in b"\x02\x03\x04\x05"


def read(data: bytes, rank: int | None) -> Recordings:
    """One raw dump of `rank`. Raises ValueError, with the reason in one line, if it is none."""
    if is_pickle(data):
        content = pickles.loads(data)
    else:
        try:
            content = msgspec.json.decode(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ValueError(f"neither a pickle nor JSON: {str(error)[:200]}") from None
    if isinstance(content, Mapping) and isinstance(content.get("per_rank"), Mapping):
        return read_summary(content)
    if isinstance(content, list):
        content = {"entries": content}
    if not isinstance(content, Mapping) or not isinstance(content.get("entries"), list | tuple):
        raise ValueError("no flight recorder dump: it has no entries")
    if rank is None:
        rank = _number(content.get("rank"))
    if rank is None:
        raise ValueError("a flight recorder dump that does not say whose it is: its file name should end with the rank")
    config = _config(content.get("pg_config"))
    groups: dict[str, Group] = {group.name: group for group in config.values()}
    kept: dict[object, Operation] = {}
    count = 0
    for entry in content["entries"][-_MOST_ENTRIES:]:
        if isinstance(entry, Mapping):
            count += 1
            group = _group_of(entry, config)
            groups.setdefault(group.name, group)
            one = _operation(entry, group.name)
            key = count if one.is_pending else (one.group, one.name)
            kept.pop(key, None)
            kept[key] = one
    return Recordings({rank: Recording(rank, count, tuple(kept.values()))}, groups)


def read_summary(content: Mapping[str, Any]) -> Recordings:
    """The summary of a set of dumps: `pg_members`, and `per_rank` with `entries` and `first_pending`."""
    groups: dict[str, Group] = {}
    described = content.get("pg_members")
    for name, told in described.items() if isinstance(described, Mapping) else ():
        if isinstance(told, list | tuple) and len(told) >= 2:
            groups[_text(name)] = Group(_text(name), _text(told[0]), _ranks(told[1]))
    ranks: dict[int, Recording] = {}
    per_rank = content.get("per_rank")
    for name, told in per_rank.items() if isinstance(per_rank, Mapping) else ():
        rank = _number(name)
        if rank is None or not isinstance(told, Mapping):
            continue
        operations = []
        listed = told.get("first_pending")
        for pending in listed if isinstance(listed, list | tuple) else ():
            if isinstance(pending, Mapping):
                group = _text(pending.get("pg"))
                groups.setdefault(group, Group(group, _text(pending.get("desc"))))
                operations.append(_operation({"profiling_name": pending.get("op"), **pending}, group))
        ranks[rank] = Recording(rank, _number(told.get("entries")) or 0, tuple(operations), is_whole=False)
    return Recordings(ranks, groups)


def together(found: list[Recordings]) -> Recordings:
    """The dumps of several ranks as one set; of two dumps of a rank the one with more entries counts."""
    ranks: dict[int, Recording] = {}
    groups: dict[str, Group] = {}
    for one in found:
        for rank, recording in one.ranks.items():
            if rank not in ranks or ranks[rank].count < recording.count:
                ranks[rank] = recording
        for name, group in one.groups.items():
            if name not in groups or (group.members and not groups[name].members):
                groups[name] = group
    return Recordings(ranks, groups)


def _operation(entry: Mapping[str, Any], group: str) -> Operation:
    told = _text(entry.get("profiling_name")) or "?"
    backend, _, rest = told.partition(":")
    plain = rest if backend in _BACKENDS else told
    transfer = entry.get("is_p2p")
    is_transfer = bool(transfer) if transfer is not None else bool(PEER.search(plain))
    count = entry.get("p2p_seq_id") if is_transfer else entry.get("collective_seq_id", entry.get("seq_id"))
    is_done = entry.get("state") == "completed" or entry.get("retired") is True
    is_done = is_done or bool(_number(entry.get("time_discovered_completed_ns")))
    kinds = ("input_sizes", "output_sizes", "input_dtypes", "output_dtypes")
    shape = tuple(_sizes(entry.get(kind)) for kind in kinds) if "input_sizes" in entry and not is_done else ()
    return Operation(group, plain, _number(count) or 0, is_transfer, not is_done, shape)


_BACKENDS = frozenset({"gloo", "nccl", "ncclx", "xccl", "rccl", "rcclx", "mccl", "hccl", "ucc", "mpi", "nccl2"})


def _config(content: Any) -> dict[str, Group]:
    """{name or number as in the dump: group}."""
    found: dict[str, Group] = {}
    for key, told in content.items() if isinstance(content, Mapping) else ():
        if isinstance(told, Mapping) and (members := _ranks(told.get("ranks"))):
            name = _text(told.get("name")) or _text(key)
            found[name] = Group(name, _text(told.get("desc")), members)
    return found


def _group_of(entry: Mapping[str, Any], config: Mapping[str, Group]) -> Group:
    told = entry.get("process_group")
    if isinstance(told, list | tuple) and told:
        name, description = _text(told[0]), _text(told[1]) if len(told) > 1 else ""
    else:
        name, description = _text(told if told is not None else entry.get("pg_id")), ""
    return config.get(name) or Group(name, description)


def _ranks(told: Any) -> tuple[int, ...]:
    if isinstance(told, list | tuple):
        return tuple(one for one in told if isinstance(one, int))
    return tuple(int(one) for one in _NUMBERS.findall(told) if len(one) < 8) if isinstance(told, str) else ()


def _number(told: Any) -> int | None:
    if isinstance(told, int):
        return told
    return int(told) if isinstance(told, str) and told.isdigit() and told.isascii() and len(told) < 20 else None


def _text(told: Any) -> str:
    """A name. Anything else has none: what is nested without end must not be written out."""
    return str(told)[:_LONGEST_NAME] if isinstance(told, str | int) else ""


def _sizes(told: Any) -> tuple[Any, ...]:
    """A list of types, or of lists of sizes, as something that can be compared."""
    listed = told[:_MOST_SIZES] if isinstance(told, list | tuple) else ()
    return tuple(_plain(one[:_MOST_SIZES]) if isinstance(one, list | tuple) else _plain((one,)) for one in listed)


def _plain(told: Sequence[Any]) -> tuple[int | str | None, ...]:
    return tuple(one if isinstance(one, int | str) else None for one in told)
