"""What have the agents seen of their processes? Collected by number, put together, judged, and kept.

    asked ──▶ open ──all nodes have sent, or 6 s──▶ merged and judged in a thread ──▶ `HangLocated`, and a file

What is missing by then is named in the capture. The owner of the deadline is the conductor, which looks in here at
every turn. A controller that takes over knows nothing of what was being collected: the rules ask again
(`decide.captures`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from evertrain.agent.aside import aside
from evertrain.controller import capture_files, dump_files
from evertrain.controller.capture_files import Kept
from evertrain.decide import captures, spinning
from evertrain.decide.picture import Picture
from evertrain.decide.progress import steps
from evertrain.decide.state import JobState
from evertrain.detect.hang import is_idle
from evertrain.locate import culprit, grouping, votes
from evertrain.locate.grouping import Merged
from evertrain.model.capture_records import CaptureAsked, HangLocated
from evertrain.model.config import HangConfig
from evertrain.model.spec import ControllerSpec
from evertrain.model.stacks import Located, NodeCapture, RecorderDumps

_log = logging.getLogger(__name__)

MOST_BYTES = 8 << 20
"""Of one node; a node with eight ranks sends some ten thousand."""
MOST_BYTES_ALL = 256 << 20
MOST_DUMP_BYTES = 64 << 20
"""Flight recorders of one node."""
_IN_MEMORY = captures.ROUNDS + 1
_BESIDE_S = 60.0
"""A capture of a job that is not suspected to hang is compared with one that is no older."""


class Refusal(NamedTuple):
    """Why what a node sends is of no use."""

    status: int
    line: str


class _Head(msgspec.Struct):
    """As much of a `NodeCapture` as says what it belongs to; the rest is read in the thread that judges."""

    number: int
    attempt: int
    node: str


class _Open:
    """One that is being collected."""

    def __init__(self, asked: CaptureAsked, expected: Mapping[int, str], step: int | None, before: int | None) -> None:
        self.asked, self.expected, self.step, self.before = asked, expected, step, before
        self.nodes = frozenset(expected.values())
        self.sent: dict[str, bytes] = {}
        self.deadline = time.monotonic() + captures.collect_s(asked)


class Captures:
    """Those of one job."""

    def __init__(self, spec: ControllerSpec, note: Callable[[HangLocated], None], wake: Callable[[], None]) -> None:
        self._spec, self._note, self._wake = spec, note, wake
        self._run_dir = Path(spec.run_dir)
        self._open: dict[int, _Open] = {}
        self._judging: dict[int, asyncio.Task[None]] = {}
        self._over: set[int] = set()
        self._done: dict[int, Kept] = {}
        """The newest of them; the others lie in files."""

    # -- collecting ----------------------------------------------------------------------------------------------------

    def look(self, state: JobState, picture: Picture) -> None:
        """Begin to collect what has been asked for, and end what is whole or late."""
        if state.captures:
            self._begin(state, picture)
        for number, one in list(self._open.items()):
            waits = [node for node in one.nodes - one.sent.keys() if picture.connected(node)]
            if not waits or time.monotonic() >= one.deadline:
                del self._open[number]
                self._over.add(number)
                self._judging[number] = asyncio.create_task(self._judge(one))

    def _begin(self, state: JobState, picture: Picture) -> None:
        asked, attempt = state.captures[-1].asked, state.active
        number = asked.capture
        if number in self._open or number in self._over or attempt is None or attempt.number != asked.attempt:
            return
        if asked.time < state.term_time:
            return  # what agents had to send, they have sent to the one before us
        expected = {rank: attempt.started.placement[rank] for rank in attempt.alive()}
        step, relative = steps(attempt, picture)
        since = state.suspicion.time if state.suspicion is not None else asked.time - _BESIDE_S
        before = [
            one.asked.capture
            for one in state.captures[:-1]
            if one.asked.attempt == asked.attempt and one.asked.time >= since
        ]
        before_it = before[-1] if before else None
        self._open[number] = _Open(asked, expected, step if step is not None else relative or None, before_it)
        asyncio.get_running_loop().call_later(captures.collect_s(asked), self._wake)

    def is_over(self, number: int) -> bool:
        """Whether nothing is collected for it any more, as far as this controller has asked for it."""
        return number in self._over

    def waits_for(self, number: int) -> tuple[str, ...] | None:
        """Nodes that have not sent it yet; None: it is over, or unknown."""
        if (one := self._open.get(number)) is not None:
            return tuple(sorted(one.nodes - one.sent.keys()))
        return () if number in self._judging else None

    def refusal(self, number: int, node: str) -> Refusal | None:
        """Why nothing is taken from this node for this number, whatever it is."""
        one = self._open.get(number)
        if one is None and number in self._over:
            return Refusal(410, f"capture {number} is over")
        if one is None:
            return Refusal(404, f"no capture {number} has been asked for")
        if node not in one.nodes:
            return Refusal(403, f"{node} has no ranks of attempt {one.asked.attempt}")
        return None

    def take(self, number: int, node: str, body: bytes) -> Refusal | None:
        """Take what a node has seen, or say why not. The same again changes nothing."""
        if (refusal := self.refusal(number, node)) is not None:
            return refusal
        one = self._open[number]
        try:
            head = msgspec.msgpack.decode(body, type=_Head)
        except msgspec.MsgspecError as error:
            return Refusal(400, f"what {node} sent is no capture: {error}")
        if (head.number, head.attempt, head.node) != (number, one.asked.attempt, node):
            sent = f"capture {head.number} of attempt {head.attempt} on {head.node}"
            return Refusal(409, f"{sent} was sent as capture {number} of attempt {one.asked.attempt} on {node}")
        if len(body) > MOST_BYTES or sum(map(len, one.sent.values())) + len(body) > MOST_BYTES_ALL:
            return Refusal(413, f"what {node} sent is larger than a capture may be")
        one.sent[node] = body
        self._wake()
        return None

    async def take_dumps(self, number: int, node: str, body: bytes) -> Refusal | None:
        """Keep what the flight recorders of a node held when it was looked at. It may come after the verdict."""
        one = self._open.get(number)
        if one is None and number not in self._over:
            return Refusal(404, f"no capture {number} has been asked for")
        try:
            said = msgspec.msgpack.decode(body, type=RecorderDumps)
        except msgspec.MsgspecError as error:
            return Refusal(400, f"what {node} sent are no recorders' dumps: {error}")
        if said.node != node:
            return Refusal(409, f"the dumps of {said.node} were sent as those of {node}")
        try:
            await aside("captures", dump_files.write, self._run_dir, number, node, body)
        except OSError as error:
            _log.error("recorders' dumps of %s are not kept: %s", node, error.strerror or error)
            return Refusal(507, f"there is no room for them: {error.strerror or error}")
        return None

    async def dumped(self, number: int) -> list[str]:
        """Nodes whose recorders' dumps of this capture are there."""
        return await aside("captures", dump_files.nodes, self._run_dir, number)

    async def dumps(self, number: int, node: str) -> bytes:
        """As the node sent them. Raises OSError."""
        return await aside("captures", dump_files.read, self._run_dir, number, node)

    # -- judging -------------------------------------------------------------------------------------------------------

    async def _judge(self, one: _Open) -> None:
        number = one.asked.capture
        try:
            kept, standing = await aside("captures", judge, self._spec, one, list(self._done.values()))
            self._done[number] = kept
            for old in sorted(self._done)[:-_IN_MEMORY]:
                del self._done[old]
            if one.asked.reason == "hang" or one.asked.round == captures.ROUNDS:
                self._note(
                    HangLocated(
                        time=0.0,  # the conductor knows
                        attempt=one.asked.attempt,
                        capture=number,
                        located=kept.located,
                        standing=standing,
                    )
                )
        finally:
            del self._judging[number]
            self._wake()
        try:
            await aside("captures", capture_files.write, self._run_dir, kept)
        except OSError as error:
            _log.error("capture %d is not kept: %s", number, error.strerror or error)

    async def kept(self, number: int) -> Kept | None:
        """One that is over. Raises ValueError where its file cannot be read."""
        known = self._done.get(number)
        return known if known is not None else await aside("captures", capture_files.read, self._run_dir, number)

    async def numbers(self) -> list[int]:
        """Those that can be seen, oldest first."""
        on_disk = await aside("captures", capture_files.numbers, self._run_dir)
        return list(dict.fromkeys((*on_disk, *sorted(self._done))))


