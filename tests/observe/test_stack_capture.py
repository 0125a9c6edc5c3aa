"""Looks at real processes, in every state in which a rank may hang."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evertrain.model.stacks import CaptureOrder, Seen
from evertrain.observe import process_tree, py_spy, stack_capture
from evertrain.observe.stack_capture import Signal
from support import dead_disk, still
from support.waiting import eventually

ORDER = CaptureOrder(number=1, attempt=1)
NUMBER = signal.SIGRTMIN + 13
SHORTEST_PAUSE_S = 0.05
"""No healthy process may be stopped for longer."""

REFUSES = "echo 'Permission Denied: Try running again with elevated permissions' >&2; exit 1"

REGISTERED = """
import faulthandler, os, sys, time
file = open(os.environ["STACKS"], "a")
faulthandler.register({number}, file=file, all_threads=True, chain=False)
"""


@pytest.fixture
def start() -> Iterator[still.Start]:
    with still.processes() as start:
        yield start


def fake_py_spy(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Path:
    """In place of the real one; notes how it was called."""
    program = folder / "py-spy"
    calls = folder / "calls"
    calls.touch()
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{script}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(py_spy, "find", lambda: str(program))
    return calls


def functions(seen: Seen) -> list[str]:
    main = seen.dump.main
    return [frame.function for frame in main.frames] if main is not None else []


def registered(monkeypatch: pytest.MonkeyPatch, folder: Path, start: still.Start, code: str) -> tuple[int, Signal]:
    """A process that writes its stack down when it is asked to."""
    path = folder / "stacks"
    monkeypatch.setenv("STACKS", str(path))
    return start(REGISTERED.format(number=NUMBER) + code).pid, Signal(NUMBER, path)


def test_each_where_it_stands(start: still.Start) -> None:
    sleeper, holder, stopped = start(still.SLEEPER), start(still.GIL_HOLDER), start(still.SLEEPER)
    stopped.send_signal(signal.SIGSTOP)
    eventually(lambda: process_tree.own(2, stopped.pid).state == "stopped", "it is stopped", within_s=10)
    pids = {0: sleeper.pid, 1: holder.pid, 2: stopped.pid}
    seen, blind = stack_capture.look(pids, ORDER)
    assert blind == ()
    first, second, third = seen
    assert [one.pid for one in seen] == list(pids.values()) and [one.kind for one in seen] == ["trainer"] * 3
    assert functions(first)[0] == "wait_here" and first.state == "" and first.waits_in == "clock_nanosleep"
    assert functions(second)[0] == "hold" and second.dump.main is not None and second.dump.main.holds_gil
    assert functions(third)[0] == "wait_here" and third.state == "stopped"


def test_a_family(start: still.Start) -> None:
    process = start(still.FAMILY)
    seen, blind = stack_capture.look({5: process.pid}, ORDER)
    assert blind == () and {one.rank for one in seen} == {5}
    by_kind = {one.kind: one for one in seen}
    assert sorted(one.kind for one in seen) == ["checkpoint", "helper", "helper", "trainer"]
    assert functions(by_kind["checkpoint"])[0] == "save_checkpoint"
    (foreign,) = [one for one in seen if one.dump.command == "sleep 600"]
    assert foreign.dump.threads == () and foreign.dump.failure.startswith("no Python")
    assert foreign.waits_in == "clock_nanosleep"


def test_data_loaders(start: still.Start, tmp_path: Path) -> None:
    (tmp_path / "numbered.py").write_text(
        "import time\n"
        "class Numbers:\n"
        "    def __len__(self): return 100\n"
        "    def __getitem__(self, index):\n"
        "        if index: time.sleep(600)\n"
        "        return index\n"
    )
    code = (
        "from torch.utils.data import DataLoader\nfrom numbered import Numbers\n"
        "batches = iter(DataLoader(Numbers(), batch_size=1, num_workers=2))\n"
        "next(batches); print(flush=True); next(batches)"
    )
    process = start(code, cwd=tmp_path)

    def all_there() -> list[Seen]:
        seen, _ = stack_capture.look({0: process.pid}, ORDER)
        return seen if sum("Numbers.__getitem__" in functions(one) for one in seen) == 2 else []

    seen = eventually(all_there, "both workers are in their data", within_s=30)
    assert sorted(one.kind for one in seen) == ["loader", "loader", "trainer"]
    assert any("_next_data" in function for function in functions(seen[0]))


def test_on_a_dead_disk_and_never_signalled(
    start: still.Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "dead"
    folder.mkdir()
    try:
        with dead_disk.mounted(folder) as disk:
            code = f"def read_it():\n    print(flush=True); open({str(disk.file)!r}).read()\nread_it()"
            pid, way = registered(monkeypatch, tmp_path, start, code)

            def there() -> Seen | None:
                (seen,), blind = stack_capture.look({0: pid}, ORDER)
                return seen if seen.state == "uninterruptible" and not blind else None

            seen = eventually(there, "it waits for the disk", within_s=20)
            assert seen is not None and "read_it" in functions(seen)
            fake_py_spy(monkeypatch, tmp_path, REFUSES)
            (seen,), blind = stack_capture.look({0: pid}, ORDER, {0: way})
            assert functions(seen) == [] and seen.state == "uninterruptible"
            assert "it is uninterruptible, so no signal was sent" in blind[0]
            pending = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "Pnd" in line]
            assert all(line.endswith("0" * 16) for line in pending)
            disk.free()
            eventually(lambda: not Path(f"/proc/{pid}/wchan").read_text().startswith("request"), "freed", within_s=10)
    except OSError as error:
        pytest.skip(f"no file system of one's own here: {error}")


def test_who_has_ended(start: still.Start) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    (seen,), blind = stack_capture.look({0: gone.pid}, ORDER)
    assert seen.state == "ended" and seen.kind == "trainer" and blind == ()


def test_nobody_is_stopped(start: still.Start) -> None:
    """The process looks for the longest time in which it did not run; others on this machine may cause one, too."""
    code = """
