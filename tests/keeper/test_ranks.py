"""Ranks live and die under a real keeper, and the agent hears of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from keeper.node import Node
from support import processes
from support.waiting import eventually

StartNode = Callable[..., Node]

SLEEPER = "import time; print('here', flush=True); time.sleep(600)"
NEWS_LIMIT_S = 0.05
"""Usually under a millisecond; the machine of the tests does other things too."""


def is_gone(pid: int) -> bool:
    return processes.identify(pid) is None


def test_every_exit_status_is_kept(start_node: StartNode) -> None:
    node = start_node("import os, sys; sys.exit(int(os.environ['RANK']) * 3)", nproc=3)
    assert node.run() == {0: 0, 1: 3, 2: 6}
    assert not any(node.rank(1, rank)["killed"] for rank in range(3))


def test_a_killed_rank_is_news_at_once_with_signal_and_time(start_node: StartNode) -> None:
    node = start_node(SLEEPER, nproc=2)
    node.prepare(1)
    node.go(1)
    eventually(lambda: "here" in node.output(1, 1), "rank 1 runs")

    before = time.monotonic()
    os.kill(node.rank(1, 1)["pid"], signal.SIGKILL)
    node.wait_for(lambda state: node.rank(1, 1)["exit"])

    exit = node.rank(1, 1)["exit"]
    assert exit["status"] == -signal.SIGKILL
    assert before < exit["time"] <= node.heard_time
    assert node.heard_time - exit["time"] < NEWS_LIMIT_S
    assert node.rank(1, 1)["state"] == "ended"
    assert node.rank(1, 0)["state"] == "running"
    assert not node.rank(1, 1)["killed"]
    assert node.phase(1) == "running"


def test_exits_carry_the_order_of_death(start_node: StartNode) -> None:
    node = start_node(SLEEPER, nproc=3)
    node.prepare(1)
    node.go(1)
    for rank in (1, 2, 0):
        os.kill(node.rank(1, rank)["pid"], signal.SIGKILL)
        eventually(lambda rank=rank: is_gone(node.rank(1, rank)["pid"]), "it is dead")
    node.wait_for(lambda state: node.phase(1) == "ended")
    assert sorted(range(3), key=lambda rank: float(node.rank(1, rank)["exit"]["time"])) == [1, 2, 0]


def test_an_exit_without_an_agent_is_told_to_the_next_one(start_node: StartNode, tmp_path: Path) -> None:
    text = "import pathlib, sys, time\nwhile not pathlib.Path('leave').exists(): time.sleep(0.01)\nsys.exit(3)"
    node = start_node(text)
    node.prepare(1)
    node.go(1)
    node.wait_for(lambda state: node.phase(1) == "running")
    pid = node.rank(1)["pid"]
    node.disconnect()
    (tmp_path / "leave").touch()
    eventually(lambda: is_gone(pid), "the rank ends")
    node.connect()
    assert node.phase(1) == "ended"
    assert node.rank(1)["exit"]["status"] == 3
    assert node.rank(1)["pid"] == pid


def test_a_new_agent_finds_the_same_ranks(start_node: StartNode) -> None:
    node = start_node(SLEEPER, nproc=2)
    node.prepare(1)
    node.go(1)
    before = node.wait_for(lambda state: node.phase(1) == "running")["attempts"]
    node.connect()
    assert node.state["attempts"] == before


def test_two_attempts_coexist_and_the_prepared_one_starts_when_told(start_node: StartNode) -> None:
    node = start_node(SLEEPER, nproc=2)
    node.prepare(1)
    node.go(1)
    node.prepare(2, store=True)
    assert (node.phase(1), node.phase(2)) == ("running", "prepared")
    node.send(do="end", term=1, attempt=1, signal=9)
    node.go(2)
    node.wait_for(lambda state: node.phase(1) == "ended" and node.phase(2) == "running")
    eventually(lambda: "here" in node.output(2, 0) and "here" in node.output(2, 1), "both ranks run")
    assert all(node.rank(1, rank)["killed"] for rank in range(2))


def test_sigterm_reaches_the_ranks_but_not_their_children(start_node: StartNode, tmp_path: Path) -> None:
    text = """
import os, pathlib, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
def stop(*_):
    pathlib.Path('child').write_text(str(child.poll()))
    sys.exit(7)