def judge(spec: ControllerSpec, one: _Open, known: Sequence[Kept]) -> tuple[Kept, tuple[int, ...]]:
    """Put together what was sent, and say what it shows; whatever is wrong with it must not harm the job."""
    asked, config, mesh = one.asked, spec.config.hang, _mesh(spec.mesh)
    merged = Merged(number=asked.capture, attempt=asked.attempt, time=asked.time, nodes=dict(one.expected))
    standing: tuple[int, ...] = ()
    try:
        merged = _merged(one)
        if not asked.series:
            before = _earlier(spec, one.before, known)
            located = culprit.locate(merged, before, mesh=mesh, idle=_idle(merged, config))
            standing = spinning.standing(merged, before, config)
        elif asked.round == captures.ROUNDS:
            located = votes.vote([*_rounds(spec, asked, known), merged], mesh=mesh)
        else:
            located = Located(kind="unknown", captures=(merged.number,))
    except Exception as error:  # a bug of ours: it costs the verdict
        _log.exception("capture %d", asked.capture)
        line = f"capture {asked.capture} could not be judged ({type(error).__name__}); see the controller's log"
        located = Located(kind="unknown", evidence=(line,), captures=(asked.capture,))
    kept = Kept(job=spec.job, asked=asked, step=one.step, mesh=spec.mesh or "", merged=merged, located=located)
    return kept, standing


