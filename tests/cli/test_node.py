"""`evertrain node`: what is listed, what is waited for, and what is said when it cannot be done."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli import logs
from cli.plans import known_job
from evertrain.cli import client, look, node
from evertrain.cli.main import main
from evertrain.controller.store import read_log
from evertrain.model import decisions as d
from evertrain.model import records as r

Json = dict[str, Any]


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a job whose node-1 was evicted, and that does not run."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("EVERTRAIN_RUN_DIR", str(tmp_path / "runs"))
    folder = known_job(tmp_path / "runs", "job")
    evict = d.Evict(because="gpu lost", nodes=("node-1",), replacements={"node-1": "node-2"}, evidence=("Xid 79",))
    fault = d.NodeFault(time=3.0, node="node-1", signal="gpu_lost", evidence="Xid 79")
    logs.write(
        folder / "events.db",
        r.RunStarted(
            time=1.0, run_id="job-1", nodes=("node-0", "node-1", "node-2"), standby=1, nproc_per_node=4, fresh=False,
            start="zygote", command="t.py",
        ),
        r.NodeChanged(time=2.0, node="node-0", state="active", because="its agent reports"),
        r.Decided(time=3.0, action="evict", because="gpu lost", event=fault, actions=(evict,)),
        r.JobEnded(time=4.0, state="stopped", exit_code=1, message=""),
    )  # fmt: skip
    return folder


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["node", *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["node", *words])
    out, line = capsys.readouterr()
    assert out == "" and line.count("\n") == 1, (out, line)
    return code, line


# -- without a controller --------------------------------------------------------------------------------------------


def test_the_list_says_who_is_out_and_how_it_comes_back(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "list").splitlines()
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["node-0", "active", "0-3"],
        ["node-2", "joining", "4-7"],
        ["node-1", "evicted", "-"],
    ]
    assert lines[3].endswith("gpu lost") and "its agent reports" not in lines[1]
    assert lines[4] == "node-1 comes back by `evertrain node allow node-1` only: no test of ours can clear it"
    assert [one["id"] for one in json.loads(said(capsys, "list", "--json"))] == ["node-0", "node-2", "node-1"]


def test_a_node_is_allowed_back_for_the_next_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "allow", "node-1") == "job job does not run; its next run may use node-1 again\n"
    last = read_log(run_dir / "events.db")[-1]
    assert isinstance(last, r.AllowAsked) and last.node == "node-1" and last.time > 4.0
    assert json.loads(said(capsys, "allow", "node-1", "--json"))["asked"] == "allow"
    assert not (run_dir / "controller.json").exists()


def test_the_log_of_a_job_that_is_being_started_is_left_alone(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_log(run_dir / "events.db")
    handle = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        code, line = refused(capsys, "allow", "node-1")
    finally:
        os.close(handle)
    assert code == 1 and "job job is already running" in line
    assert read_log(run_dir / "events.db") == before


def test_a_job_that_another_machine_serves_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("EVERTRAIN_RUN_DIR", str(tmp_path / "runs"))
    known_job(tmp_path / "runs", "job", member="gpu02")
    code, line = refused(capsys, "allow", "gpu01")
    assert code == 1 and "is served by http://127.0.0.1:1, which does not answer" in line


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (("allow", "node-0"), 1, "job job does not let node-0 back: node-0 is part of the job and nothing keeps it"),
        (("allow", "x"), 1, "job job does not let x back: x was not evicted from this job; evicted are node-1"),
        (("drain", "node-0"), 1, "job job does not run; there is nothing to take node-0 out of"),
        (("drain",), 2, "NODE is missing"),
        (("drain", ""), 2, "NODE is missing: a name as"),
        (("--job", "x"), 2, "what about the nodes? `evertrain node {list,allow,drain}` comes before --job"),
        (("list", "node-0"), 2, "unexpected argument 'node-0'"),
        (("evict", "node-0"), 2, "unknown command node evict"),
        (("alow", "node-0"), 2, "unknown command node alow; did you mean allow?"),
    ],
)
def test_what_cannot_be_is_one_line(
    run_dir: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, line: str
) -> None:
    found = refused(capsys, *words)
    assert found[0] == code and line in found[1]


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert "usage: evertrain node {list,allow NODE,drain NODE}" in said(capsys, "--help")
    assert main(["node"]) == 2


# -- with one --------------------------------------------------------------------------------------------------------


def view(**different: Any) -> Json:
    usual = {"id": "node-1", "asked": None, "answer": None, "is_out": False}
    return {**usual, **different}


def answer(action: str, because: str, time: float = 10.5) -> Json:
    return {"time": time, "action": action, "because": because}


class Controller:
    """Answers a question with the next view of node-1 that it was given; the last one holds."""

    def __init__(self, *views: Json | type[Exception]) -> None:
        self._views = list(views)
        self.posted: list[str] = []
        self.slept: list[float] = []

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def post(self, path: str, wish: Json) -> Json:
        self.posted.append(path)
        return {"time": 10.0}

    def get(self, path: str) -> list[Json]:
        assert path == "/v1/nodes"
        now = self._views.pop(0) if len(self._views) > 1 else self._views[0]
        if isinstance(now, type):
            raise now("away")
        return [view(id="node-0"), now]


@pytest.fixture
def served(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Controller]:
    monkeypatch.setattr(look, "lives", lambda job: True)

    def by(*views: Json | type[Exception]) -> Controller:
        controller = Controller(*views)
        monkeypatch.setattr(time, "sleep", controller.slept.append)
        monkeypatch.setattr(client, "of_run_dir", lambda *_, **__: controller)
        return controller

    return by


def test_a_drain_waits_until_the_node_is_out_and_training_is_back(
    served: Callable[..., Controller], capsys: pytest.CaptureFixture[str]
) -> None:
    decided = answer("evict", "drained: node-2 takes over its ranks")
    stale = answer("tolerate", "refused: no standby", time=9.0)
    controller = served(
        view(asked="drain", answer=stale),
        client.Unreachable,
        view(answer=decided),
        view(answer=decided),
        view(answer=decided, is_out=True),
    )
    assert said(capsys, "drain", "node-1") == (
        "node-1 is out of job job, and training goes on: drained: node-2 takes over its ranks\n"
    )
    assert controller.posted == ["/v1/nodes/node-1/drain"]
    assert len(controller.slept) == 4 and min(controller.slept) >= 0.5, "of thousands of nodes that is a lot to ask for"


def test_a_wish_that_died_with_its_controller_is_repeated(
    served: Callable[..., Controller], capsys: pytest.CaptureFixture[str]
) -> None:
    controller = served(view(), view(asked="drain"), view(answer=answer("evict", "drained"), is_out=True))
    assert json.loads(said(capsys, "drain", "node-1", "--json"))["is_out"]
    assert controller.posted == ["/v1/nodes/node-1/drain"] * 2


def test_a_drain_that_is_decided_against_says_why(
    served: Callable[..., Controller], capsys: pytest.CaptureFixture[str]
) -> None:
    served(view(asked="drain"), view(answer=answer("tolerate", "the standby has just been lost")))
    assert refused(capsys, "drain", "node-1") == (
        1, "evertrain: job job does not take node-1 out: the standby has just been lost\n",
    )  # fmt: skip


def test_the_wait_has_an_end(
    served: Callable[..., Controller], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "DRAINED_S", 0.01)
    served(view(asked="drain"))
    code, line = refused(capsys, "drain", "node-1")
    assert code == 1 and "node-1 is not out after 0 s; it may go on without this command" in line
    monkeypatch.setattr(look, "CONTROLLER_AWAY_S", 0.01)
    served(client.Unreachable)
    assert "its controller has not answered for 0 s" in refused(capsys, "drain", "node-1")[1]


def test_what_the_controller_refuses_is_said(
    served: Callable[..., Controller], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no(path: str, wish: Json) -> Json:
        raise client.Refused(f"POST {path}", 409, b'{"error": "the job is recovering; ask again"}')

    monkeypatch.setattr(served(view()), "post", no)
    assert refused(capsys, "drain", "node-1") == (
        1, "evertrain: job job does not take node-1 out: the job is recovering; ask again\n",
    )  # fmt: skip


def test_allow_says_what_was_decided(
    served: Callable[..., Controller], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = served(view(asked="allow"), view(answer=answer("none", "allowed by the user; it becomes a standby")))
    assert said(capsys, "allow", "node-1") == (
        "job job lets node-1 back: allowed by the user; it becomes a standby\n"
    )  # fmt: skip
    assert controller.posted == ["/v1/nodes/node-1/allow"]
    monkeypatch.setattr(node, "ANSWERED_S", 0.01)
    served(view(asked="allow"))
    assert "it is not decided yet, see `evertrain node list`" in said(capsys, "allow", "node-1")
