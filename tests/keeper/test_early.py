"""Ranks that run ahead of their start: as far as `evertrain.init()`, and from there on like any other rank."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from evertrain.agent.environment import UNKNOWN
from evertrain.observe import pages
from keeper.node import Json, Node
from support.waiting import eventually

StartNode = Callable[..., Node]

SCRIPT = """
import os, sys, time
print('before', os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'], flush=True)
ready = time.monotonic()
import evertrain
job = evertrain.init()
print('after', os.environ['RANK'], os.environ['MASTER_PORT'], job.rank, job.attempt, time.monotonic() - ready > 0.5)
print('to stderr', file=sys.stderr)
assert evertrain.init() == job
evertrain.report(step=7, loss=1.5)
"""


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def early(node: Node, *args: str) -> Json:
    folder = node.folder / "standby"
    folder.mkdir(exist_ok=True)
    ranks = {
        str(local): {
            "env": {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(node.nproc)},
            "args": list(args) or None,
            "stdout": str(folder / f"{local}.out"),
            "stderr": str(folder / f"{local}.err"),
        }
        for local in range(node.nproc)
    }
    return {"ranks": ranks, "unknown": list(UNKNOWN)}


def run_ahead(node: Node, *args: str) -> None:
    node.send(do="run_ahead", term=1, asked=early(node, *args))


def reaches(node: Node, state: str, within_s: float = 60.0) -> Json:
    found: Json = node.wait_for(lambda seen: seen["early"]["state"] == state, within_s)["early"]
    return found


def before(node: Node, local: int = 0, stream: str = "out") -> str:
    file = node.folder / "standby" / f"{local}.{stream}"
    return file.read_text() if file.exists() else ""


def run(node: Node, attempt: int = 1, **more: Any) -> list[int]:
    node.go(attempt, **more)
    node.wait_for(lambda state: node.phase(attempt) == "ended")
    return [node.rank(attempt, rank)["exit"]["status"] for rank in range(node.nproc)]


@pytest.mark.parametrize("start", ["zygote", pytest.param("parked", marks=pytest.mark.matrix), "spawn"])
def test_they_wait_in_init_and_go_on_as_the_ranks_of_an_attempt(start_node: StartNode, start: str) -> None:
    node = start_node(SCRIPT, start=start, nproc=2)
    run_ahead(node)
    pids = reaches(node, "waiting")["pids"]
    assert [before(node, local) for local in (0, 1)] == ["before 0 2\n", "before 1 2\n"]
    assert node.state["attempts"] == {}, "they are ranks of nothing"
    time.sleep(0.6)  # what the script measures

    began = time.monotonic()
    node.prepare(3, store=True)
    assert time.monotonic() - began < 0.3 or start != "zygote"
    assert sorted(node.rank(3, rank)["pid"] for rank in (0, 1)) == pids
    assert node.state["early"] == {"asked": None, "state": "", "reason": "", "pids": []}
    assert run(node, 3) == [0, 0], node.story()

    port = node.attempt(3)["store_port"]
    for rank in (0, 1):
        assert node.output(3, rank) == f"after {rank} {port} {rank} 3 True\n"
        assert node.output(3, rank, "err") == "to stderr\n"
        page, why = pages.Reader(node.node_dir / f"a3-r{rank}").read()
        assert page is not None, why
        assert (page.pid, page.abs_step, page.phase) == (node.rank(3, rank)["pid"], 7, "exit")
    assert before(node) == "before 0 2\n"


def test_an_exception_after_init_is_recorded_and_shown_as_of_any_rank(start_node: StartNode) -> None:
    node = start_node("import evertrain\n\nevertrain.init()\nraise ValueError('boom')\n")
    run_ahead(node)
    reaches(node, "waiting")
    node.prepare(1)
    assert run(node) == [1]
    ahead = node.output(1, 0, "err")
    found = json.loads((node.rank_folder(1) / "exception.json").read_text())
    assert (found["type"], found["message"], found["line"]) == ("ValueError", "boom", 4)
    node.prepare(2)
    assert run(node, 2) == [1]
    assert ahead == node.output(2, 0, "err") == found["traceback"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import os; os.environ['RANK']", "the script needs RANK before it calls evertrain.init()"),
        ("import os; int(os.environ.get('RANK', 0))", "the script needs RANK before it calls evertrain.init()"),
        ("import os; os.getenv('WORLD_SIZE')", "the script needs WORLD_SIZE before it calls evertrain.init()"),
        ("import os; os.environ['MASTER_PORT'] = '1'", "the script needs MASTER_PORT before it calls evertrain.init()"),
        ("1 / 0", "ZeroDivisionError: division by zero in line 1 of script.py, before evertrain.init()"),
        ("pass", "the script comes to its end without evertrain.init()"),
        ("raise SystemExit(0)", "the script exits before it calls evertrain.init()"),
        ("import os; os._exit(0)", "a process ended with exit code 0 before evertrain.init()"),
        ("import evertrain; evertrain.report(step=1)", "the script reports before it calls evertrain.init()"),
        (
            "import evertrain; evertrain.Checkpointer({})",
            "the script makes a Checkpointer before it calls evertrain.init()",
        ),
        (
            "import torch.distributed as dist; dist.init_process_group('gloo')",
            "the script calls init_process_group() before it calls evertrain.init()",
        ),
        (
            "import torch; p = torch.nn.Parameter(torch.ones(1)); torch.optim.SGD([p]).step()",
            "the script trains before it calls evertrain.init()",
        ),
    ],
)  # fmt: skip
def test_a_script_that_cannot_be_ahead_says_why_and_starts_in_the_usual_way(
    start_node: StartNode, text: str, reason: str
) -> None:
    node = start_node(f"{text}\n", start="zygote" if "torch" in text or "Check" in text else "spawn", nproc=2)
    run_ahead(node)
    assert reaches(node, "failed")["reason"] == reason
    assert node.state["early"]["pids"] == []
    run_ahead(node)  # as an agent that has come back would
    node.prepare(1)
    assert node.phase(1) == "prepared" and node.state["attempts"]["1"]["error"] == ""
    node.send(do="end", term=1, attempt=1, signal=9)
    node.wait_for(lambda state: node.phase(1) == "ended")


def test_one_that_is_not_there_yet_is_not_waited_for(start_node: StartNode) -> None:
    node = start_node("import time; time.sleep(600)", nproc=2)
    run_ahead(node)
    node.wait_for(lambda state: len(state["early"]["pids"]) == 2)
    pids = node.state["early"]["pids"]
    node.prepare(1)
    assert not set(pids) & {node.rank(1, rank)["pid"] for rank in (0, 1)}
    eventually(lambda: not any(lives(pid) for pid in pids), "they have gone")


def test_they_go_with_all_that_they_have_started_when_they_are_not_wanted_any_more(start_node: StartNode) -> None:
    node = start_node(
        "import subprocess, sys, evertrain\n"
        "print(subprocess.Popen(['sleep', '600'], start_new_session=False).pid, flush=True)\n"
        "evertrain.init()\n"
    )
    run_ahead(node)
    (pid,) = reaches(node, "waiting")["pids"]
    child = int(before(node))
    assert lives(child)
    node.send(do="run_ahead", term=1, asked=None)
    reaches(node, "")
    eventually(lambda: not lives(pid) and not lives(child), "both have gone")


def test_they_end_with_their_keeper(start_node: StartNode) -> None:
    node = start_node(SCRIPT, nproc=2)
    run_ahead(node)
    pids = reaches(node, "waiting")["pids"]
    node.kill_keeper()
    eventually(lambda: not any(lives(pid) for pid in pids), "they have gone")


def test_the_end_of_one_that_waits_is_no_ranks_end(start_node: StartNode) -> None:
    node = start_node(SCRIPT, nproc=2)
    run_ahead(node)
    pids = reaches(node, "waiting")["pids"]
    os.kill(pids[0], signal.SIGKILL)
    assert reaches(node, "failed")["reason"] == "a process ended with signal SIGKILL in evertrain.init()"
    assert node.state["attempts"] == {}
    eventually(lambda: not lives(pids[1]), "one alone is of no use")


def test_what_was_read_before_an_edit_never_runs(start_node: StartNode, tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text("number = 1\n")
    node = start_node("import evertrain, part\nevertrain.init()\nprint(part.number)\n")
    run_ahead(node)
    first = reaches(node, "waiting")["pids"]
    (tmp_path / "part.py").write_text("number = 22\n")
    node.wait_for(lambda state: state["early"]["state"] == "waiting" and state["early"]["pids"] != first)
    node.prepare(1)
    assert run(node) == [0]
    assert node.output(1) == "22\n"


def test_an_edit_after_they_were_prepared_has_them_prepared_anew(start_node: StartNode, tmp_path: Path) -> None:
    node = start_node("import evertrain\nevertrain.init()\nprint(1)\n")
    run_ahead(node)
    reaches(node, "waiting")
    node.prepare(1)
    pid = node.rank(1)["pid"]
    (tmp_path / "script.py").write_text("import evertrain\nevertrain.init()\nprint(22)\n")
    node.wait_for(lambda state: node.phase(1) == "prepared" and node.rank(1)["pid"] != pid)
    assert run(node) == [0]
    assert node.output(1) == "22\n"


def test_other_arguments_than_they_ran_ahead_with_have_them_prepared_anew(start_node: StartNode) -> None:
    node = start_node("import sys, evertrain\nevertrain.init()\nprint(sys.argv[1:])\n")
    run_ahead(node, "old")
    reaches(node, "waiting")
    node.prepare(1)
    pid = node.rank(1)["pid"]
    node.go(1, args=["new"])
    assert "no longer holds" in node.wait_for_error()
    node.wait_for(lambda state: node.phase(1) == "prepared" and node.rank(1)["pid"] != pid)
    assert run(node, args=["new"]) == [0]
    assert node.output(1) == "['new']\n"


def test_the_same_again_changes_nothing_and_another_environment_begins_anew(start_node: StartNode) -> None:
    node = start_node("import os, evertrain\nprint(os.environ.get('ADDED'), flush=True)\nevertrain.init()\n")
    run_ahead(node)
    pids = reaches(node, "waiting")["pids"]
    run_ahead(node)
    node.send(do="configure", term=1, env={"ADDED": "yes"})
    node.wait_for(lambda state: state["early"]["state"] == "waiting" and state["early"]["pids"] != pids)
    assert before(node) == "None\nyes\n"


def test_a_script_that_changes_its_import_time_environment_before_init_is_noticed(start_node: StartNode) -> None:
    node = start_node(
        "import os\nname = 'OMP_' + 'NUM_THREADS'\nos.environ[name] = '7'\nimport evertrain, torch\nevertrain.init()\n"
        "from evertrain.worker import session\nsession.current.check_environment()\nevertrain.report(step=1)\n"
    )
    run_ahead(node)
    reaches(node, "waiting")
    node.prepare(1)
    assert run(node) == [0], node.story()
    page, why = pages.Reader(node.node_dir / "a1-r0").read()
    assert page is not None and page.env_changed, why
