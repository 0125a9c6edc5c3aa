"""What can be the matter with one rank, done from outside, and what is true then?

The seven faults of Mycroft's test bed in the form that they have on processors and a network of this kind, and five
more. Each lasts for as long as its block runs. Nothing that Evertrain reads says that it was done on purpose.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from netbed import bed as beds
from netbed import cgroups
from netbed.bed import Bed, run, with_parent

TRAFFIC = Path(__file__).with_name("traffic.py")
PORT, CONNECTIONS = 5001, 24
SECONDS = 10.0
"""So long each of them lasts."""

Details = dict[str, Any]
Way = Callable[[Bed, int, random.Random], AbstractContextManager[Details]]


@dataclass(frozen=True)
class Fault:
    name: str
    what: str
    components: tuple[str, ...]
    """What is right to say of it."""
    way: Way
    is_network: bool = False
    """A link is ill: the right pair of ranks is right as well."""
    needs: str = ""
    """What not every machine has: `nft`, `cgroup`."""

    def why_not(self) -> str:
        if self.needs == "nft" and shutil.which("nft") is None:
            return "nft is not installed"
        if self.needs == "cgroup" and cgroups.root() is None:
            return "no cgroup with the cpu controller"
        return ""


# --- the network


@contextmanager
def link_down(bed: Bed, rank: int, chance: random.Random) -> Iterator[Details]:
    """At the machine, or at the switch, where the machine's own interface only loses its carrier."""
    side = chance.choice(("machine", "switch"))
    words = (bed.space(rank), "data0") if side == "machine" else (bed.switch, f"data{rank}p")
    run("ip", "-n", words[0], "link", "set", words[1], "down")
    try:
        yield {"side": side}
    finally:
        run("ip", "-n", words[0], "link", "set", words[1], "up")


@contextmanager
def narrow(bed: Bed, rank: int, chance: random.Random) -> Iterator[Details]:
    beds.shape(bed, rank, "40mbit")
    try:
        yield {}
    finally:
        beds.shape(bed, rank, beds.LINK)


@contextmanager
def traffic(bed: Bed, rank: int, chance: random.Random) -> Iterator[Details]:
    """Two machines send each other all they can."""
    other = chance.choice([one for one in range(bed.ranks) if one != rank])
    started = []
    with ExitStack() as undo:
        for here, there in ((rank, other), (other, rank)):
            started.append(_in(bed, here, "sink", bed.data_address(here), undo=undo))
            started.append(_in(bed, here, "send", bed.data_address(there), str(CONNECTIONS), undo=undo))
        yield {"ranks": sorted((rank, other))}
        if ended := [one.args for one in started if one.poll() is not None]:
            raise RuntimeError(f"the traffic has ended by itself: {ended}")


def _in(bed: Bed, rank: int, what: str, address: str, *more: str, undo: ExitStack) -> subprocess.Popen[bytes]:
    command = [*with_parent("KILL"), *bed.in_space(bed.space(rank)), sys.executable, "-I", TRAFFIC]
    process = subprocess.Popen([*command, what, address, str(PORT), *more])
    undo.callback(process.wait)
    undo.callback(process.kill)
    return process


def loss(direction: str) -> Way:
    """15 of 100 packets are dropped at the bridge's port: the sender's TCP is told nothing."""

    @contextmanager
    def lose(bed: Bed, rank: int, chance: random.Random) -> Iterator[Details]:
        chosen = chance.choice(("from", "to")) if direction == "one" else "both"
        ways = {"from": ("iifname",), "to": ("oifname",), "both": ("iifname", "oifname")}[chosen]
        rules = [f'{way} "data{rank}p" numgen random mod 100 < 15 counter drop' for way in ways]
        nft = [*bed.in_space(bed.switch), "nft"]
        chain = "chain c { type filter hook forward priority 0; " + "; ".join(rules) + "; }"
        run(*nft, "-f", "-", input=f"table bridge netbed {{ {chain}; }}")
        try:
            yield {"direction": chosen}
        finally:
            run(*nft, "delete table bridge netbed")

    return lose


# --- the rank itself


