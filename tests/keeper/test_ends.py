"""Who outlives whom: whatever ends, nothing is left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from evertrain.keeper.keeper import end_time
from keeper.node import Node
from support import processes
from support.waiting import eventually

StartNode = Callable[..., Node]

SLEEPER = "import time; print('here', flush=True); time.sleep(600)"


def family(node: Node) -> list[processes.ProcessId]:
    """Every process below the keeper, by parenthood; ranks have sessions of their own."""
    import psutil

    below = psutil.Process(node.process.pid).children(recursive=True)
    return [found for process in below if (found := processes.identify(process.pid))]


def running(start_node: StartNode, **options: object) -> tuple[Node, list[processes.ProcessId]]:
    """Attempt 1 running with two ranks and its store, attempt 2 prepared."""
    node = start_node(SLEEPER, nproc=2, **options)
    node.prepare(1, store=True)
    node.go(1)
    node.prepare(2, store=True)
    eventually(lambda: "here" in node.output(1, 0) and "here" in node.output(1, 1), "both ranks run")
    below = family(node)
    assert len(below) >= 6
    return node, below


def assert_nothing_is_left(node: Node, below: list[processes.ProcessId], within_s: float = 8.0) -> None:
    eventually(lambda: not any(processes.is_alive(process) for process in below), "all are gone", within_s=within_s)
    assert not node.node_dir.exists()


@pytest.mark.parametrize("start", ["spawn", "zygote"])
def test_shutdown_leaves_nothing(start_node: StartNode, start: str) -> None:
    node, below = running(start_node, start=start)
    node.send(do="shutdown", term=1)
    assert node.process.wait(10) == 0
    assert_nothing_is_left(node, below)


def test_sigterm_to_the_keeper_is_shutdown(start_node: StartNode) -> None:
    node, below = running(start_node)
    node.process.terminate()
    assert node.process.wait(10) == 0
    assert_nothing_is_left(node, below)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_signals_of_a_terminal_are_not_for_the_keeper(start_node: StartNode, number: int) -> None:
    node = start_node(SLEEPER)
    node.process.send_signal(number)
    node.prepare(1)
    assert os.getsid(node.process.pid) == node.process.pid


@pytest.mark.parametrize("start", ["spawn", "zygote"])
def test_ranks_die_with_their_keeper(start_node: StartNode, start: str) -> None:
    node, below = running(start_node, start=start)
    node.kill_keeper()
    eventually(lambda: not any(processes.is_alive(process) for process in below), "all are gone", within_s=8)


def test_the_owners_death_is_told_and_ends_a_keeper_without_agent(start_node: StartNode) -> None:
    node, below = running(start_node, grace_s=-9.5)  # 0.5 s after the owner's death
    os.close(node.owner)
    node.owner = os.open(os.devnull, os.O_RDONLY)
    assert node.wait_for(lambda state: state["owner_gone"])
    assert node.process.poll() is None
    node.disconnect()
    assert node.process.wait(10) == 0
    assert_nothing_is_left(node, below)


def test_a_keeper_that_no_agent_comes_to_ends(start_node: StartNode) -> None:
    node, below = running(start_node, orphan_limit_s=0.5)
    node.disconnect()
    assert node.process.wait(10) == 0
    assert_nothing_is_left(node, below)


def test_steps_outlive_a_keeper_that_no_agent_comes_to(start_node: StartNode) -> None:
    node, below = running(start_node, orphan_limit_s=0.5)
    slot = node.node_dir / "slots" / "rank-0" / "slot-0"
    slot.parent.mkdir(parents=True, exist_ok=True)
    slot.write_bytes(b"a step")
    node.disconnect()
    assert node.process.wait(10) == 0
    eventually(lambda: not any(processes.is_alive(process) for process in below), "all are gone", within_s=8)
    assert slot.exists(), "nobody may have brought it to disk"


def test_when_a_keeper_gives_up() -> None:
    spec = {"grace_s": 25.0, "orphan_limit_s": 600.0}
    assert end_time(spec, owner_left=None, agent_left=None) is None
    assert end_time(spec, owner_left=None, agent_left=100.0) == 700.0
    assert end_time(spec, owner_left=50.0, agent_left=None) == 95.0
    assert end_time(spec, owner_left=50.0, agent_left=10.0) == 85.0
    assert end_time(spec, owner_left=50.0, agent_left=58.0) == 93.0
    assert end_time(spec, owner_left=50.0, agent_left=80.0) == 95.0, "the hard limit holds"


def test_the_store_goes_with_its_attempt(start_node: StartNode) -> None:
    node = start_node("", target="script.py")
    (node.folder / "script.py").write_text("")
    node.prepare(1, store=True)
    node.go(1)
    node.wait_for(lambda state: node.phase(1) == "ended")
    assert len(family(node)) == 1, "ranks of other nodes may still need the store"
    node.send(do="end", term=1, attempt=1, signal=9)
    eventually(lambda: not family(node), "the store is gone")
    assert node.attempt(1)["error"] == ""


def test_the_death_of_the_store_is_told(start_node: StartNode) -> None:
    node = start_node(SLEEPER)
    node.prepare(1, store=True)
    (store,) = [process for process in family(node) if process.pid != node.rank(1)["pid"]]
    processes.send(store)
    node.wait_for(lambda state: node.attempt(1)["error"])
    assert node.attempt(1)["error"] == "the process that served the store ended with signal SIGKILL"


def test_a_full_disk_stops_nothing(start_node: StartNode) -> None:
    node = start_node(SLEEPER, log=Path("/dev/full"), log_dir="/nowhere")
    node.send(do="nonsense")
    assert node.wait_for_error()
    node.prepare(1)
    node.go(1)
    eventually(lambda: "here" in node.output(1), "the rank runs")
    node.send(do="end", term=1, attempt=1, signal=9)
    node.wait_for(lambda state: node.phase(1) == "ended")
