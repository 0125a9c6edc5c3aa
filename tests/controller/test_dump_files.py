"""Flight recorders' dumps beside their capture: whole, as they were sent, and gone with it."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import pytest

from evertrain.controller import capture_files, dump_files
from evertrain.model.stacks import RecorderDumps


def sent(**dumps: bytes) -> bytes:
    packed = {int(rank.removeprefix("rank")): gzip.compress(raw) for rank, raw in dumps.items()}
    return msgspec.msgpack.encode(RecorderDumps(node="node-0", dumps=packed))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert dump_files.nodes(tmp_path, 3) == []
    dump_files.write(tmp_path, 3, "node-1", b"old")
    dump_files.write(tmp_path, 3, "node-1", sent(rank2=b"{}", rank3=b"[1]"))
    dump_files.write(tmp_path, 3, "node-0", sent())
    assert dump_files.nodes(tmp_path, 3) == ["node-0", "node-1"]
    assert dump_files.unpacked(dump_files.read(tmp_path, 3, "node-1")) == {2: b"{}", 3: b"[1]"}
    assert dump_files.unpacked(dump_files.read(tmp_path, 3, "node-0")) == {}


def test_they_go_with_their_capture(tmp_path: Path) -> None:
    from cli.test_stacks import stuck

    dump_files.write(tmp_path, 1, "node-0", sent())
    for number in range(1, capture_files.MOST + 1):
        capture_files.write(tmp_path, stuck(number))
    assert dump_files.nodes(tmp_path, 1) == ["node-0"]
    capture_files.write(tmp_path, stuck(capture_files.MOST + 1))
    assert dump_files.nodes(tmp_path, 1) == []


def test_those_of_a_capture_that_was_never_written_go_with_the_others_of_its_age(tmp_path: Path) -> None:
    from cli.test_stacks import stuck

    for number in (1, 2, 3):
        dump_files.write(tmp_path, number, "node-0", sent())
    capture_files.write(tmp_path, stuck(3))
    capture_files.write(tmp_path, stuck(capture_files.MOST))
    assert sorted(dump_files.numbers(tmp_path)) == [1, 2, 3], "they may be judged still"
    capture_files.write(tmp_path, stuck(capture_files.MOST + 2))
    assert dump_files.numbers(tmp_path) == [3], "its capture is there"


@pytest.mark.parametrize(
    "content",
    [
        b"nonsense",
        msgspec.msgpack.encode({"node": "node-0", "dumps": {0: b"no gzip"}}),
        msgspec.msgpack.encode({"node": "node-0", "dumps": {0: gzip.compress(b"cut short" * 50)[:-9]}}),
    ],
    ids=["nonsense", "no gzip", "cut short"],
)
def test_damage_is_one_line(content: bytes) -> None:
    with pytest.raises(ValueError) as raised:
        dump_files.unpacked(content)
    assert "\n" not in str(raised.value)


def test_one_that_unpacks_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump_files, "_MOST_BYTES", 1 << 20)
    assert dump_files.unpacked(sent(rank0=bytes(1 << 20)))[0] == bytes(1 << 20)
    with pytest.raises(ValueError, match="larger than 1 MiB"):
        dump_files.unpacked(sent(rank0=bytes((1 << 20) + 1)))
