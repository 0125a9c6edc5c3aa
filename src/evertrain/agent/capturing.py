"""What does the controller learn of this node's ranks while they hang? Their stacks, activities, groups and recorders.

Asked by number (`Desired.capture`), each looked for once and sent on its own way, because it is large. The looking is
done in a thread that nobody waits for beyond the limit: what it looks at hangs. Nothing that goes wrong here is more
than a line about what could not be seen.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from evertrain.agent.aside import aside
from evertrain.agent.node import NodeView
from evertrain.locate import recorder
from evertrain.locate.grouping import group, slim
from evertrain.locate.words import named
from evertrain.model.recording import Group, Recording
from evertrain.model.report import Desired
from evertrain.model.spec import AgentSpec
from evertrain.model.stacks import CaptureOrder, NodeCapture, RecorderDumps, Seen
from evertrain.observe import activity, pages, recorder_dumps, stack_capture
from evertrain.observe.groups import read_groups
from evertrain.observe.stack_capture import Signal
from evertrain.worker import contact

_log = logging.getLogger(__name__)

_LIMIT_S = 5.0
"""For the looking; a little more than it allows itself."""
_RECORDER_S = 1.0
_SEND_S, _ONE_SEND_S = 8.0, 3.0
_FIRST_RETRY_S = 0.1
_LEVEL = 1
"""Two thousand operations are much alike: more takes longer and saves little."""

State = dict[str, Any]


class Capturing:
    """Obeys the newest order."""

    def __init__(
        self,
        spec: AgentSpec,
        token: str,
        view: NodeView,
        keeper: Callable[[], State | None],
        zero: float,
        wake: Callable[[], None],
    ) -> None:
        """`zero`: what to add to our monotonic seconds for the agent's clock."""
        self._spec = spec
        self._headers = {"Authorization": f"Bearer {token}"}
        self._view = view
        self._keeper = keeper
        self._zero = zero
        self._wake = wake
        self._newest: CaptureOrder | None = None
        self._world_size = 0
        self._task: asyncio.Task[None] | None = None
        self.captured = 0
        """Number of the newest capture that is over here."""

    def obey(self, order: Desired) -> None:
        """Look, if that is asked. An order that was obeyed changes nothing."""
        wanted = order.capture
        if wanted is None or wanted.number <= self.captured:
            return
        self._newest = wanted
        for attempt in order.attempts:
            if attempt.attempt == wanted.attempt and attempt.go is not None:
                self._world_size = attempt.go.world_size
        if self._task is None:
            self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while (order := self._newest) is not None and order.number > self.captured:
            try:
                capture, dumps = await self._capture(order)
                await self._send(order, "", capture)
                if order.dumps:
                    await self._send(order, "/recorders", await aside("capture", _compressed, self._spec.node, dumps))
            except Exception:  # a bug of ours; the agent lives on
                _log.exception("capture %d", order.number)
            self.captured = order.number
            self._wake()
        self._task = None

    # --- looking

    async def _capture(self, order: CaptureOrder) -> tuple[NodeCapture, dict[int, bytes]]:
        """What was seen, and the recorders' dumps by rank."""
        began = time.monotonic()
        pids, blind = self._pids(order.attempt)
        paths = {rank: str(self._view.page_path(order.attempt, rank)) for rank in pids}
        looking = _Looking(order, pids, paths, self._world_size)
        try:
            await asyncio.wait_for(aside("capture", looking.run), _LIMIT_S)
        except TimeoutError:
            blind.append(f"{named(pids)}: the look has not come to its end; look at this machine's file systems")
        except Exception as error:
            _log.exception("capture %d", order.number)
            blind.append(f"{named(pids)}: the look failed: {type(error).__name__}: {error}; see the agent's log")
        self._view.leave_out(order.attempt, looking.measured, looking.measured_after)
        capture = NodeCapture(
            number=order.number,
            attempt=order.attempt,
            node=self._spec.node,
            time=self._zero + began,
            positions=group(looking.seen),
            activities=self._view.everyone(order.attempt, looking.measured),
            groups=tuple(looking.groups),
            recordings=tuple(looking.recordings.values()),
            blind=tuple(f"{self._spec.node}: {line}" for line in (*blind, *looking.blind)),
        )
        return capture, dict(looking.dumps)

    def _pids(self, attempt: int) -> tuple[dict[int, int], list[str]]:
        """The processes of the attempt's ranks here, by rank, as the keeper knows them."""
        state = self._keeper()
        if state is None:
            return {}, ["the agent cannot reach its keeper"]
        ranks = state["attempts"].get(str(attempt), {"ranks": {}})["ranks"]
        found = {
            int(rank): process["pid"] for rank, process in ranks.items() if process["state"] in ("running", "stuck")
        }
        return found, [] if found else [f"no rank of attempt {attempt} runs here"]

    # --- sending

    async def _send(self, order: CaptureOrder, what: str, content: NodeCapture | RecorderDumps) -> None:
        body = msgspec.msgpack.encode(content)
        url = f"{self._spec.controller_url}/v1/captures/{order.number}/{self._spec.node}{what}"
        deadline = time.monotonic() + _SEND_S
        retry_s = _FIRST_RETRY_S
        async with aiohttp.ClientSession(
            headers=self._headers, timeout=aiohttp.ClientTimeout(total=_ONE_SEND_S)
        ) as session:
            while True:
                try:
                    async with session.put(url, data=body) as answer:
                        if answer.status < 500:
                            if answer.status >= 400:
                                said = (await answer.text())[:200]
                                _log.warning("capture %d is not taken (HTTP %d): %s", order.number, answer.status, said)
                            return
                        because = f"HTTP {answer.status}"
                except (TimeoutError, aiohttp.ClientError, OSError) as error:
                    because = str(error) or type(error).__name__
                newest = self._newest
                if time.monotonic() > deadline or (newest is not None and newest.number > order.number):
                    _log.warning("capture %d could not be sent: %s", order.number, because)
                    return
                await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
                retry_s *= 2


