"""What do the trace rings of this node hold of the last seconds? Read and sent when the controller asks.

Each order is obeyed once, in a thread, and what does not arrive in time is not missed by anybody: whoever asked knows
who has not answered. The rings of an attempt that is over are read like those of one that runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from evertrain.agent.aside import aside
from evertrain.agent.rings import Name, Rings
from evertrain.model import windows
from evertrain.model.collectives import NodeTrace
from evertrain.model.report import Desired
from evertrain.model.spec import AgentSpec
from evertrain.model.windows import Ends, NodeWindow, RingWindow, TracedGroup, WindowOrder
from evertrain.observe import pages
from evertrain.trace import flows
from evertrain.trace import groups as groups_of
from evertrain.worker import contact

if TYPE_CHECKING:
    from evertrain.trace.reading import Reader, Records

_log = logging.getLogger(__name__)

_LIMIT_S = 10.0
"""For reading and sending."""
_BRIEF = 1024
"""Records of a ring that are looked through for the newest of each communicator."""
_REMEMBERED = 64


class Windowing:
    def __init__(
        self, spec: AgentSpec, token: str, rings: Rings, page_path: Callable[[int, int], Path], zero: float
    ) -> None:
        """`zero`: what to add to our monotonic seconds for the agent's clock."""
        self._spec = spec
        self._headers = {"Authorization": f"Bearer {token}"}
        self._rings = rings
        self._page_path = page_path
        self._zero = zero
        self._obeyed: deque[int] = deque(maxlen=_REMEMBERED)
        self._tasks: set[asyncio.Task[None]] = set()

    def obey(self, order: Desired) -> None:
        for wanted in order.windows:
            if wanted.number not in self._obeyed:
                self._obeyed.append(wanted.number)
                task = asyncio.create_task(self._answer(wanted))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _answer(self, order: WindowOrder) -> None:
        url = f"{self._spec.controller_url}/v1/windows/{order.number}/{self._spec.node}"
        try:
            async with asyncio.timeout(_LIMIT_S):
                packed = await aside("window", self._packed, order)
                async with aiohttp.ClientSession(headers=self._headers) as session:
                    async with session.put(url, data=packed) as answer:
                        if answer.status >= 400:
                            said = (await answer.text())[:200]
                            _log.info("window %d is not taken (HTTP %d): %s", order.number, answer.status, said)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            _log.warning("window %d could not be sent: %s", order.number, error or type(error).__name__)
        except Exception:  # a bug of ours; the agent lives on
            _log.exception("window %d", order.number)

    def _packed(self, order: WindowOrder) -> bytes:
        return windows.pack(self.look(order) if order.now_s else self.read(order))

    def look(self, order: WindowOrder) -> NodeTrace:
        """What the records of now come to."""
        from evertrain.trace import looking
        from evertrain.trace.summary import Look

        now_ns = time.monotonic_ns()
        look = Look(now_ns, order.now_s, order.seconds, order.most)
        ranks, ends = [], list[Ends]()
        groups: dict[str, TracedGroup] = {}
        for path, name in self._rings.files():
            if name.attempt != order.attempt:
                continue
            if name.kind == "flows":
                ends += [Ends(*pair) for pair in flows.read_pairs(path, name.rank)]
            elif name.writer == "hook":
                page_path = self._page_path(name.attempt, name.rank)
                steps = [int(one * 1e9) for one in pages.step_times(page_path)]
                beside = self._rings.path(name.attempt, name.rank, "agent")
                ranks.append(looking.of_rings(name.rank, self._spec.node, path, beside, look, step_times=steps))
                groups |= {one.id: one for one in groups_of.read(Path(self._groups_path(name)))}
        return NodeTrace(
            number=order.number,
            attempt=order.attempt,
            node=self._spec.node,
            time=self._zero + now_ns / 1e9,
            ranks=tuple(ranks),
            communicators=tuple(map(looking.communicator, groups.values())),
            ends=tuple(ends),
            blind=(f"{self._spec.node}: {self._rings.blind}",) if self._rings.blind else (),
        )

    def read(self, order: WindowOrder) -> NodeWindow:
        """What is there now, as it was written down."""
        now_ns = time.monotonic_ns()
        found, groups, ends = [], dict[str, TracedGroup](), list[Ends]()
        for path, name in self._rings.files():
            if name.attempt != order.attempt or (order.writers and name.writer not in order.writers):
                continue
            if name.kind == "flows":
                ends += [Ends(*pair) for pair in flows.read_pairs(path, name.rank)]
                continue
            found.append(_cut(path, name, order, now_ns))
            if name.writer == "hook":
                groups |= {one.id: one for one in groups_of.read(Path(self._groups_path(name)))}
        return NodeWindow(
            number=order.number,
            attempt=order.attempt,
            node=self._spec.node,
            monotonic_ns=now_ns,
            zero=self._zero,
            rings=tuple(found),
            groups=tuple(groups.values()),
            ends=tuple(ends),
            blind=(self._rings.blind,) if self._rings.blind else (),
        )

    def _groups_path(self, name: Name) -> str:
        return contact.groups_path(str(self._page_path(name.attempt, name.rank)))


def _cut(path: Path, name: Name, order: WindowOrder, now_ns: int) -> RingWindow:
    from evertrain.trace.reading import Reader

    try:
        with Reader(path) as reader:
            return _window(reader, name, order, now_ns)
    except (OSError, ValueError) as error:
        return RingWindow(rank=name.rank, writer=name.writer, pid=name.pid, problem=str(error))


def _window(reader: Reader, name: Name, order: WindowOrder, now_ns: int) -> RingWindow:
    header = reader.header()
    if order.brief:
        records = _newest(reader.newest(_BRIEF)) if name.writer != "agent" else b""
    else:
        seen = reader.window(now_ns - int(order.seconds * 1e9), now_ns)
        parts = (seen.operations, seen.flows, seen.hosts, seen.communicators)
        records = b"".join(part.tobytes() for part in parts)
    return RingWindow(
        rank=name.rank,
        writer=name.writer,
        pid=name.pid,
        monotonic_ns=header.monotonic_ns,
        wall_ns=header.wall_ns,
        last=reader.head(),
        lost=reader.lost(),
        table=reader.table().tobytes(),
        records=records,
    )


def _newest(seen: Records) -> bytes:
    """The newest operation of each communicator: collectives and the rest apart."""
    newest: dict[tuple[int, int], int] = {}
    for at, key in enumerate(
        zip(seen.operations["comm"].tolist(), (seen.operations["flags"] & 1).tolist(), strict=True)
    ):
        newest[key] = at
    return seen.operations[sorted(newest.values())].tobytes()
