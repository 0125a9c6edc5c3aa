"""Machines on one machine: a network namespace each, joined by bridges in a namespace that plays the switch.

    name ──mgmt0── bridge `mgmt`   what Evertrain and the rendezvous talk over, 10.213.0.0/24, never hurt
         ──data0── bridge `data`   what ranks send each other, 10.212.0.0/24, 400 Mbit/s a machine (tbf)

Each machine also has a name, a /dev/shm and a view of /sys of its own, and its rank a cgroup. Nothing is added to the
network of the host. All that a bed makes is named after it, and noted before it is made: `clear_dead()` takes away what
a bed leaves behind whose process was killed. With its process its machines end as well.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness import ROOT

sys.path.append(str(ROOT / "tests"))

from netbed import cgroups
from support import machines, processes
from support.processes import ProcessId

RANKS = 8
LINK = "400mbit"
NOTES = Path("/run/evertrain-netbed")
_NAMESPACES = Path("/run/netns")
_MARK = "etbed"
_CLEAR_LIMIT_S = 10.0
_CLONE_NEWNET = 0x40000000

# the network's view of /sys hides the cgroups, which are not the network's
_HOLD = """
mount --make-rprivate / && mount -t tmpfs -o size=1g tmpfs /dev/shm && mount --bind "$1" /etc/hosts && hostname "$2" &&
mkdir -p "$3" && mount --rbind /sys/fs/cgroup "$3" && mount -t sysfs sysfs /sys && mount --rbind "$3" /sys/fs/cgroup &&
echo ready && exec sleep 86400
"""


def why_not() -> str:
    """Why there can be no bed here; empty where there can."""
    return machines.why_not("tc", "setpriv")


def lacks() -> list[str]:
    """What this machine has not got that a bed would use, in words."""
    found = []
    if shutil.which("nft") is None:
        found.append("nft is not installed (apt-get install -y nftables): no packet is lost")
    if cgroups.root() is None:
        found.append("no cgroup with the cpu controller: no rank is short of processor")
    elif cgroups.version() == 1:
        found.append("cgroup v2 has no cpu controller here: v1 is used")
    name = f"{_MARK}-try-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
    tried = subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"],
                           capture_output=True)  # fmt: skip
    subprocess.run(["ip", "netns", "del", name], check=True, capture_output=True)
    if tried.returncode:
        found.append("the kernel has no netem: no link is given a longer delay")
    return found


@dataclass(frozen=True)
class Bed:
    """Where things are; all of it follows from these, so that another process can use the bed as well."""

    token: str
    folder: Path
    ranks: int = RANKS

    @property
    def switch(self) -> str:
        return f"{self.token}sw"

    def space(self, rank: int) -> str:
        return f"{self.token}n{rank}"

    def name(self, rank: int) -> str:
        """Of the machine, as its host name says."""
        return f"{self.token}-{rank}"

    @staticmethod
    def data_address(rank: int) -> str:
        return f"10.212.0.{rank + 1}"

    @staticmethod
    def management_address(rank: int) -> str:
        return f"10.213.0.{rank + 1}"

    @property
    def control(self) -> Path:
        """What the benchmark's script reads and writes."""
        return self.folder / "control"

    @property
    def groups(self) -> cgroups.RankGroups:
        return cgroups.RankGroups(self.token)

    def pid(self, rank: int) -> int:
        return int((self.control / f"pid-{rank}").read_text())

    def order(self, rank: int, **what: float) -> None:
        """What the rank's own script does from now on; nothing: all is well."""
        file = self.control / f"rank-{rank}.json"
        if not what:
            file.unlink(missing_ok=True)
            return
        new = file.with_suffix(".new")
        new.write_text(json.dumps(what))
        new.replace(file)

    def in_space(self, space: str) -> list[str]:
        """Before a command that shall see this network."""
        return ["nsenter", f"--net={_NAMESPACES / space}"]

    def processes(self) -> Iterator[ProcessId]:
        """Whoever is in one of its networks or cgroups."""
        inodes = set()
        for space in (self.switch, *map(self.space, range(self.ranks))):
            try:
                inodes.add(os.stat(_NAMESPACES / space).st_ino)
            except FileNotFoundError:
                continue
        pids = set(self.groups.pids())
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if os.stat(entry / "ns/net").st_ino in inodes:
                    pids.add(int(entry.name))
            except OSError:
                continue
        for pid in pids - {os.getpid()}:
            if (found := processes.identify(pid)) is not None:
                yield found


class Machine:
    """One of them: whoever starts something there."""

    def __init__(self, bed: Bed, rank: int, hosts: Path) -> None:
        words = [*with_parent("KILL"), *bed.in_space(bed.space(rank)), "unshare", "--mount", "--uts", "sh", "-c", _HOLD]
        cgroup = bed.folder / "cgroup"
        self._holder = subprocess.Popen(
            [*words, "sh", hosts, bed.name(rank), cgroup], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        self.prefix = (
            *with_parent("TERM"), "nsenter", f"--target={self._holder.pid}", f"--wd={bed.folder}", "--mount", "--uts",
            "--net",
        )  # fmt: skip
        if bed.groups.folder is not None:
            self.prefix += ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(bed.groups.others / "cgroup.procs"))

    def wait(self) -> None:
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            raise RuntimeError(f"no machine: exit code {self._holder.wait()}")

    def end(self) -> None:
        self._holder.kill()
        with self._holder:
            pass  # waits, and closes the pipe