@contextmanager
def slow_copy(bed: Bed, rank: int, chance: random.Random) -> Iterator[Details]:
    bed.order(rank, copy_bytes_per_s=2e5)
    try:
        yield {}
    finally:
        bed.order(rank)


@contextmanager
def slow(bed: Bed, rank: int, chance: random.Random) -> Iterator[Details]:
    bed.order(rank, slow=8)
    try:
        yield {}
    finally:
        bed.order(rank)


@contextmanager
def stall(bed: Bed, rank: int, chance: random.Random) -> Iterator[Details]:
    """One batch does not come."""
    bed.order(rank, stall_until=time.time() + SECONDS)
    try:
        yield {}
    finally:
        bed.order(rank)


@contextmanager
def frozen(bed: Bed, rank: int, chance: random.Random) -> Iterator[Details]:
    pid = bed.pid(rank)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield {}
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def bursts(bed: Bed, rank: int, chance: random.Random) -> Iterator[Details]:
    """Stopped for 0.4 to 0.8 s, at work for 0.1 to 0.25 s."""
    pid, over = bed.pid(rank), threading.Event()

    def go() -> None:
        while True:
            os.kill(pid, signal.SIGSTOP)
            ended = over.wait(chance.uniform(0.4, 0.8))
            os.kill(pid, signal.SIGCONT)
            if ended or over.wait(chance.uniform(0.1, 0.25)):
                return

    thread = threading.Thread(target=go)
    thread.start()
    try:
        yield {}
    finally:
        over.set()
        thread.join()


@contextmanager
def burner(bed: Bed, rank: int, chance: random.Random) -> Iterator[Details]:
    """Others compute in the rank's cgroup, whose quota is twice what the rank needs."""
    pid = bed.pid(rank)
    before = beds.cpu_s([pid])[pid]
    time.sleep(_LOOK_S)
    needs = (beds.cpu_s([pid])[pid] - before) / _LOOK_S
    with ExitStack() as undo:
        undo.callback(bed.groups.limit, rank, None)
        for _ in range(BURNERS):
            process = subprocess.Popen([*with_parent("KILL"), sys.executable, "-I", "-c", "while True: pass"])
            undo.callback(process.wait)
            undo.callback(process.kill)
            os.sched_setaffinity(process.pid, os.sched_getaffinity(pid))
            bed.groups.add(rank, process.pid)
        bed.groups.limit(rank, 2 * needs, BURNER_PERIOD_US)
        yield {"healthy_cores": round(needs, 4)}


BURNERS = 3
BURNER_PERIOD_US = 400_000
"""With the usual 100 ms a rank that waits most of its time anyway hardly notices."""
_LOOK_S = 4.0


@contextmanager
def quota(bed: Bed, rank: int, chance: random.Random) -> Iterator[Details]:
    bed.groups.limit(rank, 0.02)
    try:
        yield {}
    finally:
        bed.groups.limit(rank, None)


COMPUTES = ("compute", "host")
FAULTS = {
    one.name: one
    for one in (
        Fault("link-down", "its link is down", ("network", "sender"), link_down, is_network=True),
        Fault("narrow", "it sends 40 Mbit/s instead of 400", ("sender",), narrow, is_network=True),
        Fault("slow-copy", "its accelerator's bus is slow", COMPUTES, slow_copy),
        Fault("slow", "its accelerator takes 8 times as long", COMPUTES, slow),
        Fault("burner", "others compute in its cgroup", ("host",), burner, needs="cgroup"),
        Fault("quota", "it gets 2 % of a core", ("host",), quota, needs="cgroup"),
        Fault("traffic", "others fill its link and another one", ("network",), traffic, is_network=True),
        Fault("bursts", "it is stopped again and again", ("host",), bursts),
        Fault("loss", "15 % of its packets are lost", ("network",), loss("both"), is_network=True, needs="nft"),
        Fault("one-way-loss", "the same in one direction", ("network",), loss("one"), is_network=True, needs="nft"),
        Fault("frozen", "it is stopped", ("host",), frozen),
        Fault("stall", "its next batch does not come", ("storage",), stall),
    )
}
