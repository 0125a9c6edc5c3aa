"""The live line never gets into what the ranks print."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from evertrain.cli import output, view
from evertrain.cli.output import Terminal
from evertrain.cli.poll import Seen

ERASE = b"\r\x1b[2K"


class Pipes:
    """stdout and stderr of a `Terminal`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out, out = os.pipe()
        self.err, err = os.pipe()
        self.writing = [out, err]
        monkeypatch.setattr(output, "_DESCRIPTOR", {"stdout": out, "stderr": err})

    def read(self) -> tuple[bytes, bytes]:
        for descriptor in self.writing:
            os.close(descriptor)
        return os.read(self.out, 65536), os.read(self.err, 65536)


@pytest.fixture
def pipes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipes]:
    made = Pipes(monkeypatch)
    yield made
    for descriptor in (made.out, made.err):
        os.close(descriptor)


def test_bytes_go_where_they_belong_and_our_lines_are_lines(pipes: Pipes) -> None:
    terminal = Terminal(live=False)
    terminal.write("stdout", b"\xff\x00no newline")
    terminal.write("stderr", b"half")
    terminal.say("something\nhappened\x1b[2J")
    terminal.draw("never shown")
    assert pipes.read() == (b"\xff\x00no newline", b"half\nevertrain: something\\nhappened\\x1b[2J\n")


def test_the_live_line_goes_before_anything_else_is_written(pipes: Pipes) -> None:
    terminal = Terminal(live=True)
    terminal.draw("step 1")
    terminal.write("stdout", b"loss 0.5\n")
    terminal.draw("step 2")
    terminal.erase()
    assert pipes.read() == (b"loss 0.5\n", ERASE + b"step 1" + ERASE + ERASE + b"step 2" + ERASE)


def test_the_live_line_stays_away_from_a_line_that_a_rank_has_not_finished(pipes: Pipes) -> None:
    terminal = Terminal(live=True)
    terminal.write("stdout", b"(Pdb) ")
    terminal.draw("step 1")
    terminal.write("stdout", b"\n")
    terminal.draw("step 2")
    assert pipes.read() == (b"(Pdb) \n", ERASE + b"step 2")


def test_a_reader_that_has_gone_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = os.pipe(), os.pipe()
    monkeypatch.setattr(output, "_DESCRIPTOR", {"stdout": out[1], "stderr": err[1]})
    terminal = Terminal(live=False)
    os.close(out[0])
    terminal.write("stdout", b"lost\n")
    terminal.say("still here")
    assert os.read(err[0], 100) == b"evertrain: still here\n"
    for descriptor in (out[1], *err):
        os.close(descriptor)


def test_the_live_line_says_state_step_speed_attempt_and_ettr(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    status = {"state": "running", "step": 10, "attempt": 2, "ettr": 0.913}
    line = view.LiveLine("job", lambda: Seen(status))
    assert "running" in line() and "step 10" in line() and "steps/s" not in line()
    clock[0], status["step"] = 102.0, 15
    text = line()
    assert "2.50 steps/s" in text and "attempt 2" in text and "ETTR 91.3%" in text
    # a new attempt that began lower has a speed of its own
    clock[0], status["step"] = 103.0, 11
    assert "steps/s" not in line()


def test_before_the_first_answer_the_job_is_starting() -> None:
    assert "starting" in view.LiveLine("job", lambda: None)()
