"""The loop and the lines on it, without a keeper around them."""

from __future__ import annotations

import os
import socket
import time

import pytest

from evertrain.keeper.lines import Lines, Message, pair
from evertrain.keeper.loop import Loop


def test_deadlines_come_in_their_order_and_can_be_cancelled() -> None:
    loop, seen = Loop(), []
    loop.after(0.02, lambda: seen.append("late"))
    loop.after(0, lambda: seen.append("early"))
    loop.after(0.01, lambda: seen.append("never")).cancel()
    end = time.monotonic() + 5
    while len(seen) < 2 and time.monotonic() < end:
        loop.turn(0.1)
    assert seen == ["early", "late"]


def test_ready_descriptors_are_served_in_the_order_in_which_they_became_ready() -> None:
    loop, seen = Loop(), []
    pipes = [os.pipe() for _ in range(5)]
    for number, (told, _) in enumerate(pipes):
        loop.watch(told, lambda number=number: seen.append(number))
    for number in (3, 0, 4, 2, 1):
        os.write(pipes[number][1], b"x")
    loop.turn(1)
    assert seen == [3, 0, 4, 2, 1]
    for told, tell in pipes:
        loop.unwatch(told)
        os.close(told)
        os.close(tell)


def test_a_descriptor_closed_earlier_in_the_turn_is_not_served() -> None:
    loop, seen = Loop(), []
    first, second = os.pipe(), os.pipe()

    def close_second() -> None:
        loop.unwatch(second[0])
        seen.append("first")

    loop.watch(first[0], close_second)
    loop.watch(second[0], lambda: seen.append("second"))
    os.write(first[1], b"x")
    os.write(second[1], b"x")
    loop.turn(1)
    assert seen == ["first"]
    for number in (*first, *second):
        os.close(number)


def talk(loop: Loop, sock: socket.socket) -> tuple[Lines, list[Message | None], list[str]]:
    heard: list[Message | None] = []
    ended: list[str] = []
    return Lines(loop, sock, heard.append, lambda: ended.append("ended")), heard, ended


def test_messages_come_whole_however_they_are_cut() -> None:
    loop, (ours, theirs) = Loop(), pair()
    lines, heard, ended = talk(loop, ours)
    for part in (b'{"a"', b":1}\n[]\n{", b'"b":2}\n\xff\n'):
        theirs.send(part)
        loop.turn(1)
    assert heard == [{"a": 1}, None, {"b": 2}, None]
    theirs.close()
    loop.turn(1)
    assert ended == ["ended"]
    lines.say({"too": "late"})


def test_what_does_not_fit_is_sent_later_and_nobody_waits() -> None:
    loop, (ours, theirs) = Loop(), pair()
    lines, _, _ = talk(loop, ours)
    caught_up: list[str] = []
    lines.caught_up = lambda: caught_up.append("now")
    message = {"text": "x" * (4 << 20)}
    lines.say(message)
    assert lines.is_behind
    theirs.setblocking(False)
    received = b""
    while not received.endswith(b"\n"):
        loop.turn(0)
        try:
            received += theirs.recv(1 << 20)
        except BlockingIOError:
            pass
    loop.turn(0)
    assert len(received) > 4 << 20 and not lines.is_behind and caught_up == ["now"]
    lines.close()
    theirs.close()


def test_the_last_word_is_sent_before_the_line_is_closed() -> None:
    loop, (ours, theirs) = Loop(), pair()
    lines, _, ended = talk(loop, ours)
    lines.say({"last": "word"})
    lines.close_when_sent()
    assert theirs.makefile().read() == '{"last":"word"}\n'
    assert ended == []
    theirs.close()


@pytest.mark.parametrize("descriptors", [0, 2])
def test_a_gone_listener_is_noticed(descriptors: int) -> None:
    loop, (ours, theirs) = Loop(), pair()
    lines, _, ended = talk(loop, ours)
    theirs.close()
    lines.say({"any": "body"}, [0] * descriptors)
    assert ended == ["ended"]
