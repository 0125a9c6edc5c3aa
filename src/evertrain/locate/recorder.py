"""What had each rank been told to do? PyTorch's flight recorder, in every layout, read into one shape.

Raw dumps (pickle or JSON; torch 2.2 to 2.13 wrote a bare list, then a dictionary with `entries`, `pg_config`,
`pg_status`, `nccl_comm_state`), and the summary of a set of dumps: for each rank how many entries it has and the first
ones that are pending.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from evertrain.locate import habit, pickles
from evertrain.model.activity import RankActivity
from evertrain.model.recording import PEER, Group, Operation, Recording, Recordings

_NUMBERS = re.compile(r"\d+")
_RANK_IN_NAME = re.compile(r"(\d+)(?:\.[A-Za-z]\w*)*$")
_TRANSFER = re.compile(r"(send|recv)[a-z_]*(?: (\d+) ?(?:->|<-) ?(\d+))?")
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


def load(data: bytes) -> Mapping[str, Any]:
    """What a dump holds, a summary included. Raises ValueError, with the reason in one line, if it is none."""
    if is_pickle(data):
        content = pickles.loads(data)
    else:
        try:
            content = msgspec.json.decode(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ValueError(f"neither a pickle nor JSON: {str(error)[:200]}") from None
    if isinstance(content, list):
        return {"entries": content}
    if isinstance(content, Mapping):
        if isinstance(content.get("per_rank"), Mapping) or isinstance(content.get("entries"), list | tuple):
            return content
        if "entries" not in content and "version" in content and "pg_status" in content:
            # written as JSON by a rank that has called nothing yet
            return {**content, "entries": []}
    raise ValueError("no flight recorder dump: it has no entries")


def read(data: bytes, rank: int | None, time: float = 0.0) -> Recordings:
    """One raw dump of `rank`, taken at `time`. Raises ValueError, with the reason in one line, if it is none."""
    content = load(data)
    if isinstance(content.get("per_rank"), Mapping):
        return read_summary(content)
    if rank is None:
        rank = _number(content.get("rank"))
    if rank is None:
        raise ValueError("a flight recorder dump that does not say whose it is: its file name should end with the rank")
    config = _config(content.get("pg_config"))
    groups: dict[str, Group] = {group.name: group for group in config.values()}
    called: list[Operation] = []
    for entry in content["entries"][-_MOST_ENTRIES:]:
        if isinstance(entry, Mapping):
            group = _group_of(entry, config)
            groups.setdefault(group.name, group)
            called.append(_operation(entry, group.name))
    missed, is_new = _missed(called)
    found = Recording(rank, len(called), tuple(_kept(called)), time=time, missed=missed, is_new=is_new)
    return Recordings({rank: found}, groups)


def _kept(called: Sequence[Operation]) -> Iterator[Operation]:
    """What is pending, and of the others the last of each kind in each group."""
    last = {(one.group, one.name): at for at, one in enumerate(called) if not one.is_pending}
    return (one for at, one in enumerate(called) if one.is_pending or last[one.group, one.name] == at)


def _missed(called: Sequence[Operation]) -> tuple[Operation | None, bool]:
    """What a rank has left out by its own habit, with the number that it would have had; and whether what it has called
    there instead was new to it."""
    for with_shape in (True, False):
        calls = [(one.group, one.name, one.shape if with_shape else ()) for one in called]
        for at, (group, name, shape) in habit.departures(calls):
            before = [one for one in called[:at] if one.group == group and not one.is_transfer]
            is_transfer = bool(PEER.search(name))
            if not is_transfer and before and (group, name, shape) not in calls[at + 1 :]:
                missed = Operation(group, name, before[-1].sequence + 1, False, False, shape)
                return missed, calls[at] not in calls[:at]
    return None, False


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


def with_activities(found: Recordings, activities: Iterable[RankActivity]) -> Recordings:
    """The same, with the transfers in which ranks stand by their pages: gloo's recorder leaves those out.

    A page names the peers as a recorder does, by their positions in the group: `send 0->3`, `recv 3<-0`. Without them
    it still says that the rank is not elsewhere.
    """
    ranks = dict(found.ranks)
    for one in activities:
        told = _TRANSFER.match(one.inside.op) if one.inside else None
        if one.inside is None or told is None:
            continue
        name = f"{told[1]} {told[2]}{'->' if told[1] == 'send' else '<-'}{told[3]}" if told[2] else told[1]
        transfer = Operation(one.inside.group, name, one.inside.seq, True, True, on_host=True)
        recording = ranks.get(one.rank, Recording(one.rank, 0))
        if not any(other.is_transfer and other.is_pending for other in recording.operations):
            ranks[one.rank] = msgspec.structs.replace(
                recording, count=recording.count + 1, operations=(transfer, *recording.operations)
            )
    return Recordings(ranks, found.groups)


def one_dump(dumps: Sequence[bytes]) -> bytes:
    """Several dumps of one rank, one for each of its recorders, as one in JSON: the entries by time."""
    loaded = [dict(load(data)) for data in dumps]
    whole: dict[str, Any] = {}
    for content in loaded:
        for key, told in content.items():
            known = whole.get(key)
            whole[key] = {**known, **told} if isinstance(known, dict) and isinstance(told, dict) else known or told
    entries = [one for content in loaded for one in content["entries"] if isinstance(one, dict)]
    whole["entries"] = sorted(entries, key=lambda one: _number(one.get("time_created_ns")) or 0)
    return msgspec.json.encode(whole)


def _operation(entry: Mapping[str, Any], group: str) -> Operation:
    told = _text(entry.get("profiling_name")) or "?"
    backend, _, rest = told.partition(":")
    plain = rest if backend in _BACKENDS else told
    transfer = entry.get("is_p2p")
    is_transfer = bool(transfer) if transfer is not None else bool(PEER.search(plain))
    count = entry.get("p2p_seq_id") if is_transfer else entry.get("collective_seq_id", entry.get("seq_id"))
    is_done = entry.get("state") == "completed" or entry.get("retired") is True
    is_done = is_done or bool(_number(entry.get("time_discovered_completed_ns")))
    is_started = entry.get("state") == "started" or bool(_number(entry.get("time_discovered_started_ns")))
    get = entry.get
    shape = (_sizes(get("input_sizes")), _sizes(get("output_sizes")), _sizes(get("input_dtypes")),
             _sizes(get("output_dtypes"))) if "input_sizes" in entry else ()  # fmt: skip
    called_at = 0 if is_done else _number(entry.get("time_created_ns")) or 0
    return Operation(
        group, plain, _number(count) or 0, is_transfer, not is_done, shape,
        is_started=is_started and not is_done, on_host=backend in _ON_HOST, since=called_at / 1e9,
    )  # fmt: skip


_ON_HOST = frozenset({"gloo", "mpi"})
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
    if type(told) is not list and type(told) is not tuple:
        return ()
    found = []
    for one in told[:_MOST_SIZES]:
        plain = tuple(one[:_MOST_SIZES]) if type(one) is list or type(one) is tuple else (one,)
        for size in plain:
            if type(size) is not int and type(size) is not str:
                plain = tuple(size if isinstance(size, int | str) else None for size in plain)
                break
        found.append(plain)
    return tuple(found)
