"""Bytes of the ranks reach the console as they are, whole lines where there are lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from evertrain.cli import tail as tailing
from evertrain.cli.console import Console, Show, Streams
from evertrain.cli.tail import Tail


class Screen:
    """What was written, in order."""

    def __init__(self) -> None:
        self.pieces: list[tuple[str, bytes]] = []

    def __call__(self, stream: str, data: bytes) -> None:
        self.pieces.append((stream, data))

    def of(self, stream: str) -> bytes:
        return b"".join(data for where, data in self.pieces if where == stream)


@pytest.fixture
def screen() -> Screen:
    return Screen()


@pytest.fixture
def tail(tmp_path: Path, screen: Screen) -> Callable[..., Tail]:
    def make(
        console: Console | None = None, nproc: int = 2, world_size: int = 2, nodes: tuple[str, ...] | None = None
    ) -> Tail:
        return Tail(tmp_path, console or Console(), nproc, world_size, screen, nodes)

    return make


def write(root: Path, data: bytes, *, attempt: int = 1, rank: int = 0, stream: str = "stdout") -> None:
    folder = root / f"attempt_{attempt}" / str(rank)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{stream}.log").open("ab") as out:
        out.write(data)


def test_streams_stay_apart_and_files_may_come_late(tmp_path: Path, tail: Callable[..., Tail], screen: Screen) -> None:
    made = tail()
    assert made.pump() is False
    write(tmp_path, b"out\n")
    write(tmp_path, b"err\n", rank=1, stream="stderr")
    assert made.pump() is True
    assert (screen.of("stdout"), screen.of("stderr")) == (b"out\n", b"err\n")
    write(tmp_path, b"second attempt\n", attempt=2)
    made.pump()
    assert screen.of("stdout") == b"out\nsecond attempt\n"


def test_bytes_that_are_not_text_and_without_newline_come_through(
    tmp_path: Path, tail: Callable[..., Tail], screen: Screen
) -> None:
    noise = bytes(range(256)) * 5000
    made = tail()
    write(tmp_path, noise)
    made.drain()
    assert screen.of("stdout") == noise


def test_a_half_line_waits_for_its_end_so_that_lines_of_ranks_stay_whole(
    tmp_path: Path, tail: Callable[..., Tail], screen: Screen
) -> None:
    made = tail()
    write(tmp_path, b"loss")
    made.pump()
    write(tmp_path, b"other rank\n", rank=1)
    made.pump()
    write(tmp_path, b" 0.5\n")
    made.pump()
    assert screen.of("stdout") == b"other rank\nloss 0.5\n"


def test_a_prompt_is_not_held_back_for_long(
    tmp_path: Path, tail: Callable[..., Tail], screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tailing.PATIENCE_S, Show.PLAIN, 0.01)
    made = tail()
    write(tmp_path, b"(Pdb) ")
    made.pump()
    time.sleep(0.02)
    made.pump()
    assert screen.of("stdout") == b"(Pdb) "


def test_output_of_earlier_runs_is_not_shown_again(tmp_path: Path, tail: Callable[..., Tail], screen: Screen) -> None:
    write(tmp_path, b"old\n", attempt=3)
    made = tail()
    write(tmp_path, b"new\n", attempt=4)
    made.drain()
    assert screen.of("stdout") == b"new\n"


def test_tee_puts_the_ranks_prefix_before_each_line(tmp_path: Path, tail: Callable[..., Tail], screen: Screen) -> None:
    made = tail(Console(tee=Streams(3), role="trainer"), nproc=2, world_size=4)
    write(tmp_path, b"one\ntwo\r\nthr", rank=3)
    write(tmp_path, b"bad\n", rank=0, stream="stderr")
    made.pump()
    write(tmp_path, b"ee", rank=3)
    made.drain()
    assert screen.of("stdout") == b"[trainer1]:one\n[trainer1]:two\r\n[trainer1]:three"
    assert screen.of("stderr") == b"[trainer0]:bad\n"


def test_a_line_shown_in_two_parts_has_one_prefix(
    tmp_path: Path, tail: Callable[..., Tail], screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tailing.PATIENCE_S, Show.PREFIXED, 0.0)
    made = tail(Console(tee=Streams(1)))
    write(tmp_path, b"50 %")
    made.pump()
    time.sleep(0.001)
    made.pump()
    write(tmp_path, b" 100 %\nnext\n")
    made.drain()
    assert screen.of("stdout") == b"[default0]:50 % 100 %\n[default0]:next\n"


def test_the_prefix_follows_torchelastics_template(tmp_path: Path, tail: Callable[..., Tail], screen: Screen) -> None:
    made = tail(Console(tee=Streams(1), template="<${role_name} ${rank}/${local_rank}>"), nproc=2, world_size=4)
    write(tmp_path, b"x\n", rank=3)
    made.drain()
    assert screen.of("stdout") == b"<default 3/1>x\n"


def test_redirected_streams_and_filtered_ranks_stay_in_their_files(
    tmp_path: Path, tail: Callable[..., Tail], screen: Screen
) -> None:
    console = Console(redirects=Streams(by_rank={0: 1}), only=frozenset({0}))
    made = tail(console)
    for rank in (0, 1):
        write(tmp_path, f"out {rank}\n".encode(), rank=rank)
        write(tmp_path, f"err {rank}\n".encode(), rank=rank, stream="stderr")
    made.drain()
    assert (screen.of("stdout"), screen.of("stderr")) == (b"", b"err 0\n")


def test_teed_lines_with_a_word_are_kept_in_a_file_of_the_attempt(
    tmp_path: Path, tail: Callable[..., Tail], screen: Screen
) -> None:
    made = tail(Console(tee=Streams(3), keep_stdout=("loss",)))
    write(tmp_path, b"loss 1\nnoise\n")
    write(tmp_path, b"loss 2\n", rank=1)
    made.drain()
    assert (tmp_path / "attempt_1" / "filtered_stdout.log").read_bytes() == b"loss 1\nloss 2\n"
    assert not (tmp_path / "attempt_1" / "filtered_stderr.log").exists()


def placed(root: Path, rank: int, node: str, *, attempt: int = 1) -> None:
    """As the rank's agent notes it before the first output."""
    folder = root / f"attempt_{attempt}" / str(rank)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "node").write_text(node)


