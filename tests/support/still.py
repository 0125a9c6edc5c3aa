"""How does a test get processes that stand where it wants them to? Small scripts that say when they are there.

with still.processes() as start:
    process = start("import time; print(flush=True); time.sleep(60)")
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from evertrain.observe import process_tree


class Start(Protocol):
    def __call__(self, code: str, *, cwd: Path | None = None) -> subprocess.Popen[bytes]:
        """Run Python code in a process of its own; returns when it has printed its first line."""


@contextmanager
def processes() -> Iterator[Start]:
    """All that were started are ended, with what they have started themselves."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str, *, cwd: Path | None = None) -> subprocess.Popen[bytes]:
        started.append(
            subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=cwd)
        )
        pipe = started[-1].stdout
        assert pipe is not None
        assert pipe.readline(), "it has ended before it was there"
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            for pid in process_tree.tree(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if process.stdout is not None:
                process.stdout.close()
            with suppress(subprocess.TimeoutExpired):  # one on a dead disk ends when that is freed
                process.wait(5)


SLEEPER = "import time\ndef wait_here():\n    print(flush=True)\n    time.sleep(600)\nwait_here()"

GIL_HOLDER = """
import ctypes
def hold():
    print(flush=True)
    ctypes.PyDLL(None).sleep(600)
hold()
"""

FAMILY = """
import multiprocessing, os, subprocess, sys, time
def save_checkpoint():
    time.sleep(600)
def read_along():
    time.sleep(600)
def train():
    for work in (save_checkpoint, read_along):
        if os.fork() == 0:
            work()
    subprocess.Popen(["sleep", "600"])
    time.sleep(0.3)
    print(flush=True)
    time.sleep(600)
train()
"""
"""Forks a process that saves, one that does not, and starts one that is no Python."""
