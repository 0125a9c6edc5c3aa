"""Nodes are asked for by a command: real ones, that work, fail, hang and are not there."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from evertrain.model.config import Config, PlatformConfig
from evertrain.model.spec import Command as Script
from evertrain.model.spec import ControllerSpec, Seats
from evertrain.platforms import choice
from evertrain.platforms.base import Platform
from evertrain.platforms.command import Command
from evertrain.platforms.local import ByHand
from support.waiting import eventually

Log = pytest.LogCaptureFixture


def spec(request_command: str = "", limit_s: float = 30.0, **different: Any) -> ControllerSpec:
    usual: dict[str, Any] = {
        "job": "job", "run_id": "job-1", "run_dir": "/run", "log_root": "/run/logs", "database": "", "token_file": "",
        "listen_fd": 0, "url": "http://gpu01:29400", "nodes": ("gpu01",), "seats": Seats(2, 2), "nproc_per_node": 1,
        "command": Script(kind="script", target="t.py"),
        "config": Config(platform=PlatformConfig(request_command=request_command, limit_s=limit_s)),
    }  # fmt: skip
    return ControllerSpec(**{**usual, **different})


def asks(command: str, limit_s: float = 30.0) -> Command:
    made = choice.of(spec(command, limit_s))
    assert isinstance(made, Command)
    return made


def done(platform: Platform) -> None:
    """Wait for the threads of all requests."""
    for thread in threading.enumerate():
        if thread.name == "platform":
            thread.join(20)
            assert not thread.is_alive()


def test_where_nothing_brings_nodes_the_user_is_told() -> None:
    assert choice.of(spec(seats=None)).request(1, "no standby is left") == (
        "there are no more nodes than the one that `run` began with (no standby is left)"
    )
    by_hand = choice.of(spec())
    assert by_hand.request(1, "gpu02 is lost") == (
        "run the same command on another machine: it joins at gpu01:29400 (gpu02 is lost)"
    )
    assert by_hand.request(3, "x").startswith("run the same command on 3 other machines: ")
    assert by_hand.problem == ""


def test_a_command_learns_what_is_wanted_and_what_it_says_is_logged(tmp_path: Path, caplog: Log) -> None:
    caplog.set_level(logging.INFO)
    command = f"env | grep ^EVERTRAIN_ > {tmp_path}/asked; echo Submitted batch job 17; echo careful >&2"
    platform = asks(command)
    line = platform.request(2, "gpu02 is lost")
    assert line == (
        f"2 nodes asked for by `{command}`; "
        "or run the same command on 2 other machines: it joins at gpu01:29400 (gpu02 is lost)"
    )
    done(platform)
    asked = dict(line.split("=", 1) for line in (tmp_path / "asked").read_text().splitlines())
    assert asked["EVERTRAIN_JOB"] == "job"
    assert asked["EVERTRAIN_NODES_WANTED"] == "2"
    assert asked["EVERTRAIN_ENDPOINT"] == "gpu01:29400"
    assert "Submitted batch job 17" in caplog.text and "careful" in caplog.text
    assert platform.problem == ""


def test_on_one_machine_only_the_command_is_named() -> None:
    platform = choice.of(spec("true", seats=None))
    assert platform.request(1, "gpu lost") == "1 node asked for by `true` (gpu lost)"
    done(platform)


def test_one_that_fails_is_a_problem_until_one_does_not(tmp_path: Path, caplog: Log) -> None:
    platform = asks(f"test -e {tmp_path}/open || {{ echo no partition; exit 3; }}")
    platform.request(1, "x")
    done(platform)
    assert platform.problem.startswith("platform.request_command `test -e ")
    assert platform.problem.endswith("failed with exit code 3: no partition")
    assert platform.problem in caplog.text
    (tmp_path / "open").touch()
    platform.request(1, "x")
    done(platform)
    assert platform.problem == ""


def test_a_command_that_is_not_there() -> None:
    platform = asks("no-such-scheduler --now")
    platform.request(1, "x")
    done(platform)
    assert "failed with exit code 127" in platform.problem and "no-such-scheduler" in platform.problem


def test_nobody_waits_for_it_and_it_is_ended_with_all_its_children(tmp_path: Path) -> None:
    platform = asks(f"sleep 1000 & echo $! > {tmp_path}/pid; wait", limit_s=0.5)
    began = time.monotonic()
    platform.request(1, "x")
    assert time.monotonic() - began < 0.4
    done(platform)
    assert "had not ended after 0.5 s (platform.limit_s) and was ended" in platform.problem
    eventually(lambda: is_gone(tmp_path / "pid"), "its child is gone", within_s=10)


def test_what_still_runs_at_the_end_is_ended(tmp_path: Path) -> None:
    platform = asks(f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    platform.request(1, "x")
    eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "it runs", within_s=10)
    platform.close()
    done(platform)
    assert is_gone(tmp_path / "pid")
    assert platform.problem == "", "we ended it ourselves"
    platform.request(1, "x")
    done(platform)


def test_requests_take_turns(tmp_path: Path) -> None:
    platform = Command(
        PlatformConfig(request_command=f"mkdir {tmp_path}/busy && sleep 0.2 && rmdir {tmp_path}/busy"),
        "job", "gpu01:1", ByHand("gpu01:1"),
    )  # fmt: skip
    for _ in range(3):
        platform.request(1, "x")
    done(platform)
    assert platform.problem == "" and not (tmp_path / "busy").exists()


def is_gone(file: Path) -> bool:
    try:
        os.kill(int(file.read_text()), 0)
    except ProcessLookupError:
        return True
    return False


def test_a_child_that_nothing_ends_does_not_keep_the_next_request_from_running(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    stuck = f"setsid sh -c 'echo $$ > {pid}; exec sleep 60'"
    platform = asks(f"if [ -e {pid} ]; then echo again > {tmp_path}/again; else {stuck}; fi", limit_s=0.5)
    platform.request(1, "why")
    eventually(pid.exists, "its child runs")
    try:
        platform.request(1, "why")
        eventually((tmp_path / "again").exists, "the second request runs", within_s=20)
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)
    done(platform)
