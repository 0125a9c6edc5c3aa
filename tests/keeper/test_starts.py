"""Zygote, parked, spawn: which one it is, why, and what happens when it ends."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keeper.node import Json, Node
from support import processes
from support.waiting import eventually

StartNode = Callable[..., Node]

REPORT = "import os, sys; print(os.environ['RANK'], 'torch' in sys.modules, os.getppid(), flush=True)"
MEET = f"""{REPORT}
import datetime, torch.distributed as dist
limit = datetime.timedelta(seconds=30)
store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False, timeout=limit)
store.set(os.environ['RANK'], 'x')
store.wait(['0', '1'])
print('met', flush=True)
"""


def is_ready(state: Json) -> bool:
    return bool(state["starter"]["state"] == "ready")


@pytest.mark.parametrize(
    ("start", "has_torch"), [("zygote", True), pytest.param("parked", True, marks=pytest.mark.matrix), ("spawn", False)]
)
def test_ranks_are_the_keepers_children_and_meet_however_they_start(
    start_node: StartNode, start: str, has_torch: bool
) -> None:
    node = start_node(MEET, start=start, nproc=2)
    assert node.run(store=True) == {0: 0, 1: 0}, node.story()
    assert [node.output(1, rank).split() for rank in range(2)] == [
        [str(rank), str(has_torch), str(node.process.pid), "met"] for rank in range(2)
    ]
    starter = node.state["starter"]
    assert (starter["wanted"], starter["mode"], starter["reason"]) == (start, start, "")
    assert (starter["pid"] is not None) == (start == "zygote")


@pytest.mark.parametrize("start", ["zygote", "spawn"])
def test_what_nohup_ignores_ranks_do_not(start_node: StartNode, start: str) -> None:
    """Under torchrun they do not either, as it handles these signals itself."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        node = start_node("import signal; print(int(signal.getsignal(signal.SIGHUP)))", start=start)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert node.run() == {0: 0}, node.story()
    assert node.output(1).strip() == str(int(signal.SIG_DFL))


def test_a_dead_zygote_is_replaced_and_its_ranks_live_on(start_node: StartNode) -> None:
    node = start_node(REPORT + "\nimport time; time.sleep(600)", start="zygote")
    node.wait_for(is_ready)
    node.prepare(1)
    node.go(1)
    eventually(lambda: node.output(1), "the rank runs")
    first = node.state["starter"]["pid"]

    os.kill(first, signal.SIGKILL)
    node.wait_for(lambda state: not is_ready(state))
    assert node.state["starter"]["reason"] == "the zygote is being started again: it ended with signal SIGKILL"
    node.prepare(2)  # spawned meanwhile
    node.go(2)
    eventually(lambda: node.output(2), "the second attempt runs")
    assert node.output(2).split()[1] == "False"

    node.wait_for(is_ready)
    assert node.state["starter"]["reason"] == ""
    assert node.state["starter"]["pid"] not in (first, None)
    node.prepare(3)
    node.go(3)
    eventually(lambda: node.output(3), "the third attempt runs")
    assert node.output(3).split()[1] == "True"
    assert node.rank(1)["state"] == node.rank(2)["state"] == "running"


def test_an_attempt_that_waits_for_a_dying_zygote_is_spawned(start_node: StartNode) -> None:
    node = start_node(REPORT, start="zygote", nproc=2)
    node.prepare(1, wait=False)
    os.kill(node.state["starter"]["pid"], signal.SIGKILL)
    node.wait_for(lambda state: node.phase(1) == "prepared")
    node.go(1)
    node.wait_for(lambda state: node.phase(1) == "ended")
    assert node.output(1).split()[1] == "False"


REFUSALS = {
    "a thread": ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
                 "parked", "imports have left 2 threads"),
    "an error": ("1 / 0", "spawn", "--preload mine failed: ZeroDivisionError: division by zero"),
    "an exit": ("raise SystemExit(3)", "spawn", "--preload mine failed: SystemExit: 3"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSALS)
def test_a_preload_that_does_not_bear_a_fork(start_node: StartNode, tmp_path: Path, what: str) -> None:
    text, mode, reason = REFUSALS[what]
    (tmp_path / "mine.py").write_text(text)
    node = start_node(REPORT, start="zygote", preload=["mine"])
    assert node.run() == {0: 0}
    assert node.output(1).split()[1] == str(mode == "parked")
    starter = node.state["starter"]
    assert (starter["wanted"], starter["mode"], starter["reason"], starter["pid"]) == ("zygote", mode, reason, None)


@pytest.mark.parametrize("start", ["zygote", "parked"])
def test_a_script_that_sets_import_time_environment_is_spawned(start_node: StartNode, start: str) -> None:
    text = "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\nprint(torch.get_num_threads(), flush=True)"
    node = start_node(text, start=start)
    assert node.run() == {0: 0}
    assert node.output(1) == "1\n"
    assert node.state["starter"]["reason"] == "line 2 of script.py sets OMP_NUM_THREADS before it imports torch"
    assert node.state["starter"]["mode"] == "spawn"


