"""Seconds of the ranks that are watched, from the rings that they write."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from evertrain.agent.pulsing import PAST_S, Pulsing
from evertrain.agent.rings import Rings
from evertrain.model.collectives import Pulse, Watch
from evertrain.model.config import TraceConfig
from evertrain.model.spec import AgentSpec
from evertrain.trace import layout, rings
from support.traced import operation

SECOND = 1_000_000_000


@pytest.fixture
def node(tmp_path: Path) -> Rings:
    spec = AgentSpec(
        job="job", run_id="job-1", node="gpu02", node_dir=str(tmp_path), disk_dir="", log_root="",
        controller_url="", token_file="", fired_dir="", trace=TraceConfig(hook_mib=1, writer_mib=1),
    )  # fmt: skip
    made = Rings(spec)
    made.prepare(1, (0, 1), 1)
    return made


def pulsing(node: Rings, tmp_path: Path) -> Pulsing:
    return Pulsing(node, lambda attempt, rank: tmp_path / f"a{attempt}-r{rank}", lambda: None)


def write(node: Rings, rank: int, start_ns: int, end_ns: int, every_ns: int) -> None:
    """Operations that end at equal intervals."""
    writer = rings.open_writer(str(node.path(1, rank, "hook")))
    for at, done in enumerate(range(start_ns, end_ns, every_ns)):
        began = done - every_ns // 4
        writer.append(operation("done", rank, at + 1, began, wait_ns=began, done_ns=done)[8:])


def of(found: tuple[Pulse, ...], rank: int) -> list[Pulse]:
    return [one for one in found if one.rank == rank]


def test_a_rank_that_comes_to_be_watched_brings_its_past_along(node: Rings, tmp_path: Path) -> None:
    now = time.monotonic_ns()
    start = max(0, now - 50 * SECOND)
    write(node, 0, start, now, SECOND // 4)
    found = of(pulsing(node, tmp_path).look(Watch(1, (0,)), now), 0)
    assert len(found) == PAST_S
    assert all(one.streams[0].interval_s == pytest.approx(0.25) for one in found)
    assert all(one.streams[0].ended in (3, 4) for one in found) and not any(one.in_flight for one in found)
    assert [one.number for one in found] == sorted({one.number for one in found})


def test_each_second_is_told_a_few_times_and_no_end_twice(node: Rings, tmp_path: Path) -> None:
    now = time.monotonic_ns()
    watcher = pulsing(node, tmp_path)
    seen: dict[int, Pulse] = {}
    for second in range(8):
        at = now + second * SECOND
        found = of(watcher.look(Watch(1, (0,)), at), 0)
        seen |= {one.number: one for one in found}
        write(node, 0, at + SECOND // 10, at + SECOND, SECOND // 5)
    assert len(found) == 3, "its past is known by now"
    later = [one for one in seen.values() if one.number > now // 1_000_000]
    assert len(later) == 7 and sum(one.streams[0].ended for one in later) == 7 * 5 - 1


def test_what_a_rank_waits_in_is_told(node: Rings, tmp_path: Path) -> None:
    now = time.monotonic_ns()
    write(node, 0, now - 3 * SECOND, now, SECOND // 4)
    watcher = pulsing(node, tmp_path)
    watcher.look(Watch(1, (0,)), now)
    writer = rings.open_writer(str(node.path(1, 0, "hook")))
    writer.set_place(0, operation("blocked", 0, 99, now, wait_ns=now))
    newest = of(watcher.look(Watch(1, (0,)), now + 3 * SECOND), 0)[-1]
    assert newest.in_flight and newest.still_s == pytest.approx(3.25, abs=0.01) and not newest.streams
    writer.free_place(0)
    assert not of(watcher.look(Watch(1, (0,)), now + 4 * SECOND), 0)[-1].in_flight


def test_who_is_not_watched_is_not_read(node: Rings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from evertrain.trace import reading

    opened: list[str] = []
    original: Callable[..., None] = reading.Reader.__init__

    def noted(self: reading.Reader, path: Path) -> None:
        opened.append(Path(path).name)
        original(self, path)

    monkeypatch.setattr(reading.Reader, "__init__", noted)
    watcher = pulsing(node, tmp_path)
    now = time.monotonic_ns()
    assert watcher.look(None, now) == () and opened == []
    watcher.look(Watch(1, (1,)), now)
    watcher.look(Watch(1, (1,)), now + SECOND)
    assert opened == ["a1-r1-hook.ring"]
    assert watcher.look(None, now + 2 * SECOND) == ()


def test_a_rank_without_a_ring_is_left_out(node: Rings, tmp_path: Path) -> None:
    found = pulsing(node, tmp_path).look(Watch(1, (0, 7)), time.monotonic_ns())
    assert {one.rank for one in found} <= {0}
    node.path(1, 1, "hook").write_bytes(b"nothing")
    assert layout.MAGIC not in node.path(1, 1, "hook").read_bytes()
    assert of(pulsing(node, tmp_path).look(Watch(1, (1,)), time.monotonic_ns()), 1) == []
