"""A page can be read in whatever state its writer died; what cannot be read is blind, with a reason."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from evertrain.observe import pages
from evertrain.worker import mapping, page
from support.effort import examples


@pytest.fixture
def path(tmp_path: Path) -> str:
    made = str(tmp_path / "page")
    page.create(made, job="job", term=3, attempt=2, rank=5)
    return made


def test_what_is_written_is_read(path: str) -> None:
    writer = page.PageWriter(path)
    writer.abs_step, writer.rel_step, writer.reached = 40, 7, 39
    writer.progress_time, writer.passed_time, writer.step_s = 10.5, 11.5, 0.25
    writer.phase = b"evaluate"
    writer.write_collective(b"tp", 17, b"allreduce", page.ENTERED, 9.5)
    writer.loss, writer.flags = float("inf"), page.HAS_LOSS | page.ENV_CHANGED
    writer.set_metrics({"accuracy": 0.5, "lr": 1e-3})
    writer.write(12.0)

    view, reason = pages.read(path)
    assert view is not None and reason == ""
    assert (view.job, view.term, view.attempt, view.rank, view.pid) == ("job", 3, 2, 5, os.getpid())
    assert (view.abs_step, view.rel_step, view.reached, view.resumed_step) == (40, 7, 39, -1)
    assert (view.written_time, view.progress_time, view.passed_time, view.step_s) == (12.0, 10.5, 11.5, 0.25)
    assert view.collective == pages.Collective("tp", 17, "allreduce", "entered", 9.5)
    assert (view.phase, view.loss, view.grad_norm, view.tokens) == ("evaluate", float("inf"), None, None)
    assert view.metrics == {"accuracy": 0.5, "lr": 1e-3} and view.env_changed


def test_the_newest_write_counts(path: str) -> None:
    writer = page.PageWriter(path)
    for step in range(1, 6):
        writer.abs_step = step
        writer.write()
        view, _ = pages.read(path)
        assert view is not None and (view.abs_step, view.sequence) == (step, step)


def test_a_torn_slot_leaves_the_one_before(path: str) -> None:
    writer = page.PageWriter(path)
    for step in (1, 2):
        writer.abs_step = step
        writer.write()
    raw = bytearray(Path(path).read_bytes())
    second = page.HEADER_BYTES + page.SLOT_BYTES if writer.sequence % 2 == 0 else page.HEADER_BYTES
    for at in (0, 8, 100, page.METRICS_AT - 8, page.METRICS_AT, page.SLOT_BYTES - 8):
        torn = raw.copy()
        torn[second + at] ^= 0xFF
        view, _ = pages.parse(bytes(torn))
        assert view is not None and view.abs_step == 1


def test_a_torn_collective_leaves_the_one_before(path: str) -> None:
    writer = page.PageWriter(path)
    writer.write()
    for number in (1, 2):
        writer.write_collective(b"0", number, b"allreduce", page.DONE, 5.0 + number)
    raw = bytearray(Path(path).read_bytes())
    for at in range(page.COLLECTIVE.size):
        torn = raw.copy()
        torn[page.COLLECTIVES_AT + page.COLLECTIVE.size + at] ^= 0xFF
        view, _ = pages.parse(bytes(torn))
        assert view is not None and (view.collective.seq, view.collective.time) == (1, 6.0)
    view, _ = pages.parse(bytes(raw))
    assert view is not None and view.collective.seq == 2


def test_a_collective_written_in_the_middle_of_another_is_the_last(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = page.PageWriter(path)
    writer.write()
    pack = page._pack_collective

    def interrupted(*fields: object) -> bytes:
        monkeypatch.setattr(page, "_pack_collective", pack)
        writer.write_collective(b"0", 2, b"allreduce", page.ENTERED)
        writer.write_collective(b"0", 2, b"allreduce", page.DONE)
        return pack(*fields)

    monkeypatch.setattr(page, "_pack_collective", interrupted)
    writer.write_collective(b"0", 1, b"allreduce", page.ENTERED)
    view, _ = pages.read(path)
    assert view is not None and (view.collective.seq, view.collective.state) == (2, "done")


def test_the_last_losses_are_kept_the_later_of_two_for_one_step(path: str) -> None:
    writer = page.PageWriter(path)
    for step in range(1, 301):
        writer.remember_loss(10 * step, step / 3)
    writer.remember_loss(3000, float("inf"))
    expected = {10 * step: step / 3 for step in range(46, 300)}
    assert pages.losses(path) == {**expected, 3000: float("inf")}
    assert len(expected) + 2 == page.LOSSES


def test_a_pair_that_was_being_written_is_the_only_one_lost(path: str) -> None:
    writer = page.PageWriter(path)
    for step in range(page.LOSSES + 10):
        writer.remember_loss(step, float(step))
    raw = bytearray(Path(path).read_bytes())
    last = page.LOSSES_AT + 9 * page.LOSS.size
    older = struct.pack("@Qqd", 10, 9, 9.0)
    for done in range(1, 20):  # so many bytes of the new pair had arrived when the writer died
        torn = raw.copy()
        torn[last + done : last + page.LOSS.size] = older[done:].ljust(page.LOSS.size - done, b"\xff")
        Path(path).write_bytes(torn)
        assert pages.losses(path) == {step: float(step) for step in range(10, page.LOSSES + 9)}


def test_no_losses_where_there_are_none_or_no_page(path: str, tmp_path: Path) -> None:
    assert pages.losses(path) == {}
    assert pages.losses(tmp_path / "none") == {}
    raw = bytearray(Path(path).read_bytes())
    Path(path).write_bytes(raw[: page.LOSSES_AT])
    assert pages.losses(path) == {}


def test_remembering_a_loss_takes_about_a_microsecond(path: str) -> None:
    writer = page.PageWriter(path)
    best_s = 1.0
    for _ in range(20):
        began = time.perf_counter()
        for step in range(500):
            writer.remember_loss(step, 0.5)
        best_s = min(best_s, (time.perf_counter() - began) / 500)
    assert best_s < 5e-6, "generous: the machine may be busy"


def test_a_new_page_has_nothing_to_say_yet(path: str) -> None:
    assert pages.read(path) == (None, "nothing written yet")


def test_an_unknown_layout_is_blind(path: str) -> None:
    raw = bytearray(Path(path).read_bytes())
    struct.pack_into("@I", raw, 8, page.LAYOUT + 1)
    view, reason = pages.parse(bytes(raw))
    assert view is None and f"layout {page.LAYOUT + 1}" in reason


@pytest.mark.parametrize("raw", [b"", b"short", bytes(page.SIZE), b"x" * page.SIZE])
def test_garbage_is_blind(raw: bytes) -> None:
    view, reason = pages.parse(raw)
    assert view is None and reason


def test_both_slots_damaged_is_blind(path: str) -> None:
    page.PageWriter(path).write()
    raw = bytearray(Path(path).read_bytes())
    raw[page.HEADER_BYTES + 40] ^= 1
    raw[page.HEADER_BYTES + page.SLOT_BYTES + 40] ^= 1
    assert pages.parse(bytes(raw)) == (None, "both slots are damaged")


def test_a_missing_page_is_blind(tmp_path: Path) -> None:
    view, reason = pages.read(tmp_path / "none")
    assert view is None and "No such file" in reason


def test_text_is_cut_and_escaped(path: str) -> None:
    writer = page.PageWriter(path)
    writer.phase = page.text("\x1b[31mred\n", 32)
    writer.write_collective(page.text("ü" * 100, 48), 1, b"", page.DONE)
    writer.set_metrics({f"metric {index}": index for index in range(20)})
    writer.write()
    view, _ = pages.read(path)
    assert view is not None
    assert view.phase == r"\x1b[31mred\n" and view.collective.group.startswith("üüü")
    assert len(view.metrics) == page.MAX_METRICS


def test_creating_leaves_no_descriptor_and_a_private_file(path: str) -> None:
    before = set(os.listdir("/proc/self/fd"))
    page.PageWriter(path).write()
    assert set(os.listdir("/proc/self/fd")) == before
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_no_room_names_the_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=rf"{page.SIZE:,} bytes are needed, .* are free in"):
        page.create(str(tmp_path / "page"), job="job", term=1, attempt=1, rank=0)
    assert list(tmp_path.iterdir()) == []


def test_a_running_writer_can_be_read_at_any_time(path: str) -> None:
    writer = page.PageWriter(path)
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            writer.write()

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.05)
        last = 0
        for _ in range(200):
            view, reason = pages.read(path)
            assert view is not None, reason
            assert view.sequence >= last
            last = view.sequence
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_mapped_bytes_reach_the_file(tmp_path: Path) -> None:
    mapping.allocate(str(tmp_path / "file"), 8192)
    mapping.map_file(str(tmp_path / "file"))[8000:8003] = b"abc"
    assert (tmp_path / "file").read_bytes()[8000:8003] == b"abc"


BUSY = """
import itertools, os, random, struct, sys
sys.path.insert(0, sys.argv[1])
from evertrain.worker import page
def write_for_ever(path):
    writer = page.PageWriter(path)
    for step in itertools.count():
        writer.abs_step = writer.rel_step = step
        writer.phase = b"%d" % step
        writer.write()
        writer.write_collective(b"%d" % step, step, b"%d" % step, step % 3)
