"""Who watches the collectives of a job? A real conductor; its agents are this test, the ranks play in virtual time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from evertrain.agent import windowing
from evertrain.agent.rings import Name
from evertrain.controller import views
from evertrain.controller.communication import COLLECT_S, of_window
from evertrain.controller.conductor import Conductor
from evertrain.model.collectives import NodeTrace, Pulse
from evertrain.model.report import Report
from evertrain.model.windows import JobWindow, NodePart, NodeWindow, RingWindow, WindowOrder, pack
from evertrain.trace.reading import Reader
from support import nccl
from support.collective_faults import asleep, link_down
from support.collectives import Fault, Job
from support.conducted import Conducted, conducted, until
from support.world import World

START = 14.0


class Watching(Conducted):
    def __init__(self, world: World, conductor: Conductor) -> None:
        super().__init__(world, conductor)
        self.job = Job({"dp": 4})
        self.silent: set[str] = set()
        self.inside = ""
        """What agents say of NCCL's plugin."""
        self.answered: list[WindowOrder] = []

    def play(self, fault: Fault, seconds: float) -> None:
        self.job = Job({"dp": 4}, fault=fault).run(seconds)

    async def watched(self) -> dict[str, tuple[int, ...]]:
        await until(lambda: any(order.watch for order in self.orders.values()), "somebody is watched")
        return {node: order.watch.ranks for node, order in self.orders.items() if order.watch is not None}

    def tell(self, pulses: list[Pulse], *, phase: str = "train") -> None:
        for node in self.world.nodes.values():
            report = self.world.report(node)
            mine = [one for one in pulses if self.node_of(one.rank) == node.name]
            pages = tuple(replace(page, phase=phase) for page in report.pages)
            report = replace(report, pulses=tuple(mine), pages=pages, nccl=self.inside)
            spec = self.world.spec
            self.conductor.hear(
                Report(job=spec.job, run_id=spec.run_id, term=1, time=self.conductor.now(), report=report)
            )

    def node_of(self, rank: int) -> str:
        return f"node-{rank // 2}"

    async def seconds(self, until_s: float, *, phase: str = "train") -> float | None:
        """Each second is told; when an episode has begun, its second is returned."""
        watched = [rank for ranks in (await self.watched()).values() for rank in ranks]
        for second, pulses in self.job.pulses(watched, until_s):
            self.tell(pulses, phase=phase)
            await asyncio.sleep(0.02)
            if self.conductor.state.communication is not None:
                return second
        return None

    async def answer(self, second: float) -> WindowOrder:
        """All agents that are not silent say what their rings come to."""

        def asked() -> WindowOrder | None:
            orders = [one for order in self.orders.values() for one in order.windows]
            return next((one for one in orders if one.now_s and one not in self.answered), None)

        await until(asked, "all ranks are looked at")
        order = asked()
        assert order is not None
        self.answered.append(order)
        looks = self.job.look(second, now_s=order.now_s, before_s=order.seconds)
        for name in self.world.nodes:
            mine = [look for look in looks if self.node_of(look.ranks[0].rank) == name]
            if name in self.silent:
                continue
            ranks = tuple(replace(look.ranks[0], node=name) for look in mine)
            trace = NodeTrace(
                number=order.number, attempt=1, node=name, time=time.time(), ranks=ranks,
                communicators=self.job.communicators(),
            )  # fmt: skip
            assert self.conductor.windows.take(order.number, name, pack(trace)) is None
        return order

    async def answer_inside(self, folder: Path) -> WindowOrder:
        """... and send what the plugin of each rank has written in the last seconds before it ended."""

        def asked() -> WindowOrder | None:
            return next((one for order in self.orders.values() for one in order.windows if one.writers), None)

        await until(asked, "NCCL's records are wanted")
        order = asked()
        assert order is not None
        rings: dict[str, list[RingWindow]] = {}
        for file in nccl.files(folder):
            with Reader(file) as reader:
                name = Name(1, reader.header().rank, "nccl", reader.header().pid, "ring")
                newest = reader.newest(64)
                at_ns = max(int(one["t"].max()) for one in (newest.operations, newest.flows, newest.hosts) if len(one))
            rings.setdefault(self.node_of(name.rank), []).append(windowing._cut(file, name, order, at_ns))
        for node, found in rings.items():
            window = NodeWindow(
                number=order.number, attempt=1, node=node, monotonic_ns=at_ns, zero=0.0, rings=tuple(found)
            )
            assert self.conductor.windows.take(order.number, node, pack(window)) is None
        return order


@pytest.fixture
async def watching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watching]:
    async with conducted(tmp_path, monkeypatch) as parts:
        yield Watching(*parts)


