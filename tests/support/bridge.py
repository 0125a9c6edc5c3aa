"""A ring of ranks for tests of the network: each in a namespace of its own, all of them at one bridge.

with bridge.ring(3) as ring:
    ring.pids          # by rank
    with ring.slowed(2, megabits_per_s=40): ...
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import pytest

from support import jobs, machines

_numbers = count(1)
_SCRIPT = Path(__file__).parent / "scripts" / "ring_of_sockets.py"
BLOCK_BYTES, PAUSE_S = 1 << 20, 0.02


def why_not(*tools: str) -> str:
    """Why it cannot be made here; empty where it can."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    return f"{', '.join(missing)} is not installed" if missing else machines.why_not()


class Ring:
    def __init__(self, mark: str, ranks: int) -> None:
        self.ranks = range(ranks)
        self.switch = f"{mark}s"
        self.spaces = [f"{mark}{rank}" for rank in self.ranks]
        self.addresses = [f"10.77.9.{rank + 1}" for rank in self.ranks]
        self.pids: dict[int, int] = {}

    @contextmanager
    def slowed(self, rank: int, *, megabits_per_s: int) -> Iterator[None]:
        """What it sends."""
        limit = ("root", "tbf", "rate", f"{megabits_per_s}mbit", "burst", "64kb", "latency", "50ms")
        run("tc", "-n", self.spaces[rank], "qdisc", "add", "dev", "eth0", *limit)
        try:
            yield
        finally:
            run("tc", "-n", self.spaces[rank], "qdisc", "del", "dev", "eth0", "root")

    @contextmanager
    def unplugged(self, rank: int) -> Iterator[None]:
        run("ip", "-n", self.spaces[rank], "link", "set", "eth0", "down")
        try:
            yield
        finally:
            run("ip", "-n", self.spaces[rank], "link", "set", "eth0", "up")

    @contextmanager
    def lossy(self, sender: int, receiver: int, *, percent: int) -> Iterator[None]:
        """Dropped where they arrive: a sender's own hook would tell its TCP."""
        rule = (
            "table inet loss { chain c { type filter hook input priority 0; "
            f"ip saddr {self.addresses[sender]} numgen random mod 100 < {percent} drop; }}; }}"
        )
        there = ("ip", "netns", "exec", self.spaces[receiver], "nft", "-f", "-")
        if subprocess.run(there, input=rule, text=True, capture_output=True).returncode:
            pytest.skip("this kernel has no nftables")
        try:
            yield
        finally:
            run("ip", "netns", "exec", self.spaces[receiver], "nft", "delete table inet loss")


@contextmanager
def ring(ranks: int) -> Iterator[Ring]:
    made = Ring(f"er{jobs.SESSION}{next(_numbers)}", ranks)
    with ExitStack() as undo:
        for space in (made.switch, *made.spaces):
            run("ip", "netns", "add", space)
            undo.callback(run, "ip", "netns", "del", space)
            run("ip", "-n", space, "link", "set", "lo", "up")
        run("ip", "-n", made.switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", made.switch, "link", "set", "br0", "up")
        for rank, space in enumerate(made.spaces):
            cable = ("type", "veth", "peer", "name", f"p{rank}", "netns", made.switch)
            run("ip", "link", "add", "eth0", "netns", space, *cable)
            run("ip", "-n", made.switch, "link", "set", f"p{rank}", "master", "br0", "up")
            run("ip", "-n", space, "addr", "add", f"{made.addresses[rank]}/24", "dev", "eth0")
            run("ip", "-n", space, "link", "set", "eth0", "up")
        started = [undo.enter_context(_started(made, rank)) for rank in made.ranks]
        for rank, process in enumerate(started):
            assert process.stdout is not None and process.stdout.readline() == "ready\n", f"no rank {rank}"
            made.pids[rank] = process.pid
        yield made


@contextmanager
def _started(made: Ring, rank: int) -> Iterator[subprocess.Popen[str]]:
    following = made.addresses[(rank + 1) % len(made.ranks)]
    words = [sys.executable, str(_SCRIPT), str(rank), made.addresses[rank], following, str(BLOCK_BYTES), str(PAUSE_S)]
    # nsenter becomes the program: its pid is the rank's
    prefix = ["nsenter", f"--net=/var/run/netns/{made.spaces[rank]}"]
    with subprocess.Popen([*prefix, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