class _Looking:
    """What is found lies here also when the thread hangs in the middle."""

    def __init__(self, order: CaptureOrder, pids: Mapping[int, int], paths: Mapping[int, str], world_size: int) -> None:
        """`paths`: of the pages, by rank."""
        self._order = order
        self._pids = pids
        self._paths = paths
        self._world_size = world_size
        self.measured: dict[int, tuple[float, activity.Usage]] = {}
        """By rank, what its processes have used until when: before the look,"""
        self.measured_after: dict[int, tuple[float, activity.Usage]] = {}
        """... and after it."""
        self.seen: list[Seen] = []
        self.groups: list[Group] = []
        self.recordings: dict[int, Recording] = {}
        self.dumps: dict[int, bytes] = {}
        """The recordings as they came, where they are wanted."""
        self.blind: list[str] = []

    def run(self) -> None:
        self._measure(self.measured)
        recorders = self._begin_recorders() if self._order.recorder else []
        self._read_groups()
        self.seen, blind = stack_capture.look(self._pids, self._order, self._signals())
        self.blind += blind
        for thread in recorders:
            thread.join(_RECORDER_S)
        self._measure(self.measured_after)

    def _measure(self, into: dict[int, tuple[float, activity.Usage]]) -> None:
        for rank, pid in self._pids.items():
            if (usage := activity.usage(pid)) is not None:
                into[rank] = (time.monotonic(), usage)

    def _signals(self) -> dict[int, Signal]:
        found = {}
        for rank, path in self._paths.items():
            page, _ = pages.read(path)
            if page is not None and page.dump_signal and page.pid == self._pids[rank]:
                found[rank] = Signal(page.dump_signal, Path(contact.stacks_path(path)))
        return found

    def _read_groups(self) -> None:
        found: dict[str, Group] = {}
        for rank, path in self._paths.items():
            groups, why = read_groups(Path(contact.groups_path(path)))
            found |= groups
            self.blind += [f"rank {rank}: {line}" for line in why]
        world_size = self._world_size or max((len(one.members) for one in found.values()), default=0)
        self.groups = list(slim(found.values(), self._pids, world_size))

    def _begin_recorders(self) -> list[threading.Thread]:
        """Beside the stacks: a rank's server answers while others are looked at."""
        threads = []
        for rank, path in self._paths.items():
            socket = Path(contact.socket_path(path))
            if socket.exists():
                threads.append(threading.Thread(target=self._fetch, args=(rank, socket), name="recorder", daemon=True))
                threads[-1].start()
        return threads

    def _fetch(self, rank: int, socket: Path) -> None:
        try:
            raw = recorder_dumps.fetch_raw(socket, _RECORDER_S)
            found = recorder.read(raw, rank, time.time())
        except (OSError, ValueError) as error:
            self.blind.append(f"rank {rank}: no flight recorder: {' '.join(str(error).split())[:200]}")
        else:
            self.recordings |= found.ranks
            if self._order.dumps:  # one that is none would spoil the export of all
                self.dumps[rank] = raw


def _compressed(node: str, dumps: Mapping[int, bytes]) -> RecorderDumps:
    return RecorderDumps(node=node, dumps={rank: gzip.compress(raw, _LEVEL) for rank, raw in dumps.items()})