async def test_one_rank_of_a_group_is_watched_and_a_fault_of_another_is_found(watching: Watching) -> None:
    assert await watching.watched() == {"node-0": (0,)}
    watching.play(asleep(2), START + 8.0)
    second = await watching.seconds(START + 8.0)
    assert second is not None and START < second <= START + 4.0
    await watching.answer(second)
    await until(lambda: views.incidents(watching.conductor.state), "an incident")
    (incident,) = views.incidents(watching.conductor.state)
    assert (incident["cause"], incident["ranks"]) == ("communication stuck (outside)", [2])
    assert incident["action"] == "tolerate" and incident["open"]
    found = watching.conductor.state.communication
    assert found is not None and found.found is not None and found.found.seconds < 5.0
    assert found.found.cause.time == pytest.approx(time.time() - (second - START), abs=10.0)


async def test_a_node_that_cannot_answer_is_not_waited_for(watching: Watching) -> None:
    """The one whose link is down cannot be asked, and is named by the connections of the others."""
    watching.play(link_down(3), START + 8.0)
    watching.silent = {"node-1"}
    second = await watching.seconds(START + 8.0)
    assert second is not None
    began = time.monotonic()
    await watching.answer(second)
    await until(lambda: views.incidents(watching.conductor.state), "an incident")
    assert time.monotonic() - began < COLLECT_S + 3.0
    (incident,) = views.incidents(watching.conductor.state)
    assert incident["ranks"] == [3] and incident["component"] == "network", incident


@pytest.mark.skipif(bool(nccl.MISSING), reason=nccl.MISSING)
async def test_what_nccl_shows_from_inside_is_nearer_to_the_cause(
    watching: Watching, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """From outside one connection is odd; inside the accelerator of a rank at its end has made nothing ready."""
    nccl.play_world(nccl.shared(tmp_path_factory), tmp_path, "gpu_power", culprit=2)
    watching.inside = "plugin v6"
    watching.play(link_down(3), START + 8.0)
    second = await watching.seconds(START + 8.0)
    assert second is not None
    order, _ = await asyncio.gather(watching.answer_inside(tmp_path), watching.answer(second))
    assert order.writers == ("nccl",) and 0.5 <= order.seconds <= 5.0
    await until(lambda: views.incidents(watching.conductor.state), "an incident")
    (incident,) = views.incidents(watching.conductor.state)
    assert (incident["ranks"], incident["component"]) == ([2], "compute"), incident


async def test_a_healthy_job_is_not_looked_at(watching: Watching) -> None:
    watching.play(Fault(), 30.0)
    assert await watching.seconds(30.0) is None
    assert not any(order.windows for order in watching.orders.values())
    assert len(watching.conductor.communication.watched) == 1


async def test_what_is_declared_is_waited_for(watching: Watching) -> None:
    watching.play(asleep(2), START + 8.0)
    assert await watching.seconds(START + 8.0, phase="evaluate") is None


async def test_it_is_over_when_it_is_over(watching: Watching) -> None:
    fault = Fault(start=START, stop=START + 3.0, ranks=(2,), own=lambda _now, usual, _tag: usual + 3.0)
    watching.play(fault, 40.0)
    second = await watching.seconds(40.0)
    assert second is not None
    await watching.answer(second)
    await until(lambda: views.incidents(watching.conductor.state), "an incident")
    watched = list(watching.conductor.communication.watched)
    later = [pulses for at, pulses in watching.job.pulses(watched, 40.0) if at > second]
    for pulses in later:
        watching.tell(pulses)
        await asyncio.sleep(0.0)
    deadline = time.monotonic() + 20.0
    while watching.conductor.state.communication is not None:
        assert time.monotonic() < deadline
        watching.tell(later[-1])  # time goes on
        await asyncio.sleep(0.1)
    await until(lambda: not views.incidents(watching.conductor.state)[0]["open"], "it is closed")
    assert len(views.incidents(watching.conductor.state)) == 1


def test_connections_between_nodes_are_put_together_and_times_are_ours() -> None:
    job = Job({"dp": 4}, fault=link_down(3), skew_s=2.0).run(START + 3.0)
    looks = job.look(START + 2.5, now_s=3.0)
    parts = []
    for look in looks:
        offset_s = -job.offsets[look.ranks[0].rank]
        parts.append(NodePart(node=look.node, offset_s=offset_s, bound_s=0.05, packed=pack(look)))
    parts.append(NodePart(node="node-9", packed=b"broken"))
    window = JobWindow(job="job", number=1, attempt=1, seconds=12.0, time=0.0, parts=tuple(parts), missing=())
    found = of_window(window, None, {rank: f"node-{rank}" for rank in range(4)})
    assert (found.ranks, found.symptom) == ((3,), "stuck")
    assert found.time == pytest.approx(START, abs=0.5) and found.bound_s == 0.05
    assert "node-9" in found.blind[-1]