def test_a_module_of_the_scripts_own_by_the_name_of_one_that_torch_has_loaded(
    start_node: StartNode, tmp_path: Path
) -> None:
    (tmp_path / "profile.py").write_text("mine = True; print('mine', flush=True)")
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "__init__.py").write_text("mine = True")
    node = start_node("import json, profile; assert json.mine and profile.mine", start="zygote")
    assert node.run() == {0: 0}, node.story()
    assert node.output(1) == "mine\n"
    assert node.state["starter"]["mode"] == "spawn"
    assert node.state["starter"]["reason"] == (
        "the script has modules of its own by the name of one already imported: json, profile"
    )
    assert "mine" not in (tmp_path / "zygote-node-0.log").read_text(), "nothing of the user's has run in the zygote"


def test_a_zygote_never_forks_for_code_that_has_changed(start_node: StartNode, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("value = 1")
    text = "import mine, sys; print(mine.value, 'torch' in sys.modules, flush=True)"
    node = start_node(text, start="zygote", preload=["mine"])
    assert node.run(1) == {0: 0}
    (tmp_path / "mine.py").write_text("value = 2")
    node.prepare(2)
    assert node.state["starter"]["reason"] == f"the zygote is being started again: {tmp_path / 'mine.py'} has changed"
    node.wait_for(is_ready)
    assert node.run(3) == {0: 0}
    (tmp_path / "script.py").write_text(f"import os; os.environ['OMP_NUM_THREADS'] = '7'; {text}")
    assert node.run(4) == {0: 0}
    assert node.state["starter"]["mode"] == "spawn"
    assert [node.output(attempt) for attempt in (1, 3, 4)] == ["1 True\n", "2 True\n", "2 False\n"]


def test_what_waits_is_prepared_anew_when_the_zygote_is_to_be_avoided(start_node: StartNode) -> None:
    node = start_node(REPORT, start="zygote", nproc=2)
    node.prepare(1, store=True)
    zygote = processes.identify(node.state["starter"]["pid"])
    before = node.attempt(1)
    assert zygote
    node.send(do="avoid_zygote", term=1, reason="the script set OMP_NUM_THREADS")
    node.wait_for(lambda state: node.phase(1) == "prepared" and node.attempt(1)["ranks"] != before["ranks"])
    assert node.state["starter"]["mode"] == "spawn"
    assert node.state["starter"]["reason"] == "the script set OMP_NUM_THREADS"
    assert not processes.is_alive(zygote)
    assert node.attempt(1)["store_port"] == before["store_port"]
    node.go(1)
    node.wait_for(lambda state: node.phase(1) == "ended")
    assert node.output(1, 1).split()[1] == "False"


LOOK = (
    "import os, sys; print(os.environ.get('ADDED'), os.environ.get('OMP_NUM_THREADS'), 'torch' in sys.modules,"
    " 'torch' in sys.modules and sys.modules['torch'].get_num_threads(), sys.argv[1:], flush=True)"
)


@pytest.mark.parametrize("start", ["zygote", pytest.param("parked", marks=pytest.mark.matrix), "spawn"])
def test_another_environment_reaches_what_waits_and_its_imports(start_node: StartNode, start: str) -> None:
    node = start_node(LOOK, start=start, nproc=2)
    node.prepare(1, store=True)
    before = node.attempt(1)
    env = {"ADDED": "a b", "OMP_NUM_THREADS": "2"}
    node.send(do="configure", term=1, env=env)
    node.wait_for(lambda state: node.phase(1) == "prepared" and node.attempt(1)["ranks"] != before["ranks"], 60)
    assert node.state["env"] == env
    assert node.attempt(1)["store_port"] == before["store_port"]
    prepared = node.attempt(1)["ranks"]
    node.send(do="configure", term=1, env=env)  # nothing new, nothing done
    node.prepare(2)
    assert node.attempt(1)["ranks"] == prepared
    node.go(1, args=["--lr", "3"])
    node.wait_for(lambda state: node.phase(1) == "ended")
    has_torch = start != "spawn"
    expected = f"a b 2 {has_torch} {2 if has_torch else False} ['--lr', '3']\n"
    assert [node.output(1, rank) for rank in range(2)] == [expected] * 2
    assert node.state["starter"]["mode"] == start and node.errors == []


def test_the_environment_changes_while_the_zygote_still_imports(start_node: StartNode) -> None:
    node = start_node(LOOK, start="zygote", nproc=2)
    node.prepare(1, store=True, wait=False)
    node.send(do="configure", term=1, env={"ADDED": "x"})
    node.send(do="configure", term=1, env={"ADDED": "y"})
    node.wait_for(lambda state: node.phase(1) == "prepared", 60)
    node.go(1)
    node.wait_for(lambda state: node.phase(1) == "ended")
    assert [node.output(1, rank).split()[0] for rank in range(2)] == ["y", "y"]
    assert node.state["starter"]["mode"] == "zygote"


def test_a_program_gets_other_arguments_and_environment(start_node: StartNode) -> None:
    node = start_node("", "-c", "echo old", kind="program", target="sh")
    node.send(do="configure", term=1, env={"ADDED": "new"})
    node.prepare(1)
    node.go(1, args=["-c", "echo $ADDED"])
    node.wait_for(lambda state: node.phase(1) == "ended")
    assert node.output(1) == "new\n"


FAKE_CUDA = """
#include <fcntl.h>
int cuInit(unsigned flags) { return open("/dev/nvidia0", O_RDWR) < 0; }
"""


@pytest.fixture
def fake_cuda(tmp_path: Path) -> Iterator[Path]:
    """A driver library that opens a device, and the device, where the machine has none of its own."""
    device = Path("/dev/nvidia0")
    if device.exists() or os.getuid() != 0 or not shutil.which("gcc"):
        pytest.skip("needs root, gcc, and a machine without a GPU")
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
    source.write_text(FAKE_CUDA)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    try:
        yield library
    finally:
        device.unlink()


def test_a_zygote_with_an_open_gpu_is_refused(start_node: StartNode, tmp_path: Path, fake_cuda: Path) -> None:
    (tmp_path / "mine.py").write_text(f"import ctypes\nassert ctypes.CDLL({str(fake_cuda)!r}).cuInit(0) == 0")
    node = start_node(REPORT, start="zygote", preload=["mine"])
    assert node.run() == {0: 0}
    starter = node.state["starter"]
    assert (starter["mode"], starter["reason"]) == ("parked", "an import has opened /dev/nvidia0")


@pytest.mark.matrix
def test_a_child_that_finds_a_gpu_open_is_refused_too(start_node: StartNode, tmp_path: Path, fake_cuda: Path) -> None:
    (tmp_path / "mine.py").write_text(
        f"import ctypes, os\ncuda = ctypes.CDLL({str(fake_cuda)!r})\n"
        "os.register_at_fork(after_in_child=lambda: cuda.cuInit(0))\n"
    )
    node = start_node(REPORT, start="zygote", preload=["mine"], nproc=2)
    assert node.run(store=True) == {0: 0, 1: 0}
    starter = node.state["starter"]
    assert (starter["mode"], starter["reason"]) == ("parked", "an import has opened /dev/nvidia0")
    assert node.attempt(1)["error"] == ""


def test_a_zygote_that_keeps_dying_is_started_less_and_less_often(start_node: StartNode, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os, pathlib, time\nwith open('starts', 'a') as f: f.write(f'{time.monotonic()}\\n')\nos._exit(5)"
    )
    node = start_node(REPORT, start="zygote", preload=["mine"])
    starts = tmp_path / "starts"
    node.prepare(1)
    assert node.state["starter"]["reason"] == "the zygote is being started again: it ended with exit code 5"
    eventually(lambda: starts.read_text().count("\n") >= 2, "it is started again", within_s=30)
    assert node.run(2) == {0: 0}


def test_a_zygote_that_does_not_answer_is_replaced(start_node: StartNode, tmp_path: Path) -> None:
    seam = tmp_path / "hasty.py"
    seam.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2] / 'src')!r})\n"
        "from evertrain.keeper import main, zygote\n"
        "zygote.FORK_LIMIT_S = 0.3\n"
        "main.main(sys.argv[1])\n"
    )
    node = start_node(REPORT, start="zygote", command=(str(seam),))
    node.wait_for(is_ready)
    os.kill(node.state["starter"]["pid"], signal.SIGSTOP)
    node.prepare(1)
    assert node.state["starter"]["reason"] == "the zygote is being started again: it had not forked after 0.3 s"
    node.go(1)
    node.wait_for(lambda state: node.phase(1) == "ended")
    assert node.output(1).split()[1] == "False"


def test_a_node_that_has_waited_has_ranks_of_any_number_prepared_and_running_at_once(start_node: StartNode) -> None:
    """What a standby does when it takes over: all that takes time has been done while it waited."""
    node = start_node(REPORT, start="zygote", nproc=4)
    node.wait_for(is_ready, 60)
    ranks = [8, 9, 10, 11]

    def seconds(attempt: int) -> float:
        began = time.monotonic()
        node.send(do="prepare", term=1, attempt=attempt, ranks=ranks, store=False)
        node.wait_for(lambda state: node.phase(attempt) == "prepared")
        return time.monotonic() - began

    took_s = seconds(7)
    node.send(do="go", term=1, attempt=7, ranks={str(rank): node.orders(7, rank, {}) for rank in ranks})
    node.wait_for(lambda state: node.phase(7) == "ended")
    assert [node.output(7, rank).split()[:2] for rank in ranks] == [[str(rank), "True"] for rank in ranks]
    # one that was slowed down by its neighbours on the machine says nothing about the next one
    assert min(took_s, seconds(8), seconds(9)) < 0.3
