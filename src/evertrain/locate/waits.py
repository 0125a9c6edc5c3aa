"""Who waits for whom, and who is waited for without waiting himself?

`sinks` walks a wait graph to those whom nobody else explains. `judge` does it for a set of stack dumps, where the edges
are not known: whoever is inside a collective is a victim, whoever is left is the suspect. How many stand in one place
says nothing: neither the largest group nor the smallest is the fault by itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from evertrain.locate import stacks
from evertrain.locate.places import WAITING_FOR_PEERS, Place, place
from evertrain.locate.seats import Seat, seat
from evertrain.model.findings import Action, Category, Culprit, Finding
from evertrain.model.stacks import Dump, PlaceKind

Waiter = TypeVar("Waiter", bound=Hashable)

_GROUP = "stacks"


def sinks(waits: Mapping[Waiter, Iterable[Waiter]]) -> list[frozenset[Waiter]]:
    """The ends of the wait graph: whom others wait for and who wait for nobody outside.

    One waiter alone is the cause of what stands behind it; several together wait for each other in a circle. Those for
    whom nobody waits are left out: they explain nothing.
    """
    edges = {who: [on for on in dict.fromkeys(whom) if on != who] for who, whom in waits.items()}
    waited_for = {on for whom in edges.values() for on in whom}
    for one in waited_for - edges.keys():
        edges[one] = []
    found = [
        circle
        for circle in _circles(edges)
        if circle & waited_for and not any(on not in circle for one in circle for on in edges[one])
    ]
    return [one for one in found if len(one) > 1 or next(iter(one)) in waited_for]


def _circles(edges: Mapping[Waiter, list[Waiter]]) -> Iterator[frozenset[Waiter]]:
    """Strongly connected components (Tarjan), without recursion: there may be ten thousand ranks."""
    order: dict[Waiter, int] = {}
    low: dict[Waiter, int] = {}
    open_ones: dict[Waiter, None] = {}
    for root in edges:
        if root in order:
            continue
        work = [(root, iter(edges[root]))]
        order[root] = low[root] = len(order)
        open_ones[root] = None
        while work:
            one, rest = work[-1]
            for on in rest:
                if on not in order:
                    order[on] = low[on] = len(order)
                    open_ones[on] = None
                    work.append((on, iter(edges[on])))
                    break
                if on in open_ones:
                    low[one] = min(low[one], order[on])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[one])
                if low[one] == order[one]:
                    circle = set()
                    while True:
                        last, _ = open_ones.popitem()
                        circle.add(last)
                        if last == one:
                            break
                    yield frozenset(circle)


# --- stack dumps

_CHILD = re.compile(r"multiprocessing[.-](?:spawn|fork|resource)|spawn_main|forkserver|pt_data_worker")
_COMMAND_RANK = re.compile(r"--local[-_]rank[= ](\d{1,6})")


class Seen(msgspec.Struct, frozen=True):
    seat: Seat
    place: Place
    pid: int | None = None

    def __str__(self) -> str:
        where = self.place.frame or "no frame"
        called = (
            f", called by {self.place.caller}" if self.place.caller and self.place.caller != self.place.frame else ""
        )
        idle = " (idle)" if self.place.is_idle else ""
        return f"{self.seat.label}: {self.place.kind}: {where}{idle}{called}"


def look(dumps: Mapping[str, str]) -> list[Seen]:
    """Each process of each dump, with the place where it is."""
    found: list[Seen] = []
    for label, text in dumps.items():
        named, processes = seat(label), stacks.read(text)
        if not processes:
            why = text.strip().splitlines()[0][:200] if text.strip() else "empty dump"
            processes = (Dump(failure=why),) if _says_nothing_came(text) else ()
        for dump in processes:
            own = named
            if len(processes) > 1 and own.rank is None:
                told = _COMMAND_RANK.search(dump.command)
                own = Seat(
                    f"{label} pid {dump.pid}", None, int(told[1]) if told else None, own.host or label, own.is_helper
                )
            if not own.is_helper and _is_child(dump):
                own = msgspec.structs.replace(own, is_helper=True)
            found.append(Seen(own, place(dump), dump.pid))
    return found


def _is_child(dump: Dump) -> bool:
    """A data loader's worker, found among the processes of its rank."""
    return any(frame.function.endswith("_worker_loop") for thread in dump.threads for frame in thread.frames) or bool(
        _CHILD.search(dump.command)
    )