signal.signal(signal.SIGTERM, stop)
print('here', flush=True)
time.sleep(600)
"""
    node = start_node(text)
    node.prepare(1)
    node.go(1)
    eventually(lambda: "here" in node.output(1), "the rank runs")
    node.send(do="end", term=1, attempt=1, signal=15)
    node.wait_for(lambda state: node.phase(1) == "ended")
    assert node.rank(1)["exit"]["status"] == 7
    assert node.rank(1)["killed"]
    assert (tmp_path / "child").read_text() == "None"


def test_sigterm_is_sent_once_however_often_it_is_wanted(start_node: StartNode, tmp_path: Path) -> None:
    text = """
import pathlib, signal, time
signals = []
signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
print('here', flush=True)
while not pathlib.Path('leave').exists(): time.sleep(0.01)
raise SystemExit(len(signals))
"""
    node = start_node(text)
    node.prepare(1)
    node.go(1)
    eventually(lambda: "here" in node.output(1), "the rank runs")
    for _ in range(3):
        node.send(do="end", term=1, attempt=1, signal=15)
        node.send(do="nonsense")  # whose answer says that the signal has been sent
        node.wait_for_error()
    (tmp_path / "leave").touch()
    node.wait_for(lambda state: node.phase(1) == "ended")
    assert node.rank(1)["exit"]["status"] == 1


def test_a_rank_that_ignores_sigterm_is_killed_by_a_second_end(start_node: StartNode) -> None:
    node = start_node("import signal; signal.signal(15, signal.SIG_IGN)\n" + SLEEPER)
    node.prepare(1)
    node.go(1)
    eventually(lambda: "here" in node.output(1), "the rank runs")
    node.send(do="end", term=1, attempt=1, signal=15)
    node.send(do="end", term=1, attempt=1, signal=9)
    node.wait_for(lambda state: node.phase(1) == "ended")
    assert node.rank(1)["exit"]["status"] == -9


def test_a_core_dump_is_noticed(start_node: StartNode, tmp_path: Path) -> None:
    text = "import os, resource\nresource.setrlimit(resource.RLIMIT_CORE, (1 << 16, 1 << 16))\nos.abort()"
    node = start_node(text)
    if b"|" in Path("/proc/sys/kernel/core_pattern").read_bytes()[:1]:
        pytest.skip("core dumps go to a program here")
    assert node.run() == {0: -signal.SIGABRT}
    assert isinstance(node.rank(1)["exit"]["core"], bool)


FAMILY = """
import os, signal, subprocess, sys, time
sleep = [sys.executable, '-c', 'import time; time.sleep(600)']
tree = [sys.executable, '-c', 'import subprocess, sys; print(subprocess.Popen(' + repr(sleep) + ').pid, flush=True); '
        'import time; time.sleep(600)']
pids = [subprocess.Popen(sleep).pid, subprocess.Popen(sleep, process_group=0).pid,
        subprocess.Popen(sleep, start_new_session=True).pid]
grand = subprocess.Popen(tree, stdout=subprocess.PIPE, start_new_session=True, text=True)
pids += [grand.pid, int(grand.stdout.readline())]
if os.fork() == 0:
    os.setsid()
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    os._exit(0)
print(*pids, flush=True)
time.sleep(600)
"""
"""Children in the rank's group, in another group, in another session, a grandchild there, and an orphan."""


@pytest.mark.parametrize("how", ["end", "death"])
def test_nothing_that_a_rank_has_started_outlives_its_attempt(start_node: StartNode, how: str) -> None:
    node = start_node(FAMILY)
    node.prepare(1)
    node.go(1)
    eventually(lambda: node.output(1).strip(), "the family is there")
    pids = [int(word) for word in node.output(1).split()]
    keeper = node.process.pid
    if how == "end":
        node.send(do="end", term=1, attempt=1, signal=9)
    else:
        os.kill(node.rank(1)["pid"], signal.SIGKILL)
    node.wait_for(lambda state: node.phase(1) == "ended")
    eventually(lambda: all(is_gone(pid) for pid in pids), "all of the family are gone", within_s=5)
    eventually(lambda: not Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split(), "no child is left")


