"""Ranks of a replay run under their agent like any others, and nobody takes what they do for the job's own steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evertrain.agent import replays
from evertrain.agent.agent import Agent
from evertrain.agent.node import NodeView
from evertrain.model.replays import Replayed, ReplaySettings
from evertrain.model.report import Desired, DesiredAttempt, Go, RankOrder
from evertrain.model.spec import AgentSpec
from evertrain.worker import contact, page

SETTINGS = ReplaySettings(layers=2, dp=1, steps=3, from_step=4, seed=7)
GO = Go(
    master_addr="127.0.0.1", master_port=1, world_size=4, group_rank=1, group_world_size=2, local_world_size=2,
    restart_count=0, max_restarts=0, role="default", signals_to_handle="", virtual_local_rank=False, mesh=None,
    resume=None, reached=None, faults=(), replay=SETTINGS,
    ranks=(RankOrder(rank=2, local_rank=0), RankOrder(rank=3, local_rank=1)),
)  # fmt: skip
ROUND = DesiredAttempt(attempt=-5, phase="go", ranks=(2, 3), go=GO)


def spec(folder: Path) -> AgentSpec:
    (folder / "node").mkdir()
    return AgentSpec(
        job="job", run_id="job-1", node="node-1", node_dir=str(folder / "node"), disk_dir=str(folder / "disk"),
        log_root=str(folder / "logs"), controller_url="", token_file="", fired_dir="",
    )  # fmt: skip


def keeper(number: str, phase: str = "running", *ranks: str) -> dict[str, Any]:
    process = {"pid": 100, "start_ticks": 1, "state": phase, "killed": False, "exit": None}
    return {
        "keeper": {"pid": 1, "start_ticks": 1, "boot_id": "b"},
        "owner_gone": False,
        "starter": {"wanted": "zygote", "mode": "zygote", "state": "ready", "reason": ""},
        "attempts": {
            number: {"phase": phase, "store_port": None, "error": "", "ranks": dict.fromkeys(ranks, process)},
        },
    }


def write_page(view: NodeView, attempt: int, rank: int, **fields: Any) -> page.PageWriter:
    path = view.page_path(attempt, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    page.create(str(path), job="job", term=1, attempt=attempt, rank=rank)
    writer = page.PageWriter(str(path))
    for name, value in fields.items():
        setattr(writer, name, value)
    writer.write()
    return writer


async def test_what_ranks_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    agent = Agent(spec(tmp_path), "token")
    lines = agent._go_lines(ROUND, {})
    assert list(lines) == ["2", "3"]
    told = lines["3"]["session"]["replay"]
    assert told["config"] == {"layers": 2, "dp": 1, "steps": 3, "from_step": 4, "seed": 7}
    assert told["result"] == str(tmp_path / "node/pages/replay5-r3.result")
    assert (lines["3"]["env"]["RANK"], lines["3"]["env"]["WORLD_SIZE"]) == ("3", "4")
    assert lines["3"]["env"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert lines["3"]["stderr"] == str(tmp_path / "logs/replay_5/node-1/3/stderr.log")
    assert (tmp_path / "node/pages/replay5-r3").exists()
    json.dumps(lines)

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    later = DesiredAttempt(attempt=-6, phase="go", ranks=(2, 3), go=GO)
    assert "CUBLAS_WORKSPACE_CONFIG" not in agent._go_lines(later, {})["2"]["env"], "it inherits the user's"
    assert {path.name for path in (tmp_path / "node/pages").iterdir()} == {"replay6-r2", "replay6-r3"}
    (tmp_path / "node/pages/a3-r2").touch()
    replays.forget(tmp_path / "node", 4)
    assert [path.name for path in (tmp_path / "node/pages").iterdir()] == ["a3-r2"]


def test_what_the_newest_round_has_given_is_reported(tmp_path: Path) -> None:
    view = NodeView(spec(tmp_path))
    assert view.report(keeper("4"), None).replayed is None
    write_page(view, -5, 2)
    replays.result_path(view.page_path(-5, 2)).write_text("abc")
    assert view.report(keeper("-5", "running", "2", "3"), None).replayed == Replayed(round=5, digests={2: "abc"})
    both = keeper("-5", "ended", "2")
    both["attempts"]["-6"] = {**both["attempts"]["-5"], "phase": "preparing"}
    assert view.report(both, None).replayed == Replayed(round=6, digests={})


def test_steps_of_a_replay_are_nobodys_progress(tmp_path: Path) -> None:
    view = NodeView(spec(tmp_path))
    write_page(view, -5, 2, abs_step=9, loss=float("nan"))
    state = keeper("-5", "running", "2")
    view.look(state)
    assert view.views == () and view.running_attempt is None
    order = Desired(job="job", term=1, last_attempt=4, attempts=(ROUND,))
    report = view.report(state, order)
    assert report.pages == () and report.copies_after_attempt == 4
    assert [one.attempt for one in report.attempts] == [-5]


def test_the_mesh_is_read_off_the_groups_when_the_ranks_are_in_their_loop(tmp_path: Path) -> None:
    view = NodeView(spec(tmp_path))
    writer = write_page(view, 4, 2)
    groups = Path(contact.groups_path(str(view.page_path(4, 2))))
    everyone = {"name": "0", "desc": "default_pg", "ranks": [0, 1, 2, 3]}
    dims = [{"name": name, "desc": f"mesh_{name}", "ranks": ranks} for name, ranks in (("pp", [0, 2]), ("dp", [2, 3]))]
    groups.write_text("".join(json.dumps(one) + "\n" for one in (everyone, *dims)))
    state = keeper("4", "running", "2")
    view.look(state)
    assert view.report(state, None).mesh == ""
    writer.resumed_time, writer.flags = 1.0, page.TAKES_REPLAYS
    writer.write()
    view.look(state)
    report = view.report(state, None)
    assert report.mesh == "pp=2,dp=2" and report.pages[0].takes_replays