def _standing(ranks: list[Seen]) -> list[Seen]:
    """One dump for each process. Of several the last counts, and none if they differ: who moves does not hang."""
    shown: dict[tuple[str | None, int | str, int | None], list[Seen]] = {}
    for one in ranks:
        shown.setdefault((one.seat.host, one.seat.culprit, one.pid), []).append(one)
    return [
        several[-1] for several in shown.values() if len({(one.place.kind, one.place.frame) for one in several}) == 1
    ]


def _says_nothing_came(text: str) -> bool:
    return not text.strip() or len(text) < 300


def judge(dumps: Mapping[str, str], facts: Mapping[str, Any] | None = None) -> tuple[Finding, ...]:
    """What the stacks say about who is to blame. `facts` may hold process states (`ps`) and what other hosts show."""
    everyone = look(dumps)
    ranks = [one for one in everyone if not one.seat.is_helper]
    helpers = [one for one in everyone if one.seat.is_helper]
    if not ranks:
        return ()
    if not (standing := _standing(ranks)):
        note = f"the stacks of all {len(ranks)} dumps differ from one time to the next: the job moves"
        return (_finding("stack-moving", "none", "none", 0.4, Culprit("none"), ranks[:3], note, benign=True),)
    ranks = standing
    told = _flat(facts or {})
    victims = [one for one in ranks if one.place.kind in WAITING_FOR_PEERS]
    suspects = [one for one in ranks if one.place.kind not in WAITING_FOR_PEERS]
    unreadable = [one for one in suspects if one.place.kind == "unreadable"]

    if len(unreadable) == len(ranks):
        return (_all_unreadable(unreadable),)
    if not suspects:
        return tuple(_all_inside(victims))
    if not victims:
        return tuple(_nobody_inside(suspects))
    # a process that waits in the operating system outranks one that computes
    ordered = sorted(suspects, key=lambda one: _RANKING.index(one.place.kind))
    if _is_everywhere(told) or len(suspects) * 2 > len(ranks):
        return (_out_of_step(ordered, victims, everywhere=_is_everywhere(told)),)
    first = ordered[0].place.kind
    chosen = [one for one in ordered if one.place.kind == first]
    return (_suspects(first, chosen, victims, helpers, told),)


_RANKING: tuple[PlaceKind, ...] = (
    "unreadable", "pinning", "loader", "storage", "checkpoint", "lock", "compiling", "collecting", "exiting",
    "elsewhere", "device", "collective", "transfer", "rendezvous",
)  # fmt: skip