def test_what_a_dead_rank_leaves_in_its_session_is_ended_while_others_run(start_node: StartNode) -> None:
    text = """
import os, subprocess, sys, time
print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], process_group=0).pid, flush=True)
time.sleep(600)
"""
    node = start_node(text, nproc=2)
    node.prepare(1)
    node.go(1)
    eventually(lambda: node.output(1, 0).strip() and node.output(1, 1).strip(), "both have a child")
    children = [int(node.output(1, rank)) for rank in range(2)]
    os.kill(node.rank(1, 0)["pid"], signal.SIGKILL)
    eventually(lambda: is_gone(children[0]), "the dead rank's child is ended")
    assert not is_gone(children[1])
    assert node.wait_for(lambda state: node.rank(1, 0)["exit"])
    assert node.rank(1, 1)["state"] == "running"


@pytest.mark.parametrize("how", ["end", "death", "shutdown"])
def test_semaphores_of_a_killed_rank_are_removed(start_node: StartNode, how: str) -> None:
    text = """
import multiprocessing, os, time
context = multiprocessing.get_context('spawn')
lock, worker = context.Lock(), context.Process(target=time.sleep, args=(600,))
if __name__ == '__main__':
    worker.start()
    print(lock._semlock.name, flush=True)
    time.sleep(600)
"""
    node = start_node(text)
    node.prepare(1)
    node.go(1)
    eventually(lambda: node.output(1).strip(), "the rank runs")
    semaphore = Path(f"/dev/shm/sem.{node.output(1).strip().removeprefix('/')}")
    assert semaphore.exists()
    if how == "end":
        node.send(do="end", term=1, attempt=1, signal=9)
    elif how == "death":
        os.kill(node.rank(1)["pid"], signal.SIGKILL)
    else:
        node.send(do="shutdown", term=1)
    eventually(lambda: not semaphore.exists(), "the semaphore is removed", within_s=5)


def test_a_waiting_rank_may_die_and_the_others_still_go(start_node: StartNode) -> None:
    node = start_node(SLEEPER, nproc=2)
    node.prepare(1)
    os.kill(node.rank(1, 0)["pid"], signal.SIGKILL)
    node.wait_for(lambda state: node.rank(1, 0)["exit"])
    node.go(1)
    eventually(lambda: "here" in node.output(1, 1), "rank 1 runs")
    assert node.rank(1, 0)["exit"]["status"] == -9


def test_what_does_not_die_of_sigkill_is_called_stuck(start_node: StartNode, tmp_path: Path) -> None:
    # a keeper whose SIGKILL does nothing, as with a process that hangs in the kernel
    seam = tmp_path / "deaf.py"
    seam.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2] / 'src')!r})\n"
        "import pathlib, signal\n"
        "from evertrain.keeper import attempts, children, main\n"
        "def send(pidfd, number):\n"
        "    if number != 9 or pathlib.Path('healed').exists(): signal.pidfd_send_signal(pidfd, number)\n"
        "children.send_signal, attempts.STUCK_AFTER_S = send, 0.3\n"
        "children.os.killpg = lambda *_: None\n"
        "main.main(sys.argv[1])\n"
    )
    node = start_node(SLEEPER, nproc=1, command=(str(seam),))
    node.prepare(1)
    node.go(1)
    node.send(do="end", term=1, attempt=1, signal=9)
    node.wait_for(lambda state: node.rank(1)["state"] == "stuck", 5)
    assert node.rank(1)["exit"] is None and node.phase(1) == "running"
    (tmp_path / "healed").touch()
    node.send(do="end", term=1, attempt=1, signal=9)
    node.wait_for(lambda state: node.rank(1)["state"] == "ended", 5)


def test_a_program_is_run_in_place_of_the_process_that_waited(start_node: StartNode) -> None:
    node = start_node("", "-c", "echo $RANK $0; exit 4", "name", kind="program", target="sh", start="zygote", nproc=2)
    assert node.state["starter"] | {"pid": None} == {
        "wanted": "zygote", "mode": "spawn", "state": "ready", "reason": "a program is always spawned", "pid": None,
    }  # fmt: skip
    assert node.run() == {0: 4, 1: 4}
    assert node.output(1, 1) == "1 name\n"


def test_a_program_that_is_not_there(start_node: StartNode) -> None:
    node = start_node("", kind="program", target="no-such-program")
    assert node.run() == {0: 127}
    assert "cannot run no-such-program: No such file" in node.output(1, 0, "err")


def test_an_interpreter_that_is_not_there(start_node: StartNode) -> None:
    node = start_node(SLEEPER, python="/no/such/python", nproc=2)
    node.prepare(1, wait=False)
    node.wait_for(lambda state: node.phase(1) == "ended")
    assert "No such file" in node.attempt(1)["error"]
