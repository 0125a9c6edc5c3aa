"""Records get into rings whole or not at all, and come out so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from evertrain.trace import layout, rings
from evertrain.trace.reading import Reader
from support.trace_records import CAPACITY, TABLE, body

KILLED = Path(__file__).with_name("killed_writers.py")


@pytest.fixture
def shared() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="evertrain-test-") as folder:
        yield Path(folder)


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "a.ring")
    rings.create(path, writer="agent", capacity=CAPACITY, table=TABLE, job="j", node="n", rank=3, pid=7, attempt=2)
    return path


def write(writer: rings.Writer, count: int) -> None:
    for _ in range(count):
        number = writer.take()
        writer.put(number, body(number, "done"))


def numbers(reader: Reader, since: int = 0) -> list[int]:
    return [int(number) for number in reader.since(since).operations["number"]]


def kill(shared: Path, count: int, seed: int) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, KILLED, shared, str(count), str(seed)],
        capture_output=True,
        text=True,
        timeout=1000,
        env={**os.environ, "PYTHONPATH": str(KILLED.parents[1])},
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, int] = json.loads(done.stdout)
    return said


def test_a_writer_killed_at_any_moment_leaves_whole_records_only(shared: Path) -> None:
    said = kill(shared, 200, seed=1)
    assert said["unused"] < 100 and said["records"] > 1000 and said["places"] > 100


@pytest.mark.matrix
@pytest.mark.timeout(1000)
def test_ten_thousand_killed_writers(shared: Path) -> None:
    said = kill(shared, 10_000, seed=2)
    assert said["kills"] == 10_000 and said["unused"] < 5_000


@pytest.mark.parametrize("written", [*range(0, 129, 8), 1, 119, 121, 123, 124])
def test_a_record_that_is_there_in_part_is_not_there(path: str, written: int) -> None:
    """... whether what is under it is an older record or nothing; the same for a place of the table."""
    for before in (3, CAPACITY + 3):
        rings.create(path, writer="agent", capacity=CAPACITY, table=TABLE)
        write(rings.open_writer(path), before)
        new = layout.sealed(body(before + 1, "done"), before + 1)
        older = [number for number in range(1, before + 1) if number > before - CAPACITY]
        if written == 128:
            older = [*older, before + 1][-CAPACITY:]
        elif written and len(older) == CAPACITY:
            del older[0]
        with open(path, "r+b") as file, Reader(path) as reader:
            file.seek(layout.HEADER_BYTES + (TABLE + before % CAPACITY) * 128)
            file.write(new[:written])
            file.flush()
            assert reader.window(0, 1 << 63).operations["number"].tolist() == older

            for under in (rings.FREE, layout.sealed(body(70, "state"), 70)):
                file.seek(layout.HEADER_BYTES)
                file.write(new[:written] + under[written:])
                file.flush()
                expected = {0: under if any(under) else b"", 128: new}.get(written, b"")
                assert reader.table().tobytes() == expected


def test_readers_follow_and_count_what_they_missed(path: str) -> None:
    writer = rings.open_writer(path)
    with Reader(path) as reader:
        assert (reader.since(0).last, len(reader.since(0)), reader.head()) == (0, 0, 0)
        write(writer, 5)
        assert numbers(reader) == [1, 2, 3, 4, 5] and numbers(reader, 3) == [4, 5]
        write(writer, CAPACITY)
        news = reader.since(5)
        assert (news.last, news.missed, len(news)) == (CAPACITY + 5, 0, CAPACITY)
        write(writer, 2 * CAPACITY)
        news = reader.since(news.last)
        assert (news.last, news.missed, len(news)) == (3 * CAPACITY + 5, CAPACITY, CAPACITY)
        writer.lose(4)
        assert reader.lost() == 4


def test_a_record_that_another_thread_is_still_writing_is_waited_for_once(path: str) -> None:
    writer = rings.open_writer(path)
    write(writer, 2)
    with Reader(path) as reader:
        late = writer.take()
        write(writer, 2)
        assert numbers(reader) == [1, 2]
        writer.put(late, body(late, "done"))
        write(writer, 1)
        assert numbers(reader, 2) == [3, 4, 5, 6]
        writer.take()
        write(writer, 1)
        assert numbers(reader, 6) == []
        news = reader.since(6)
        assert (news.operations["number"].tolist(), news.last, news.missed) == ([8], 8, 1)


def test_the_next_writer_goes_on_after_the_last_record(path: str) -> None:
    write(rings.open_writer(path), 3)
    with open(path, "r+b") as file:  # it died after the record and before the count
        file.seek(layout.HEAD_AT)
        file.write((2).to_bytes(8, "little"))
    assert rings.open_writer(path).take() == 4


def test_records_of_all_kinds_by_time(path: str) -> None:
    writer = rings.open_writer(path)
    common = (1, 0, 0, 0, 0, 0, layout.NOBODY, 9, 0)
    for t in range(10, 40):
        operation = layout.OPERATION_STRUCT.pack(0, layout.KINDS["done"], *common, 0, 5, 1, 2, 3, t, *[0] * 10)
        flow = layout.FLOW_STRUCT.pack(0, layout.KINDS["flow"], *common, t, 100, *[0] * 17)
        host = layout.HOST_STRUCT.pack(0, layout.KINDS["host"], *common, t, 100, *[0] * 14)
        for whole in (operation, flow, host):
            writer.append(whole[8:])
    with Reader(path) as reader:
        seen = reader.window(35, 37)
        for records in (seen.operations, seen.flows, seen.hosts):
            assert records["t"].tolist() == [35, 36, 37]
        assert len(reader.window(0, 1 << 63)) == CAPACITY
        assert reader.header()._replace(monotonic_ns=0, wall_ns=0) == rings.Header(
            layout.LAYOUT, CAPACITY, TABLE, layout.WRITERS["agent"], 3, 7, 0, 2, 0, 0, "n", "j"
        )


def test_files_that_are_none_of_ours_are_named_in_one_line(path: str, tmp_path: Path) -> None:
    whole = Path(path).read_bytes()
    newer = bytearray(whole)
    newer[8:12] = (layout.LAYOUT + 1).to_bytes(4, "little")
    damaged = bytearray(whole)
    damaged[40] ^= 1
    cases = {
        "less than a header": b"", "begins with other bytes": os.urandom(8192), f"layout {layout.LAYOUT + 1}": newer,
        "cut off": whole[:-1], "damaged": damaged,
    }  # fmt: skip
    for said, content in cases.items():
        other = tmp_path / "other"
        other.write_bytes(content)
        with pytest.raises(ValueError, match=said) as caught:
            Reader(other)
        assert "\n" not in str(caught.value)
        with pytest.raises(ValueError):
            rings.open_writer(str(other))


def test_how_many_records_fit() -> None:
    assert rings.capacity_of(rings.SMALLEST_BYTES - 1) == 0
    for size in (rings.SMALLEST_BYTES, 4 << 20, (16 << 20) + 77):
        capacity = rings.capacity_of(size, 256)
        assert size - 128 < layout.size_of(capacity, 256) <= size
    # ten minutes of 200 operations a second
    assert rings.capacity_of(16 << 20, 256) >= 600 * 200
