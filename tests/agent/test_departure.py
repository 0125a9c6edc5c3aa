"""A node leaves: what memory holds is on disk, ranks are told before they are killed, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from evertrain.agent import departure
from evertrain.checkpoint import disk
from evertrain.model.report import Desired
from evertrain.model.spec import AgentSpec
from support.slots import slot

TERM = 3


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departure, "_KILLED_S", 0.1)
    monkeypatch.setattr(departure, "_SHUTDOWN_S", 0.1)


class Keeper:
    """Stands in for the link to a keeper whose ranks run in attempt 4, and whose next attempt waits."""

    def __init__(self, *, dies_of: tuple[int, ...] = (15, 9), leaves: bool = True) -> None:
        self.state: dict[str, Any] | None = {"attempts": {"3": {"phase": "ended"}, "4": {"phase": "running"}}}
        self.sent: list[dict[str, Any]] = []
        self._dies_of = dies_of
        self._leaves = leaves

    def send(self, command: dict[str, Any]) -> None:
        self.sent.append(command)
        if command.get("term", TERM) < TERM or self.state is None:
            return  # as the keeper refuses the orders of an earlier term
        if command["do"] == "shutdown" and self._leaves:
            self.state = None
        elif command["do"] == "end" and command["signal"] in self._dies_of:
            self.end(str(command["attempt"]))

    def end(self, attempt: str) -> None:
        assert self.state is not None
        self.state["attempts"][attempt]["phase"] = "ended"

    def signals(self) -> list[tuple[int, int]]:
        return [(command["attempt"], command["signal"]) for command in self.sent if command["do"] == "end"]

    @property
    def has_left(self) -> bool:
        return self.state is None


class Node:
    """The folders of one node, and what is found there after it has left."""

    def __init__(self, folder: Path) -> None:
        self.memory = folder / "slots"
        self.disk = folder / "disk"
        self.result_file = folder / "result.json"

    def spec(self, **different: Any) -> AgentSpec:
        usual: dict[str, Any] = {
            "job": "job", "run_id": "job-1", "node": "gpu02", "node_dir": str(self.memory.parent),
            "disk_dir": str(self.disk), "log_root": "", "controller_url": "", "token_file": "", "fired_dir": "",
            "result_file": str(self.result_file), "grace_s": 0.5,
        }  # fmt: skip
        return AgentSpec(**{**usual, **different})

    def leave(self, keeper: Keeper, **order: Any) -> None:
        """By order of the controller."""
        wanted = Desired(job="job", term=TERM, shutdown=True, **order)
        asyncio.run(departure.by_order(wanted, self.spec(), keeper, self.memory))  # type: ignore[arg-type]

    def leave_alone(self, keeper: Keeper, **spec: Any) -> None:
        asyncio.run(departure.alone("nobody answers", self.spec(**spec), keeper, self.memory))  # type: ignore[arg-type]

    @property
    def steps(self) -> list[int]:
        return sorted({copy.step for copy in disk.list(self.disk)})

    @property
    def result(self) -> tuple[str, int, str]:
        found = json.loads(self.result_file.read_bytes())
        assert found.keys() == {"state", "exit_code", "message"}
        return found["state"], found["exit_code"], found["message"]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


# --- the controller has ended the job


def test_how_the_job_ended_is_written_for_the_run_of_this_node(node: Node) -> None:
    keeper = Keeper()
    node.leave(keeper, outcome="stopped", exit_code=143, message="stopped by SIGTERM on gpu01")
    assert node.result == ("stopped", 143, "stopped by SIGTERM on gpu01")
    assert keeper.has_left
    assert keeper.sent == [{"do": "shutdown", "term": TERM}]


def test_the_first_nodes_result_is_the_controllers(node: Node) -> None:
    order = Desired(job="job", term=TERM, shutdown=True, outcome="done")
    keeper = Keeper()
    asyncio.run(departure.by_order(order, node.spec(result_file=""), keeper, node.memory))  # type: ignore[arg-type]
    assert keeper.has_left and not node.result_file.exists()


def test_a_common_step_that_went_to_disk_is_enough(node: Node) -> None:
    slot(node.memory, 0, 6)
    node.leave(Keeper(), outcome="stopped")
    assert node.steps == []


def test_without_a_common_step_everything_is_kept(node: Node) -> None:
    for step in (5, 6):
        slot(node.memory, 0, step)
    node.leave(Keeper(), outcome="failed", exit_code=1, message="gpu01: no word", keep_all=True)
    assert node.steps == [5, 6]
    assert node.result == ("failed", 1, "gpu01: no word")


def test_the_checkpoints_of_a_job_that_is_done_go(node: Node) -> None:
    disk.flush([slot(node.memory, 0, 6)], node.disk)
    node.leave(Keeper(), outcome="done", discard_checkpoints=True)
    assert not node.disk.exists()


def test_what_could_not_be_kept_is_said_and_keeps_nobody(node: Node) -> None:
    slot(node.memory, 0, 6)
    node.disk.write_text("in the way")
    keeper = Keeper()
    node.leave(keeper, outcome="failed", exit_code=1, message="gpu01: no word", keep_all=True)
    assert keeper.has_left
    assert node.result[2].startswith("gpu01: no word; ") and str(node.disk) in node.result[2]


def test_a_result_that_cannot_be_written_keeps_nobody(node: Node) -> None:
    node.result_file.mkdir()
    keeper = Keeper()
    node.leave(keeper, outcome="done")
    assert keeper.has_left


def test_a_keeper_that_does_not_leave_is_not_waited_for_without_limit(node: Node) -> None:
    keeper = Keeper(leaves=False)
    began = time.monotonic()
    node.leave(keeper, outcome="done")
    assert 0.1 <= time.monotonic() - began < 5.0
    assert len(keeper.sent) > 1, "asked again: a command may be lost"
    assert node.result[0] == "done"


# --- nobody is there to give orders


def test_ranks_are_told_once_and_what_they_saved_is_kept(node: Node) -> None:
    for step in (5, 6):
        slot(node.memory, 0, step)
    keeper = Keeper()
    node.leave_alone(keeper)
    assert keeper.signals() == [(4, 15)]
    assert node.steps == [5, 6]
    assert node.result == ("failed", 1, "nobody answers; steps 5, 6 of this node are on disk")
    assert keeper.has_left


def test_what_a_rank_saves_on_its_way_out_is_kept_too(node: Node) -> None:
    slot(node.memory, 0, 5)

    class Saving(Keeper):
        def end(self, attempt: str) -> None:
            slot(node.memory, 0, 6)
            super().end(attempt)

    node.leave_alone(Saving())
    assert node.steps == [5, 6]


def test_a_rank_that_does_not_heed_sigterm_is_killed_before_its_steps_are_read(node: Node) -> None:
    slot(node.memory, 0, 5)
    keeper = Keeper(dies_of=(9,))
    node.leave_alone(keeper)
    assert keeper.signals() == [(4, 15), (4, 9)]
    assert node.steps == [5] and keeper.has_left


def test_a_rank_that_cannot_be_killed_costs_the_time_to_find_out(node: Node) -> None:
    slot(node.memory, 0, 5)
    keeper = Keeper(dies_of=())
    began = time.monotonic()
    node.leave_alone(keeper)
    assert 0.4 <= time.monotonic() - began < 5.0
    assert keeper.signals() == [(4, 15), (4, 9)]
    assert node.steps == [5] and keeper.has_left


def test_an_agent_that_knows_no_term_any_more_is_obeyed(node: Node) -> None:
    # one that was started again while it was cut off has never heard from a controller
    keeper = Keeper()
    node.leave_alone(keeper)
    assert all("term" not in command for command in keeper.sent)
    assert keeper.has_left


def test_ranks_die_with_their_keeper(node: Node) -> None:
    slot(node.memory, 0, 5)
    keeper = Keeper()
    keeper.state = None
    node.leave_alone(keeper)
    assert keeper.sent == [] and node.steps == [5]


def test_a_node_that_held_nothing_says_so(node: Node) -> None:
    node.leave_alone(Keeper())
    assert node.result == ("failed", 1, "nobody answers; nothing was in memory to keep")


def test_steps_that_could_not_be_kept_are_not_said_to_be_on_disk(node: Node) -> None:
    slot(node.memory, 0, 5)
    node.disk.write_text("in the way")
    keeper = Keeper()
    node.leave_alone(keeper)
    state, code, message = node.result
    assert (state, code) == ("failed", 1) and keeper.has_left
    assert "are on disk" not in message and "nothing was in memory" not in message
    assert str(node.disk) in message