import time
def busy():
    print(flush=True)
    worst, last = 0.0, time.perf_counter()
    end = last + 1.2
    while last < end:
        now = time.perf_counter()
        worst = max(worst, now - last)
        last = now
    print(worst, flush=True)
busy()
time.sleep(600)
"""
    worst = []
    for _ in range(6):
        process = start(code)
        looks = 0
        while (begun := time.monotonic()) and looks < 4:
            (seen,), blind = stack_capture.look({0: process.pid}, ORDER)
            assert blind == () and functions(seen)[0] == "busy", begun
            looks += 1
        assert process.stdout is not None
        worst.append(float(process.stdout.readline()))
        if worst[-1] < SHORTEST_PAUSE_S:
            return
    raise AssertionError(f"the longest pauses were {worst}")


def test_only_blamed_ranks_are_looked_at_with_what_stops_them(
    start: still.Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_py_spy(monkeypatch, tmp_path, "exit 1")
    one, two, stopped = start(still.SLEEPER), start(still.SLEEPER), start(still.SLEEPER)
    stopped.send_signal(signal.SIGSTOP)
    eventually(lambda: process_tree.own(2, stopped.pid).state == "stopped", "it is stopped", within_s=10)
    stack_capture.look({0: one.pid, 1: two.pid, 2: stopped.pid}, CaptureOrder(number=1, attempt=1, deep=(1, 2)))
    made = calls.read_text().splitlines()
    assert [line for line in made if "--native" in line] == [f"dump --native --json --pid {two.pid}"]
    assert all("--nonblocking" in line for line in made if "--native" not in line)
    assert len([line for line in made if line.endswith(str(one.pid))]) == 2, "a torn dump is tried once more"


def test_native_frames_of_a_blamed_rank(start: still.Start) -> None:
    process = start(still.GIL_HOLDER)
    for _ in range(3):  # reading symbols takes its time on a busy machine
        (seen,), blind = stack_capture.look({0: process.pid}, CaptureOrder(number=1, attempt=1, deep=(0,)))
        assert blind == () and "hold" in functions(seen)
        if "clock_nanosleep" in functions(seen):
            break
    assert "clock_nanosleep" in functions(seen)
    assert Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "S", "it goes on"


def test_several_looks(start: still.Start) -> None:
    process = start(still.FAMILY)
    began = time.monotonic()
    seen, _ = stack_capture.look({0: process.pid}, CaptureOrder(number=1, attempt=1, looks=4, every_s=0.1))
    assert time.monotonic() - began >= 0.3
    assert sum(one.kind == "trainer" for one in seen) == 4 and sum(one.kind != "trainer" for one in seen) == 3


def test_a_look_is_bounded(start: still.Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_py_spy(monkeypatch, tmp_path, "exec sleep 60")
    pids = {rank: start(still.SLEEPER).pid for rank in range(6)}
    deadline = time.monotonic() + 20
    while not all("nanosleep" in Path(f"/proc/{pid}/wchan").read_text() for pid in pids.values()):
        assert time.monotonic() < deadline, "they do not come to sleep"
        time.sleep(0.02)
    began = time.monotonic()
    seen, blind = stack_capture.look(pids, ORDER, limit_s=1.5)
    assert time.monotonic() - began < 5.0
    assert len(seen) == 6 and {one.dump.threads for one in seen} == {()}
    assert all(one.waits_in == "clock_nanosleep" for one in seen), "what the kernel tells is there in any case"
    assert any("no time" in line for line in blind) and any("py-spy has not answered" in line for line in blind)


# --- where py-spy may not look


def test_without_py_spy_ranks_are_asked_by_the_signal(
    start: still.Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, way = registered(monkeypatch, tmp_path, start, still.SLEEPER)
    monkeypatch.setattr(py_spy, "find", lambda: None)
    (seen,), blind = stack_capture.look({4: pid}, ORDER, {4: way})
    assert functions(seen)[0] == "wait_here" and seen.dump.pid == pid and seen.dump.failure == ""
    assert any("rank 4: py-spy is missing" in line and "pip install py-spy" in line for line in blind)
    (again,), _ = stack_capture.look({4: pid}, ORDER, {4: way})
    assert functions(again) == functions(seen), "only what is new in the file counts"


def test_the_signal_works_while_native_code_holds_the_interpreter(
    start: still.Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, way = registered(monkeypatch, tmp_path, start, still.GIL_HOLDER.replace("sleep(600)", "pause()"))
    fake_py_spy(monkeypatch, tmp_path, REFUSES)
    (seen,), blind = stack_capture.look({0: pid}, ORDER, {0: way})
    assert functions(seen)[0] == "hold"
    assert any("--cap-add SYS_PTRACE" in line for line in blind)


def test_forks_are_asked_and_strangers_are_not(
    start: still.Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = f"subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(600)'])"
    family = still.FAMILY.replace("    time.sleep(0.3)\n", f"    {stranger}\n    time.sleep(0.3)\n")
    pid, way = registered(monkeypatch, tmp_path, start, family)
    fake_py_spy(monkeypatch, tmp_path, REFUSES)
    seen, _ = stack_capture.look({0: pid}, ORDER, {0: way})
    named = {functions(one)[0]: one.kind for one in seen if functions(one)}
    assert named == {"train": "trainer", "save_checkpoint": "checkpoint", "read_along": "helper"}
    assert all(one.state == "" for one in seen)
    for one in seen:
        os.kill(one.pid, 0)  # the signal has ended none of them


def test_no_signal_where_none_is_registered(
    start: still.Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(still.SLEEPER)
    (tmp_path / "stacks").touch()
    fake_py_spy(monkeypatch, tmp_path, REFUSES)
    for ways in ({}, {0: Signal(NUMBER, tmp_path / "stacks")}):
        (seen,), blind = stack_capture.look({0: process.pid}, ORDER, ways)
        assert "SYS_PTRACE" in blind[0] and "registered no signal" in blind[0]
        assert seen.dump.failure == "py-spy may not read it"
        assert process.poll() is None


def test_a_handler_of_somebody_else_is_not_asked(
    start: still.Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(f"import signal, time\nsignal.signal({NUMBER}, lambda *_: exit(9))\n{still.SLEEPER}")
    (tmp_path / "stacks").touch()
    fake_py_spy(monkeypatch, tmp_path, REFUSES)
    _, blind = stack_capture.look({0: process.pid}, ORDER, {0: Signal(NUMBER, tmp_path / "stacks")})
    assert "it does not answer where it should" in blind[0] and process.poll() is None


def test_a_user_who_may_not_look(start: still.Start, tmp_path: Path) -> None:
    """The real py-spy, refused by the kernel."""
    if os.getuid() != 0:
        pytest.skip("only root can be somebody else")
    program = py_spy.find()
    assert program is not None
    process = start(still.SLEEPER)
    nobody = tmp_path / "py-spy"
    nobody.write_text(f'#!/bin/sh\nexec setpriv --reuid 65534 --regid 65534 --clear-groups {program} "$@"\n')
    nobody.chmod(0o755)
    answer = py_spy.dump(str(nobody), process.pid, 10.0)
    assert answer.problem == "refused" and answer.text == ""
