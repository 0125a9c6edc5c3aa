"""Machines for tests: network, host name and shared memory of their own, on this one.

    first, second = machines.pair(folder)          # the fixture `two_machines` of tests/system/conftest.py
    first.start("train.py", flags=[...])           # `evertrain run` there
    with link.down(): ...

    with machines.mesh(4) as hosts: ...            # a network each, a cable between any two, and nothing else

Each machine has a namespace for its network (joined by a cable), one for its mounts (its own /dev/shm) and one for its
name; a process that sleeps holds them, so that what lies in memory outlives a job as it does on a real machine. The
file system is shared as it would be by NFS, unless a machine is given a folder of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import combinations, count
from pathlib import Path
from typing import Any

from support import jobs, processes

_numbers = count(1)

HOLD = """
mount --make-rprivate / && mount -t tmpfs -o size=1g tmpfs /dev/shm && mount --bind "$1" /etc/hosts && hostname "$2" &&
echo ready && exec sleep 3600
"""


def why_not(*more: str) -> str:
    """Why machines cannot be made here, for which `more` tools may be needed; empty where they can."""
    if os.getuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "unshare", "nsenter", *more) if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    name = f"et-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"network namespaces cannot be made here: {tried.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


@dataclass
class Host:
    """A network of its own, with a cable to each of the others, and nothing else."""

    name: str
    address: str
    namespace: str
    cables: dict[str, str] = field(default_factory=dict)
    """Its end of each, by the name of the other host."""
    HOME = "home"
    """The interface that has the address."""

    def shape(self, megabits_per_s: int, towards: Mapping[str, int] = {}) -> None:
        """Its cables carry no more than this away from here, and less towards some hosts; until the host is gone."""
        for other, cable in self.cables.items():
            rate = towards.get(other, megabits_per_s)
            _run("tc", "-n", self.namespace, "qdisc", "add", "dev", cable, "root", *_tbf(rate))

    def lose(self, percent: int, senders: Sequence[str] = ()) -> str:
        """So many of a hundred packets that come (from these addresses) are lost; why that cannot be, else empty."""
        # a drop where they are sent would tell the sender's TCP
        source = f"ip saddr {{ {', '.join(senders)} }} " if senders else ""
        rule = f"{source}numgen random mod 100 < {percent} drop"
        rules = f"table inet t {{ chain c {{ type filter hook input priority 0; {rule}; }}; }}"
        if shutil.which("nft") is None:
            return "nft is not installed"
        command = ["ip", "netns", "exec", self.namespace, "nft", "-f", "-"]
        tried = subprocess.run(command, input=rules, text=True, capture_output=True, timeout=10)
        return f"this kernel drops nothing at random: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass
class Machine:
    name: str
    address: str
    namespace: str
    cable: str
    """Its end of the cable."""
    folder: Path
    """Where commands run, and job folders lie."""
    holder: subprocess.Popen[str]
    started: list[jobs.Job] = field(default_factory=list)

    @property
    def prefix(self) -> list[str]:
        return ["nsenter", f"--target={self.holder.pid}", f"--wd={self.folder}", "--mount", "--uts", "--net"]

    def start(self, script: str | Path, **options: Any) -> jobs.Job:
        """`evertrain run` on this machine."""
        self.started.append(jobs.start(self.folder, script, prefix=self.prefix, **options))
        return self.started[-1]

    def crash(self) -> None:
        """Kill every process of the jobs of this machine at once; what lies in its memory stays."""
        for process in list(self.processes()):
            processes.send(process)

    def processes(self) -> Iterator[processes.ProcessId]:
        own = os.stat(f"/proc/{self.holder.pid}/ns/net").st_ino
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                is_here = os.stat(entry / "ns/net").st_ino == own
            except OSError:
                continue
            found = processes.identify(int(entry.name))
            if is_here and found is not None and found.pid != self.holder.pid:
                yield found

    @contextmanager
    def unplugged(self) -> Iterator[None]:
        """The cable is out for as long as the block runs."""
        _ip("-n", self.namespace, "link", "set", self.cable, "down")
        try:
            yield
        finally:
            _ip("-n", self.namespace, "link", "set", self.cable, "up")

    @contextmanager
    def slowed(self, *, megabits_per_s: int) -> Iterator[None]:
        """The cable carries no more than this, away from here, for as long as the block runs."""
        _run("tc", "-n", self.namespace, "qdisc", "add", "dev", self.cable, "root", *_tbf(megabits_per_s))
        try:
            yield
        finally:
            _run("tc", "-n", self.namespace, "qdisc", "del", "dev", self.cable, "root")


@contextmanager
def mesh(count: int) -> Iterator[list[Host]]:
    """So many hosts, each with a cable to each other one: a link is a cable."""
    mark = f"et{jobs.SESSION}{next(_numbers)}"
    hosts = [Host(f"h{at}", f"10.212.0.{at + 1}", f"{mark}h{at}") for at in range(count)]
    with ExitStack() as undo:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            undo.callback(_ip, "netns", "del", host.namespace)
            # no interface of the kernel's own does for an address that belongs to no cable: one end of a short one does
            _ip("-n", host.namespace, "link", "add", "name", Host.HOME, "type", "veth", "peer", "name", "end")
            for device in ("lo", "end", Host.HOME):
                _ip("-n", host.namespace, "link", "set", device, "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/32", "dev", Host.HOME)
        for one, other in combinations(hosts, 2):
            one.cables[other.name], other.cables[one.name] = f"to-{other.name}", f"to-{one.name}"
            ends = ("name", other.cables[one.name], "netns", other.namespace)
            _ip("-n", one.namespace, "link", "add", "name", one.cables[other.name], "type", "veth", "peer", *ends)
            for near, far in ((one, other), (other, one)):
                cable = near.cables[far.name]
                _ip("-n", near.namespace, "link", "set", cable, "up")
                _ip("-n", near.namespace, "route", "add", f"{far.address}/32", "dev", cable, "src", near.address)
        yield hosts


@contextmanager
def pair(folder: Path, *, shared: bool = True) -> Iterator[tuple[Machine, Machine]]:
    """Two machines and the cable between them; at the end every job is closed and both are gone."""
    number = next(_numbers)
    mark = f"et{jobs.SESSION}{number}"
    names = (f"alpha-{mark}", f"beta-{mark}")
    addresses = ("10.211.0.1", "10.211.0.2")
    hosts = folder / "hosts"
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address, name in zip(addresses, names, strict=True))]
    hosts.write_text("\n".join(lines) + "\n")
    spaces = [f"{mark}{letter}" for letter in "ab"]
    cables = [f"{space}c" for space in spaces]
    with ExitStack() as undo:
        for space in spaces:
            _ip("netns", "add", space)
            undo.callback(_ip, "netns", "del", space)
            _ip("-n", space, "link", "set", "lo", "up")
        _ip("link", "add", cables[0], "netns", spaces[0], "type", "veth", "peer", "name", cables[1], "netns", spaces[1])
        made: list[Machine] = []
        for name, address, space, cable in zip(names, addresses, spaces, cables, strict=True):
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", cable)
            _ip("-n", space, "link", "set", cable, "up")
            home = folder if shared else folder / name
            home.mkdir(exist_ok=True)
            holder = _hold(space, hosts, name)
            undo.callback(_end, holder)
            made.append(Machine(name, address, space, cable, home, holder))
            undo.callback(made[-1].crash)
        for machine in made:
            undo.callback(jobs.close, machine.folder, machine.started)
        yield made[0], made[1]


def _end(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    with holder:
        pass  # waits, and closes the pipe


def _hold(space: str, hosts: Path, name: str) -> subprocess.Popen[str]:
    words = ["ip", "netns", "exec", space, "unshare", "--mount", "--uts", "sh", "-c", HOLD, "sh", str(hosts), name]
    holder = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "ready\n", f"no machine {name}"
    return holder


def _tbf(megabits_per_s: int) -> tuple[str, ...]:
    return ("tbf", "rate", f"{megabits_per_s}mbit", "burst", "256kb", "latency", "200ms")


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