def _merged(one: _Open) -> Merged:
    sent: list[NodeCapture] = []
    unreadable: list[str] = []
    for node, body in sorted(one.sent.items()):
        try:
            sent.append(msgspec.msgpack.decode(body, type=NodeCapture))
        except msgspec.MsgspecError as error:
            unreadable.append(f"{node}: what it sent cannot be read: {error}")
    merged = grouping.merge(sent, one.expected)
    # of nobody's capture the number is not known
    return replace(
        merged,
        number=one.asked.capture,
        attempt=one.asked.attempt,
        time=merged.time or one.asked.time,
        blind=(*merged.blind, *unreadable),
    )


def _idle(merged: Merged, config: HangConfig) -> frozenset[int]:
    return frozenset(rank for rank, seen in merged.activities.items() if is_idle(seen, config))


def _earlier(spec: ControllerSpec, number: int | None, known: Sequence[Kept]) -> Merged | None:
    found = _found(spec, number, known) if number is not None else None
    return found.merged if found is not None else None


def _rounds(spec: ControllerSpec, last: CaptureAsked, known: Sequence[Kept]) -> list[Merged]:
    """The rounds of a series before its last one."""
    rounds: dict[int, Merged] = {}
    for number in range(last.series, last.capture):
        kept = _found(spec, number, known)
        if kept is not None and kept.asked.series == last.series and kept.asked.round < last.round:
            rounds[kept.asked.round] = kept.merged
    return [rounds[number] for number in sorted(rounds)]


def _found(spec: ControllerSpec, number: int, known: Sequence[Kept]) -> Kept | None:
    """A capture from before; the controller before us may have collected it."""
    if (kept := next((one for one in known if one.asked.capture == number), None)) is not None:
        return kept
    try:
        return capture_files.read(Path(spec.run_dir), number)
    except ValueError as error:
        _log.warning("%s", error)
        return None


def _mesh(text: str | None) -> dict[str, int] | None:
    """`pp=2,dp=2` as the command line has checked it."""
    if not text:
        return None
    return {name: int(size) for name, _, size in (part.partition("=") for part in text.split(","))}
