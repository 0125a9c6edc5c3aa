"""When does an agent leave without an order? Only where nobody can give it one, and nothing is lost by it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import pytest

from evertrain.agent import departure
from evertrain.agent.agent import Agent
from evertrain.model.code import CodeOrder
from evertrain.model.report import Desired
from evertrain.model.spec import AgentSpec


@dataclass
class Link:
    """To the controller."""

    away_s: float = 0.0
    dismissed: bool = False
    term: int = 1


@dataclass
class View:
    """Of the node."""

    idle_s: float
    slots_dir: Path = Path("slots")


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How the agent has left, in words."""
    said: list[str] = []

    async def alone(because: str, *_: Any) -> None:
        said.append(because)

    async def by_order(order: Desired, *_: Any) -> None:
        said.append(order.message)

    monkeypatch.setattr(departure, "alone", alone)
    monkeypatch.setattr(departure, "by_order", by_order)
    return said


async def agent(link: Link, idle_s: float, lost_s: float | None = 60.0) -> Agent:
    made = Agent(
        AgentSpec(
            job="job", run_id="job-1", node="gpu02", node_dir="", disk_dir="", log_root="", controller_url="",
            token_file="", fired_dir="", lost_s=lost_s,
        ),
        "token",
    )  # fmt: skip
    made._controller = link  # type: ignore[assignment]
    made._view = View(idle_s)  # type: ignore[assignment]
    return made


async def look(made: Agent) -> None:
    """One turn of the agent's loop, as far as it may leave."""
    made._notice_loneliness()
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("away_s", "idle_s", "leaves"),
    [
        (61.0, 61.0, True),
        (61.0, inf, True),
        (3600.0, 0.0, False),
        (3600.0, 59.0, False),
        (0.0, inf, False),
        (59.0, 3600.0, False),
    ],
)
async def test_alone_is_who_hears_nothing_and_gets_nowhere_for_too_long(
    left: list[str], away_s: float, idle_s: float, leaves: bool
) -> None:
    made = await agent(Link(away_s), idle_s)
    await look(made)
    assert left == ([f"the first node has not been reached for {away_s:.0f} s, and training stands"] if leaves else [])
    await asyncio.sleep(0)
    assert made.over.is_set() is leaves


async def test_the_first_nodes_own_agents_wait_for_the_next_controller(left: list[str]) -> None:
    await look(await agent(Link(away_s=3600.0), inf, lost_s=None))
    assert left == []


async def test_an_agent_of_a_run_that_is_over_leaves_at_once(left: list[str]) -> None:
    await look(await agent(Link(dismissed=True), 0.0))
    assert left == ["the first node has started the job anew, or goes on without this one"]


async def test_it_leaves_once(left: list[str]) -> None:
    made = await agent(Link(away_s=61.0), inf)
    for _ in range(3):
        await look(made)
    made.leave_alone("stopped")
    await asyncio.sleep(0)
    assert len(left) == 1


async def test_an_order_to_shut_down_is_obeyed_without_a_keeper_too(left: list[str]) -> None:
    made = await agent(Link(), 0.0)
    made._obey(Desired(job="job", term=1, shutdown=True, message="done"))
    made._act()
    await asyncio.wait_for(made.over.wait(), 5.0)
    assert left == ["done"]


async def test_an_order_of_a_version_is_obeyed_without_a_keeper_too() -> None:
    made = await agent(Link(), 0.0)
    made._obey(Desired(job="job", term=1, code=CodeOrder(version=2, digest="0" * 64)))
    made._act()
    async with asyncio.timeout(10.0):
        while not made._versions.problem:
            await asyncio.sleep(0.005)
    assert "--code DIR" in made._versions.problem
    made._obey(Desired(job="job", term=1))
    made._act()
    assert made._versions.problem == "" and made._versions.code is None