for line in sys.stdin:                     # each line: fork a writer on this page, tell its pid
    pid = os.fork()
    if pid == 0:
        write_for_ever(line.strip())
    print(pid, flush=True)
    os.waitpid(pid, 0)                     # it ends by SIGKILL
    print("dead", flush=True)
"""


def _checked(path: str) -> pages.PageView:
    view, reason = pages.read(path)
    assert view is not None, reason
    step, group = view.abs_step, view.collective.group
    assert step == view.rel_step == int(view.phase)
    if not group:
        assert view.sequence == step + 1 and step <= 1
        return view
    assert group == view.collective.op == str(view.collective.seq)
    assert view.collective.state == ("none", "entered", "done")[view.collective.seq % 3]
    # each of the two may be one behind: it was being written
    assert abs(view.collective.seq - step) <= 1 and view.sequence == step + view.collective.seq + 2
    return view


@pytest.mark.timeout(300)
def test_ten_thousand_deaths_and_stops_in_mid_write(tmp_path: Path) -> None:
    """9,750 SIGSTOPs and 250 SIGKILLs at random moments of a writer that does nothing but write; a quarter of them in
    the usual run."""
    lives = examples(250)
    rng = random.Random(7)
    source = str(Path(page.__file__).parents[2])
    forker = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", BUSY, source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert forker.stdin is not None and forker.stdout is not None
    path = str(tmp_path / "page")
    stops = kills = moved = pid = 0
    try:
        for life in range(lives):
            page.create(path, job="job", term=1, attempt=life, rank=0)
            print(path, file=forker.stdin, flush=True)
            pid = int(forker.stdout.readline())
            deadline = time.monotonic() + 10
            while pages.read(path)[0] is None:
                assert time.monotonic() < deadline, "the writer has not begun"
            last = -1
            for _ in range(39):
                time.sleep(rng.random() * 2e-4)
                os.kill(pid, signal.SIGSTOP)
                _wait_stopped(pid)
                seen = _checked(path).sequence
                assert seen >= last
                moved += seen > last
                last = seen
                stops += 1
                os.kill(pid, signal.SIGCONT)
            time.sleep(rng.random() * 2e-4)
            os.kill(pid, signal.SIGKILL)
            assert forker.stdout.readline() == "dead\n"
            assert _checked(path).sequence >= last
            kills += 1
            pid = 0
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
        forker.kill()
        forker.wait()
        forker.stdin.close()
        forker.stdout.close()
    assert (stops, kills) == (39 * lives, lives)
    assert moved > 32 * lives, "between two stops the writer has written, as a rule"


def _wait_stopped(pid: int) -> None:
    deadline = time.monotonic() + 10
    while True:
        with open(f"/proc/{pid}/stat", "rb") as file:
            if file.read().rsplit(b") ", 1)[1][:1] == b"T":
                return
        assert time.monotonic() < deadline


def test_a_reader_sees_every_change_and_parses_nothing_twice(path: str) -> None:
    reader = pages.Reader(path)
    assert reader.read() == (None, "nothing written yet")
    writer = page.PageWriter(path)
    for step in range(5):
        writer.abs_step = step
        writer.write()
        view, reason = reader.read()
        assert view is not None and (view.abs_step, reason) == (step, "")
        assert reader.read()[0] is view
    reader.close()


def test_a_reader_of_a_page_that_is_not_there_yet_finds_it_later(tmp_path: Path) -> None:
    reader = pages.Reader(tmp_path / "later")
    assert reader.read()[0] is None
    page.create(str(tmp_path / "later"), job="job", term=1, attempt=1, rank=0)
    page.PageWriter(str(tmp_path / "later")).write()
    view, _ = reader.read()
    assert view is not None and view.rank == 0
    reader.close()


def remember(writer: page.PageWriter, count: int, *, loss: float = 0.0, flags: int = 0) -> None:
    writer.remember_step(count, 10 * count, count, count / 4, 0.5, loss, 3.0, 100.0 * count, flags, 7)


def test_steps_are_read_once_and_in_order(path: str) -> None:
    writer, reader = page.PageWriter(path), pages.StepReader(path)
    assert reader.read() == []
    remember(writer, 1, loss=float("inf"), flags=page.HAS_LOSS)
    remember(writer, 2, flags=page.HAS_GRAD_NORM | page.HAS_TOKENS)
    first, second = reader.read()
    assert first == pages.StepRecord(
        count=1, step=10, rel_step=1, time=0.25, declared_s=0.5, stage=7, loss=float("inf"), grad_norm=None,
        tokens=None, is_open=False,
    )  # fmt: skip
    assert (second.loss, second.grad_norm, second.tokens) == (None, 3.0, 200.0)
    assert reader.read() == []
    for count in range(3, page.STEPS + 3):
        remember(writer, count)
    assert [one.count for one in reader.read()] == list(range(3, page.STEPS + 3)), "all that the ring holds"
    for count in range(page.STEPS + 3, 3 * page.STEPS):
        remember(writer, count)
    assert [one.count for one in reader.read()] == list(range(2 * page.STEPS, 3 * page.STEPS)), "what it still holds"
    reader.close()


def test_a_step_of_which_more_will_be_known_is_waited_for(path: str) -> None:
    writer, reader = page.PageWriter(path), pages.StepReader(path)
    remember(writer, 1, flags=page.IS_OPEN)
    assert reader.read() == []
    remember(writer, 1, loss=2.0, flags=page.HAS_LOSS)
    assert [one.loss for one in reader.read()] == [2.0]
    remember(writer, 2, flags=page.IS_OPEN)
    remember(writer, 3, flags=page.IS_OPEN)
    assert [one.count for one in reader.read()] == [2], "it is known by now that nothing more comes"
    reader.close()


def test_a_step_that_is_being_written_is_read_later(path: str) -> None:
    writer, reader = page.PageWriter(path), pages.StepReader(path)
    remember(writer, 1)
    remember(writer, 2)
    raw = bytearray(Path(path).read_bytes())
    whole = bytes(raw)
    raw[page.STEPS_AT + page.STEP.size + 20] ^= 0xFF
    Path(path).write_bytes(raw)
    assert [one.count for one in reader.read()] == [1]
    Path(path).write_bytes(whole)
    assert [one.count for one in reader.read()] == [2]
    assert pages.losses(path) == {}, "another ring"
    reader.close()


def test_no_steps_where_there_is_no_page(tmp_path: Path) -> None:
    assert pages.StepReader(tmp_path / "none").read() == []
    (tmp_path / "short").write_bytes(b"short")
    assert pages.StepReader(tmp_path / "short").read() == []
    (tmp_path / "garbage").write_bytes(bytes(page.SIZE))
    reader = pages.StepReader(tmp_path / "garbage")
    assert reader.read() == []
    page.create(str(tmp_path / "garbage"), job="job", term=1, attempt=1, rank=0)
    remember(page.PageWriter(str(tmp_path / "garbage")), 1)
    assert len(reader.read()) == 1
    reader.close()