def test_of_several_machines_each_shows_its_own_ranks(
    tmp_path: Path, tail: Callable[..., Tail], screen: Screen
) -> None:
    made = tail(nproc=1, world_size=3, nodes=("b",))
    for rank, node in enumerate("abc"):
        placed(tmp_path, rank, node)
        write(tmp_path, f"out {node}\n".encode(), rank=rank)
        write(tmp_path, f"err {node}\n".encode(), rank=rank, stream="stderr")
    made.drain()
    assert (screen.of("stdout"), screen.of("stderr")) == (b"out b\n", b"err b\n")


def test_a_rank_is_shown_where_it_runs_in_each_attempt(
    tmp_path: Path, tail: Callable[..., Tail], screen: Screen
) -> None:
    made = tail(nproc=1, world_size=2, nodes=("b",))
    for attempt, nodes in ((1, "ab"), (2, "ba")):
        for rank, node in enumerate(nodes):
            placed(tmp_path, rank, node, attempt=attempt)
            write(tmp_path, f"{attempt} {rank}\n".encode(), attempt=attempt, rank=rank)
        made.pump()
    assert screen.of("stdout") == b"1 1\n2 0\n"


def test_whose_rank_it_is_may_be_known_late(tmp_path: Path, tail: Callable[..., Tail], screen: Screen) -> None:
    made = tail(nproc=1, world_size=1, nodes=("b",))
    write(tmp_path, b"first\n")
    assert made.pump() is False, "a folder that is shared may show the one file before the other"
    placed(tmp_path, 0, "b")
    made.pump()
    assert screen.of("stdout") == b"first\n"


def test_nodes_of_one_machine_show_all_their_ranks(tmp_path: Path, tail: Callable[..., Tail], screen: Screen) -> None:
    made = tail(nproc=1, world_size=2)
    for rank, node in enumerate(("node-0", "node-1")):
        placed(tmp_path, rank, node)
        write(tmp_path, f"{node}\n".encode(), rank=rank)
    made.drain()
    assert screen.of("stdout") == b"node-0\nnode-1\n"


def test_files_of_an_earlier_attempt_are_closed_once_they_are_silent(
    tmp_path: Path, tail: Callable[..., Tail], screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tailing, "SETTLED_S", 0.0)
    made = tail(world_size=1)
    write(tmp_path, b"one\n", attempt=1)
    made.pump()
    write(tmp_path, b"two\n", attempt=2)
    for _ in range(3):
        made.pump()
        time.sleep(0.001)
    assert {attempt for attempt, _, _ in made._open} == {2}
    assert screen.of("stdout") == b"one\ntwo\n"
