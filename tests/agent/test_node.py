"""What an agent reports of its node, from the state that the keeper has pushed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evertrain.agent.node import NodeView
from evertrain.model.spec import AgentSpec


def view(folder: Path) -> NodeView:
    return NodeView(
        AgentSpec(
            job="job",
            run_id="job-1",
            node="node-0",
            node_dir=str(folder),
            disk_dir=str(folder / "disk"),
            log_root=str(folder / "logs"),
            controller_url="",
            token_file="",
            fired_dir="",
        )
    )


def state(pid: int, rank_state: str, status: int | None) -> dict[str, Any]:
    end = None if status is None else {"status": status, "time": 5.0, "core": False}
    rank = {"pid": pid, "start_ticks": 1, "state": rank_state, "killed": False, "exit": end}
    return {
        "keeper": {"pid": 1, "start_ticks": 1, "boot_id": "b"},
        "owner_gone": False,
        "starter": {"wanted": "zygote", "mode": "zygote", "state": "ready", "reason": ""},
        "attempts": {"2": {"phase": "prepared", "store_port": 1, "error": "", "ranks": {"0": rank}}},
    }


def exit_status(report: Any) -> int | None:
    (attempt,) = report.attempts
    (rank,) = attempt.ranks
    return None if rank.exit is None else int(rank.exit.status)


def test_a_process_that_died_while_it_waited_says_nothing_about_its_successor(tmp_path: Path) -> None:
    node = view(tmp_path)
    assert exit_status(node.report(state(100, "ended", -9), None)) == -9
    assert exit_status(node.report(state(101, "waiting", None), None)) is None
    assert exit_status(node.report(state(101, "ended", 0), None)) == 0
