"""Where do all processes of this node's ranks stand, now? Each is looked at by the mildest means that tells.

    /proc          state, system call      of every process, first: it cannot disturb or hang
    py-spy         Python's frames         the process goes on meanwhile; native frames of blamed ranks only
    faulthandler   Python's frames         where py-spy may not look, of those that have registered a signal for it

The whole look is bounded: what is late, stays dark and is said to be. No thread here keeps the process from ending.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from evertrain.locate import stacks
from evertrain.locate.words import named
from evertrain.model.stacks import CaptureOrder, Dump, ProcessKind, Seen
from evertrain.observe import fault_dumps, process_tree, py_spy
from evertrain.observe.process_tree import Process

LIMIT_S = 4.0
_ONE_S = 1.0
"""For one process."""
_DEEP_S = 2.5
"""... with native frames: py-spy reads the symbols of all its libraries."""
_SIGNAL_S = 0.5
_AT_ONCE = 2
_SHORTEST_S = 0.1
"""With less time left nothing is begun."""

_NO_TIME = "there was no time to look at all processes"

_ORDER: tuple[ProcessKind, ...] = ("trainer", "loader", "checkpoint", "helper")


class Signal(msgspec.Struct, frozen=True):
    """A rank, and what it has forked, can be asked for its stack."""

    number: int
    path: Path
    """Of the file that the answer comes to."""


def look(
    pids: Mapping[int, int],
    order: CaptureOrder,
    signals: Mapping[int, Signal] | None = None,
    limit_s: float = LIMIT_S,
) -> tuple[list[Seen], tuple[str, ...]]:
    """Look at ranks and all below them, as often as it is ordered; `pids` and `signals` are by rank.

    Returns what was seen, one for each process and look, and what could not be, one line each with what to do.
    The first look is at every process, later ones are at the ranks' own.
    """
    began = time.monotonic()
    one = _Look(frozenset(order.deep), signals or {}, began + limit_s)
    for number in range(max(1, order.looks)):
        wait_s = began + number * order.every_s - time.monotonic()
        if number and min(one.left_s, one.left_s - max(0.0, wait_s)) < _SHORTEST_S:
            break
        time.sleep(max(0.0, wait_s))
        one.at(_processes(pids, only_ranks=number > 0))
    if order.deep:
        one.deeper(_processes(pids, only_ranks=True))
    return one.seen, one.blind()


def _processes(pids: Mapping[int, int], *, only_ranks: bool) -> list[Process]:
    found = []
    for rank, pid in sorted(pids.items()):
        found += [process_tree.own(rank, pid)] if only_ranks else process_tree.processes(rank, pid)
    return sorted(found, key=lambda process: (_ORDER.index(process.kind), process.rank))


class _Look:
    """All looks of one capture."""

    def __init__(self, deep: frozenset[int], signals: Mapping[int, Signal], deadline: float) -> None:
        self._deep = deep
        self._signals = signals
        self._deadline = deadline
        self._program = py_spy.find()
        self._turns: dict[int, threading.Lock] = defaultdict(threading.Lock)
        """By rank: the answers to its signals go to one file."""
        self._dark: dict[str, set[int]] = defaultdict(set)
        self._helped: set[int] = set()
        """Ranks that py-spy may not read, and that have answered a signal."""
        self.seen: list[Seen] = []

    @property
    def left_s(self) -> float:
        return self._deadline - time.monotonic()

    def at(self, processes: Iterable[Process]) -> None:
        """Look once at each."""
        listed = list(processes)
        found = self._beside_each_other(listed, self._one)
        for number, process in enumerate(listed):
            if number not in found:
                self._dark[_NO_TIME].add(process.rank)
            seen = found.get(number, _seen(process, _dark(process, _NO_TIME)))
            if seen is not None:
                self.seen.append(seen)

    def deeper(self, processes: Iterable[Process]) -> None:
        """Native frames in place of what was seen of ranks that are blamed already, as far as there is time."""
        listed = [one for one in processes if one.rank in self._deep and one.is_python and not one.state]
        found = self._beside_each_other(listed, self._one_natively)
        by_pid = {seen.pid: seen for seen in found.values() if seen is not None and seen.dump.threads}
        self.seen = [by_pid.get(one.pid, one) for one in self.seen]

    def _beside_each_other(
        self, listed: Sequence[Process], work: Callable[[Process], Seen | None]
    ) -> dict[int, Seen | None]:
        """What `work` finds for each, by its number in the list; what is late is left out."""
        waiting = deque(enumerate(listed))
        found: dict[int, Seen | None] = {}

        def run() -> None:
            while waiting and self.left_s > _SHORTEST_S:
                try:
                    number, process = waiting.popleft()
                except IndexError:
                    return
                try:
                    found[number] = work(process)
                except Exception as error:  # of one process; the others are looked at all the same
                    found[number] = _seen(process, _dark(process, f"{type(error).__name__}: {error}"))

        threads = [threading.Thread(target=run, name="look", daemon=True) for _ in range(min(_AT_ONCE, len(listed)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self.left_s) + _SHORTEST_S)
        return dict(found)

    def blind(self) -> tuple[str, ...]:
        lines = [f"{named(ranks)}: {why}" for why, ranks in sorted(self._dark.items())]
        if self._helped:
            lines.append(f"{named(self._helped)}: read by a signal instead, without what they have started by exec")
        return tuple(lines)

    # --- one process

    def _one(self, process: Process) -> Seen | None:
        """None: it is gone, and was no rank."""
        if process.state == "ended":
            return _seen(process, _dark(process, "it has ended"))
        if not process.is_python:
            return _seen(process, _dark(process, "no Python: the kernel tells where it waits"))
        answer = self._ask_py_spy(process)
        if answer.problem == "ended":
            return _ended(process) if process.kind == "trainer" else None
        if not answer.problem:
            return _seen(process, _read(process, answer.text))
        dump, why = self._ask_itself(process)
        if dump is None:
            self._say(process, answer, why)
            return _seen(process, _dark(process, answer.failure))
        self._helped.add(process.rank)
        if answer.problem in ("absent", "refused"):
            self._say(process, answer, "")
        return _seen(process, dump)

    def _one_natively(self, process: Process) -> Seen | None:
        """None: there is no more to see than was seen."""
        if self._program is None:
            return None
        answer = py_spy.dump(self._program, process.pid, min(_DEEP_S, self.left_s), native=True)
        return None if answer.problem else _seen(process, _read(process, answer.text))

    def _ask_py_spy(self, process: Process) -> py_spy.Answer:
        if self._program is None:
            return py_spy.Answer(problem="absent", failure="py-spy is not installed")
        answer = py_spy.dump(self._program, process.pid, min(_ONE_S, self.left_s))
        if answer.problem == "unreadable" and self.left_s > _SHORTEST_S:
            # its stack has changed while it was read
            answer = py_spy.dump(self._program, process.pid, min(_ONE_S, self.left_s))
        return answer

    def _ask_itself(self, process: Process) -> tuple[Dump | None, str]:
        """Its stack as it writes it down, or None and why not."""
        signal = self._signals.get(process.rank)
        if signal is None:
            return None, "it has registered no signal to be asked with"
        if process.state:
            return None, f"it is {process.state}, so no signal was sent"
        with self._turns[process.rank]:
            if self.left_s < _SHORTEST_S:
                return None, "there was no time to ask it by a signal"
            try:
                text = fault_dumps.dump(process.pid, signal.number, signal.path, min(_SIGNAL_S, self.left_s))
            except OSError as error:
                return None, error.strerror or str(error)
        return _read(process, text), ""

    def _say(self, process: Process, answer: py_spy.Answer, why: str) -> None:
        """Why a process stayed dark, or was not seen as it could be, and what to do."""
        if answer.problem == "absent":
            line = "py-spy is missing beside the agent's Python and on its PATH: `pip install py-spy` there"
        elif answer.problem == "refused":
            line = (
                "py-spy may not read their processes: start the container with `--cap-add SYS_PTRACE` "
                "(Kubernetes: capabilities.add), or set kernel.yama.ptrace_scope=0"
            )
        else:
            line = f"{answer.failure} (pid {process.pid}, {process.kind})"
        self._dark[f"{line}; {why}" if why and process.kind == "trainer" else line].add(process.rank)


def _seen(process: Process, dump: Dump) -> Seen:
    return Seen(
        rank=process.rank,
        pid=process.pid,
        kind=process_tree.kind(process, dump.threads),
        state=process.state,
        waits_in=process.waits_in,
        dump=dump,
    )


def _ended(process: Process) -> Seen:
    return _seen(replace(process, state="ended", waits_in=""), _dark(process, "it has ended"))


def _read(process: Process, text: str) -> Dump:
    dumps = stacks.read(text)
    if not dumps or not dumps[0].threads:
        return _dark(process, "its stack could not be made out")
    return replace(dumps[0], pid=process.pid, command=process.command)


def _dark(process: Process, why: str) -> Dump:
    return Dump(pid=process.pid, command=process.command, failure=why)
