"""Time counts only while somebody looks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from evertrain.agent import watch
from evertrain.agent.watch import Watch
from evertrain.observe import activity, pages
from evertrain.observe.activity import Usage
from evertrain.worker import page


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watch.time, "monotonic", clock.monotonic)
    return clock


@pytest.fixture
def writer(tmp_path: Path) -> page.PageWriter:
    path = str(tmp_path / "page")
    page.create(path, job="job", term=1, attempt=1, rank=3)
    return page.PageWriter(path)


def view(tmp_path: Path) -> pages.PageView:
    found, reason = pages.read(tmp_path / "page")
    assert found is not None, reason
    return found


def looks(node: Watch, clock: Clock, tmp_path: Path, seconds: float, every_s: float = 0.1) -> float:
    """How long the rank has stood still after looking for so long; 0.0 while that is not worth a word."""
    found = ()
    for _ in range(round(seconds / every_s)):
        clock.now += every_s
        found = node.look([view(tmp_path)])
    return found[0].still_s if found else 0.0


def test_standing_still_adds_up_and_a_step_ends_it(tmp_path: Path, clock: Clock, writer: page.PageWriter) -> None:
    node = Watch("node-0")
    writer.abs_step = 4
    writer.write()
    node.look([view(tmp_path)])
    assert looks(node, clock, tmp_path, 0.8) == 0.0
    assert looks(node, clock, tmp_path, 4.0) == pytest.approx(4.8)
    writer.abs_step = 5
    writer.write()
    assert looks(node, clock, tmp_path, 0.5) == 0.0


def test_a_write_without_news_is_no_progress(tmp_path: Path, clock: Clock, writer: page.PageWriter) -> None:
    node = Watch("node-0")
    writer.write()
    node.look([view(tmp_path)])
    looks(node, clock, tmp_path, 2.0)
    writer.write()
    assert looks(node, clock, tmp_path, 2.0) == pytest.approx(4.0)


def test_an_agent_that_was_away_has_seen_nothing(tmp_path: Path, clock: Clock, writer: page.PageWriter) -> None:
    node = Watch("node-0")
    writer.write()
    node.look([view(tmp_path)])
    clock.now += 3600.0
    (found,) = node.look([view(tmp_path)])
    assert found.still_s == 1.0


def test_rates_come_with_the_second_measurement(tmp_path: Path, clock: Clock, writer: page.PageWriter) -> None:
    node = Watch("node-0")
    assert writer.pid == os.getpid()
    writer.write()
    node.look([view(tmp_path)])
    looks(node, clock, tmp_path, 1.0)
    clock.now += 0.1
    (first,) = node.look([view(tmp_path)])
    assert first.cpu_fraction is None
    looks(node, clock, tmp_path, 2.0)
    (later,) = node.look([view(tmp_path)])
    assert later.cpu_fraction is not None and later.io_bytes_per_s is not None


def test_who_moves_is_described_when_asked_for(tmp_path: Path, clock: Clock, writer: page.PageWriter) -> None:
    node = Watch("node-0")
    writer.abs_step = 4
    writer.write_collective(b"0", 9, b"send 0->1", page.ENTERED)
    writer.write()
    assert node.look([view(tmp_path)]) == ()
    usage = activity.usage(os.getpid())
    assert usage is not None
    assert node.everyone([view(tmp_path)], {}) == (), "nobody has looked at its processes"
    (found,) = node.everyone([view(tmp_path)], {3: (clock.now, usage)})
    assert (found.rank, found.still_s, found.stopped, found.cpu_fraction) == (3, 0.0, False, None)
    assert found.inside is not None and str(found.inside) == "send 0->1 number 9 of group 0"
    assert node.look([view(tmp_path)]) == (), "it is still nobody's business"


def test_what_a_rank_did_for_us_is_no_work_of_its_own(
    tmp_path: Path, clock: Clock, writer: page.PageWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = Usage(cpu_s=1.0, io_bytes=0, faults=0, processes=1, stopped=False, uninterruptible=False, reads_stdin=False)
    now = [used]
    writer.write()
    monkeypatch.setattr(activity, "usage", lambda pid: now[0])
    node = Watch("node-0")
    looks(node, clock, tmp_path, 3.0)
    begun = {3: (clock.monotonic(), used)}
    now[0] = replace(used, cpu_s=1.3, faults=500, io_bytes=9_000)
    looks(node, clock, tmp_path, 0.6)
    node.leave_out(view(tmp_path).attempt, begun, {3: (clock.monotonic(), now[0])})
    looks(node, clock, tmp_path, 1.0)
    (seen,) = node.look([view(tmp_path)])
    assert (seen.cpu_fraction, seen.io_bytes_per_s, seen.faults_per_s) == (0.0, 0.0, 0.0)
    now[0] = replace(now[0], cpu_s=2.3)
    looks(node, clock, tmp_path, 1.0)
    (seen,) = node.look([view(tmp_path)])
    assert seen.cpu_fraction is not None and seen.cpu_fraction > 0.1