def _suspects(
    kind: PlaceKind, chosen: list[Seen], victims: list[Seen], helpers: list[Seen], told: Mapping[str, str]
) -> Finding:
    others = f"{len(victims)} other ranks wait inside collectives"
    who = ", ".join(one.seat.name for one in chosen)
    in_storage = [one for one in helpers if one.place.kind == "storage"]
    in_kernel, stopped = _state(told, _IN_KERNEL), _state(told, _STOPPED)
    category: Category
    action: Action
    culprit = _culprit(chosen)
    match kind:
        case "loader" | "pinning" if in_storage:
            category, action, confidence, culprit = "storage", "storage", 0.7, Culprit("storage", str(in_storage[0]))
            note = f"the data loader of {who} waits for storage; {others}"
        case "pinning":
            category, action, confidence = "framework_bug", "human", 0.6
            note = f"{who} waits for a batch that its own process should hand on (pin-memory queue); {others}"
        case "loader":
            category, action, confidence = "hang_dataloader", "retry", 0.7
            note = f"the data loader of {who} delivers nothing; {others}"
        case "storage" | "checkpoint":
            category, action, confidence, culprit = "storage", "storage", 0.6, Culprit("storage", str(chosen[0]))
            note = f"{who} is inside file access; {others}"
        case "unreadable" if stopped:
            category, action, confidence = "unknown", "retry", 0.6
            note = f"{who} is stopped ({stopped}); {others}"
        case "unreadable" if in_kernel or any(_REFUSED.search(one.place.frame) for one in chosen):
            # privileges would be missing for all of them
            category, action, culprit = "storage", "storage", Culprit("storage", f"file access of {who}")
            confidence = 0.75 if in_kernel else 0.5
            state = f" ({in_kernel})" if in_kernel else ""
            note = f"{who} alone cannot be attached to: uninterruptible in the kernel{state}; {others}"
        case "unreadable" if all(_GONE.search(one.place.frame) for one in chosen):
            category, action, confidence = "unknown", "retry", 0.5
            note = f"{who} is gone; {others}"
        case "unreadable":
            category, action, confidence = "unknown", "retry", 0.5
            note = f"{who} alone gives no dump: stopped, or its GIL is held; {others}"
        case "compiling" | "collecting" | "exiting":
            category, action, confidence = "unknown", "retry", 0.4
            words = {"compiling": "compiles", "collecting": "collects garbage", "exiting": "is on its way out"}
            note = f"{who} {words[kind]} while {others}"
        case _:
            category, action, confidence = "unknown", "retry", 0.5 if kind == "lock" else 0.4
            note = f"{who} is outside of all collectives; {others}"
    return _finding(
        f"stack-{kind}", category, action, confidence, culprit, [*chosen, *in_storage, *victims[:2]], note, chosen
    )


def _out_of_step(suspects: list[Seen], victims: list[Seen], *, everywhere: bool) -> Finding:
    where = "and on every host the same" if everywhere else "too many to single out"
    note = (
        f"{len(victims)} ranks wait in a collective that {len(suspects)} others are not in, {where}: software, no host"
    )
    category: Category = "framework_bug" if everywhere else "unknown"
    shown = [*suspects[:2], *victims[:2]]
    return _finding(
        "stack-out-of-step", category, "human", 0.5, Culprit("library" if everywhere else "unknown"), shown, note
    )


def _all_inside(victims: list[Seen]) -> Iterator[Finding]:
    """Nobody is outside: either they wait in operations that cannot meet, or the stacks are no evidence."""
    calls = Counter((one.place.kind, _function(one.place.frame), one.place.caller) for one in victims)
    if len(calls) == 2 and len(victims) > 2 and "transfer" not in {kind for kind, _, _ in calls}:
        (_, common), (odd_call, odd) = calls.most_common(2)
        names = {name for _, name, _ in calls}
        if odd < common and len(names) == 2:
            chosen = [
                one for one in victims if (one.place.kind, _function(one.place.frame), one.place.caller) == odd_call
            ]
            if [one.seat.rank for one in chosen] == [0] and "barrier" in names:
                note = "rank 0 is in another collective than all others: a branch on the rank around a collective"
                shown = [*chosen, *[one for one in victims if one not in chosen][:2]]
                yield _finding("stack-mismatch", "user_code", "user_code", 0.55, Culprit("code", note), shown, note)
                return
    who = "the rank waits" if len(victims) == 1 else f"all {len(victims)} ranks seen wait"
    note = f"{who} inside collectives or for the device: their stacks accuse nobody"
    yield _finding("stack-all-inside", "unknown", "human", 0.3, Culprit(), victims[:3], note, symptom=True)