@contextmanager
def made(ranks: int = RANKS, priority: int = 0) -> Iterator[tuple[Bed, list[Machine]]]:
    """A bed and its machines; at the end nothing is left of it. `priority`: of all that runs there, as of `nice`, where
    there are cgroups."""
    clear_dead()
    NOTES.mkdir(exist_ok=True)
    token = f"{_MARK}{secrets.token_hex(2)}"
    bed = Bed(token, Path(tempfile.mkdtemp(prefix=f"{token}-")), ranks)
    note = NOTES / f"{token}.json"
    own = processes.identify(os.getpid())
    note.write_text(json.dumps({"owner": own, "folder": str(bed.folder), "ranks": ranks}))
    machines: list[Machine] = []
    try:
        bed.control.mkdir()
        _join(bed)
        bed.groups.make(ranks, priority)
        hosts = bed.folder / "hosts"
        names = [f"{bed.management_address(rank)} {bed.name(rank)}" for rank in range(ranks)]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *names]) + "\n")
        machines = [Machine(bed, rank, hosts) for rank in range(ranks)]
        for machine in machines:
            machine.wait()
        yield bed, machines
    finally:
        for machine in machines:
            machine.end()
        clear(bed)
        note.unlink()


@contextmanager
def alone() -> Iterator[None]:
    """No other measurement on a bed runs beside this block: it waits for the one that does."""
    NOTES.mkdir(exist_ok=True)
    with (NOTES / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another measurement is running on this machine: waiting for its end", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def clear_dead() -> None:
    """Take away what is left of beds whose process is gone."""
    for note in NOTES.glob("*.json"):
        known = json.loads(note.read_bytes())
        if not processes.is_alive(ProcessId(*known["owner"])):
            print(f"left of a dead run: {note.stem}, taken away", flush=True)
            clear(Bed(note.stem, Path(known["folder"]), known["ranks"]))
            note.unlink()


def clear(bed: Bed) -> None:
    deadline = time.monotonic() + _CLEAR_LIMIT_S
    for rank in range(bed.ranks):
        if bed.groups.folder is not None and bed.groups.folder.exists():
            bed.groups.limit(rank, None)  # nobody dies without processor
    while left := list(bed.processes()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"cannot end the processes {', '.join(str(one.pid) for one in left)} of {bed.token}")
        for one in left:
            processes.send(one, signal.SIGKILL)
        time.sleep(0.05)
    bed.groups.remove()
    for space in (bed.switch, *map(bed.space, range(bed.ranks))):
        if (_NAMESPACES / space).exists():
            run("ip", "netns", "del", space)
    shutil.rmtree(bed.folder, ignore_errors=True)


def _join(bed: Bed) -> None:
    spaces = [bed.switch, *map(bed.space, range(bed.ranks))]
    run("ip", "-batch", "-", input="\n".join(f"netns add {space}" for space in spaces))
    switch = ["link set lo up"]
    for bridge in ("data", "mgmt"):
        switch += [f"link add {bridge} type bridge", f"link set {bridge} up"]
    switch.append(f"addr add {bed.management_address(253)}/24 dev mgmt")
    for rank, space in enumerate(spaces[1:]):
        for bridge in ("data", "mgmt"):
            port = f"{bridge}{rank}p"
            switch += [
                f"link add {port} type veth peer name {bridge}0 netns {space}",
                f"link set {port} master {bridge} up",
            ]
    run("ip", "-n", bed.switch, "-batch", "-", input="\n".join(switch))
    for rank, space in enumerate(spaces[1:]):
        lines = ["link set lo up"]
        for device, address in (("data0", bed.data_address(rank)), ("mgmt0", bed.management_address(rank))):
            lines += [f"addr add {address}/24 dev {device}", f"link set {device} up"]
        run("ip", "-n", space, "-batch", "-", input="\n".join(lines))
        shape(bed, rank, LINK, verb="add")


def shape(bed: Bed, rank: int, rate: str, *, verb: str = "change") -> None:
    """What a machine may send."""
    limit = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
    run("tc", "-n", bed.space(rank), "qdisc", verb, "dev", "data0", *limit)


def run(*words: str, input: str | None = None) -> None:
    done = subprocess.run(words, input=input and f"{input}\n", capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")


def with_parent(signal_name: str) -> tuple[str, ...]:
    """Before a command that shall not outlive the thread that starts it."""
    return ("setpriv", "--pdeathsig", signal_name)


def enter(space: str) -> None:
    """This thread is in that network from now on, and no other thread."""
    descriptor = os.open(_NAMESPACES / space, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network {space}")
    finally:
        os.close(descriptor)


def cpu_s(pids: Sequence[int]) -> Mapping[int, float]:
    """Processor time that each of these has had; without those that are gone."""
    tick = os.sysconf("SC_CLK_TCK")
    found = {}
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found[pid] = (int(fields[11]) + int(fields[12])) / tick
    return found