def _nobody_inside(suspects: list[Seen]) -> Iterator[Finding]:
    """No rank waits for another, so none is accused by its peers; what all do may still say something."""
    kinds = {one.place.kind for one in suspects}
    if len(kinds) == 1 and len(suspects) > 1:
        (kind,) = kinds
        if kind in ("storage", "checkpoint"):
            note = f"all {len(suspects)} ranks seen are inside file access"
            yield _finding("stack-all-storage", "storage", "storage", 0.5, Culprit("storage"), suspects[:3], note)
        elif kind in ("loader", "pinning"):
            note = f"all {len(suspects)} ranks seen wait for their data loaders"
            yield _finding("stack-all-loaders", "hang_dataloader", "retry", 0.45, Culprit("data"), suspects[:3], note)
    elif len(suspects) == 1 and suspects[0].place.kind in ("loader", "pinning"):
        note = f"{suspects[0].seat.label} waits for its data loader"
        yield _finding("stack-loader", "hang_dataloader", "retry", 0.45, _culprit(suspects), suspects, note, suspects)


def _all_unreadable(unreadable: list[Seen]) -> Finding:
    note = "no process could be read: the collector lacks the privilege (ptrace), which says nothing about the job"
    return _finding("stack-unreadable", "unknown", "human", 0.1, Culprit(), unreadable[:3], note, symptom=True)


def _finding(
    rule: str,
    category: Category,
    action: Action,
    confidence: float,
    culprit: Culprit,
    shown: Iterable[Seen],
    note: str,
    accused: list[Seen] | None = None,
    *,
    symptom: bool = False,
    benign: bool = False,
) -> Finding:
    one = accused[0].seat if accused and len(accused) == 1 else None
    hosts = {seen.seat.host for seen in accused or []}
    return Finding(
        rule=rule,
        group=_GROUP,
        category=category,
        action=action,
        culprit=culprit,
        confidence=confidence,
        evidence=tuple(str(seen) for seen in shown),
        rank=one.rank if one else None,
        host=next(iter(hosts)) if len(hosts) == 1 else None,
        is_symptom=symptom,
        is_benign=benign,
        note=note,
    )


def _culprit(chosen: list[Seen]) -> Culprit:
    ids = [one.seat.culprit for one in chosen]
    if len(ids) == 1:
        return Culprit("rank", ids[0])
    numbers = tuple(sorted(one for one in ids if isinstance(one, int)))
    return Culprit("rank", numbers if len(numbers) == len(ids) else tuple(str(one) for one in ids))


def _function(frame: str) -> str:
    return frame.partition(" (")[0]


# --- facts beside the dumps


def _flat(facts: Mapping[str, Any], path: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in facts.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and path.count(".") < 4:
            found |= _flat(value, name)
        else:
            found[name] = str(value).strip()
    return found


_REFUSED = re.compile(r"EPERM|Operation not permitted|Permission denied")
_GONE = re.compile(r"ESRCH|No such process|No such file", re.IGNORECASE)
# as `ps`, /proc/PID/status and /proc/PID/wchan say it
_IN_KERNEL = re.compile(
    r"D[A-Za-z+<]{0,4}|D \(disk sleep\)|disk sleep|(?i:uninterruptible.*)"
    r"|(?:nfs|rpc|ll|cl|ptlrpc|gpfs|lustre|ceph|fuse|xfs|ext4|jbd2|beegfs|folio_wait|wait_on_page|io_schedule)_?\w*"
)
_STOPPED = re.compile(
    r"T[A-Za-z+<]{0,4}|[Tt] \((?:stopped|tracing stop)\)|(?i:stopped|sigstop.*)|do_signal_stop|ptrace_stop"
)
_STATE_KEY = re.compile(r"stat|wchan", re.IGNORECASE)
_EVERYWHERE = re.compile(
    r"(same|identical|equal).*(every|each|all).*(host|node)|every.*(host|node).*same", re.IGNORECASE
)


def _state(told: Mapping[str, str], which: re.Pattern[str]) -> str:
    """The first process that is in such a state, as the facts say it."""
    return next(
        (f"{key}: {value}" for key, value in told.items() if _STATE_KEY.search(key) and which.fullmatch(value)), ""
    )


def _is_everywhere(told: Mapping[str, str]) -> bool:
    return any(_EVERYWHERE.search(key) and value.lower() in ("true", "yes", "1") for key, value in told.items())
