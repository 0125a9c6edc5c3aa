"""How soon do sensors see, and what do they cost? Seconds from a real fault to the signal at the controller.

A real `evertrain run` of one rank in a network of its own (namespaces, as root), with GPUs that a library in NVIDIA's
place plays, an exporter of 240 metrics in DCGM's place, and a file in place of /dev/kmsg. Each fault comes at a random
moment between two looks; what counts is the time of the signal in the controller's log. Full disks and mounts whose
server is stopped are looked at by the agent's `Sensing` in a process of its own, since one job has not so many disks;
there the signal is what would be reported. Costs are those of the job: CPU of a look over the period.

What cannot be had here (root, gcc, FUSE) is left out, and named.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

from harness import BIN, ROOT, clean_environment, parser, print_table, write_report

sys.path.append(str(ROOT / "tests"))  # what plays GPUs and dead disks for the tests plays them here too

from support import nvml

BOUNDS = {
    "kernel": 2.0,
    "xid": 10.0,
    "gpu_lost": 10.0,
    "remap": 10.0,
    "nic_down": 30.0,
    "packet_loss": 30.0,
    "tcp_resends": 30.0,
}
COST_BOUND = 1.0
GPUS, NODE = 8, "node"
ADDRESS, PORT, STREAM_PORT = "10.79.0.1", 29479, 7479
INSIDE = "EVERTRAIN_BENCHMARK_INSIDE"
"""Set where the network and the mounts are this benchmark's own."""
START_LIMIT_S, SIGNAL_LIMIT_S, SETTLE_S = 120.0, 60.0, 12.0
UNDER_WAY_S = 25.0
"""So long all sensors have looked and steps were done before the first fault: a job that is under way."""
FORGOTTEN_S = 70.0
"""So long after a loss in the fabric the next one is an event of its own."""
QUEUE = 97
"""Packets that fit into a tap before it drops some."""

Json = dict[str, Any]
Seconds = dict[str, list[float]]


class NotSeen(Exception):
    """A fault that led to nothing in time."""


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--runs", type=int, default=5, help="faults of each kind (kernel lines: three times as many)")
    options = flags.parse_args()
    if INSIDE not in os.environ and (missing := why_no_namespaces()) == "":
        again = ["unshare", "--net", "--mount", "--propagation=private", sys.executable, *sys.argv]
        return subprocess.run(again, env={**os.environ, INSIDE: "1"}, check=False).returncode
    left_out = [] if INSIDE in os.environ else [f"network, disks and mounts: {missing}"]
    if shutil.which("gcc") is None:
        left_out.append("GPUs: no gcc to build the library in NVIDIA's place")
    return measure(options, left_out)


def why_no_namespaces() -> str:
    if os.geteuid() != 0:
        return "namespaces need root"
    if missing := [tool for tool in ("unshare", "ip") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} is not installed"
    tried = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True)
    return tried.stderr.strip()


def measure(options: Namespace, left_out: list[str]) -> int:
    runs = min(options.runs, 2) if options.quick else options.runs
    folder = Path(tempfile.mkdtemp(prefix="sensors-"))
    seconds: Seconds = {}
    problems: list[str] = []
    has_network, has_gpus = INSIDE in os.environ, shutil.which("gcc") is not None
    with ExitStack() as undo:
        taps = [undo.enter_context(tap(number)) for number in range(runs)] if has_network and make_network() else []
        if has_network and not taps:
            left_out.append("packet loss: no /dev/net/tun")
        gpus = fake_gpus(folder) if has_gpus else None
        job = undo.enter_context(Job(folder, gpus, undo.enter_context(exporter()), on_network=has_network))
        ways: list[tuple[str, Callable[[int], float]]] = [(kind, way) for kind, way in kernel_ways(job, runs)]
        ways += gpu_ways(job, gpus, runs) if gpus is not None else []
        ways += network_ways(job, taps, runs) if has_network else []
        for kind, way in ways:
            collect(seconds, problems, kind, way)
        costs = job.costs()
    if has_network:
        for kind, found in host_ways(folder, runs, left_out).items():
            seconds[kind] = found
            if len(found) < runs:
                problems.append(f"{kind}: seen {len(found)} times of {runs}")
    report(options, seconds, costs, left_out, problems)
    if not problems:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if problems else 0


def collect(seconds: Seconds, problems: list[str], kind: str, way: Callable[[int], float]) -> None:
    number = len(seconds.setdefault(kind, []))
    try:
        seconds[kind].append(way(number))
    except NotSeen as error:
        problems.append(f"{kind}: {error}")
        print(f"{kind}: {error}", flush=True)
        return
    print(f"{kind}: {seconds[kind][-1]:.2f} s", flush=True)


# -- the job ----------------------------------------------------------------------------------------------------------


class Job:
    """A real run, and the signals that its controller has noted."""

    def __init__(self, folder: Path, gpus: nvml.FakeNvml | None, exporter: str, *, on_network: bool) -> None:
        self.folder = folder
        self.kernel_log = folder / "kmsg"
        self.kernel_log.touch()
        (folder / "work").mkdir()
        on_ports = {"NCCL_SOCKET_IFNAME": "evcable,evtap", "GLOO_SOCKET_IFNAME": "evnet0"} if on_network else {}
        self._environment = clean_environment(
            TOY_SAVE="none",
            TOY_STEPS="1000000",
            TOY_LOG=str(folder / "events.jsonl"),
            EVERTRAIN_RUN_DIR=str(folder / "runs"),
            XDG_STATE_HOME=str(folder / "state"),
            EVERTRAIN_KMSG=str(self.kernel_log),
            EVERTRAIN_DCGM_URL=exporter,
            **on_ports,
            **(gpus.environment if gpus is not None else {}),
        )
        place = [f"--rdzv-endpoint={ADDRESS}:{PORT}", f"--local-addr={ADDRESS}"] if on_network else []
        self._command = [
            BIN / "evertrain", "run", "--job=sensors", "--nnodes=1", "--nproc-per-node=1", "--observe-only", *place,
            ROOT / "benchmarks/toy.py",
        ]  # fmt: skip
        self._log = folder / "runs/sensors/logs/controller.log"

    def __enter__(self) -> Job:
        with (self.folder / "output.txt").open("wb") as output:
            self._process = subprocess.Popen(
                self._command, cwd=self.folder / "work", env=self._environment, stdout=output, stderr=output
            )
        try:
            wait_for(self._looks, START_LIMIT_S, f"sensors that look; see {self.folder}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _looks(self) -> bool:
        """Whether the job is under way, so that each sensor knows what is usual."""
        if self._process.poll() is not None:
            raise NotSeen(f"the job has ended; see {self.folder}")
        status = self._status()
        sensors = {one["name"]: one for one in status.get("sensors", ())}
        looked = sensors and all(one["starting"] == 0 for one in sensors.values())
        if not looked or not status.get("step"):
            self._since = time.monotonic()
        return bool(looked) and time.monotonic() - self._since > UNDER_WAY_S

    def _status(self) -> Json:
        asked = [BIN / "evertrain", "status", "--job=sensors", "--json"]
        answer = subprocess.run(asked, env=self._environment, capture_output=True, text=True, timeout=30)
        found: Json = json.loads(answer.stdout) if answer.returncode == 0 else {}
        return found

    def costs(self) -> dict[str, float]:
        """Per cent of a core by sensor."""
        sensors = self._status().get("sensors", ())
        return {one["name"]: 100 * one["cpu_fraction"] for one in sensors if one["ok"] and one["cpu_fraction"]}

    def seconds_to_signal(self, begin: Callable[[], float], *words: str) -> float:
        """From the fault, which `begin` makes and dates, to the first signal after it that has all these words."""
        known = len(self._signals())
        began = begin()

        def told() -> list[float]:
            return [at for at, line in self._signals()[known:] if all(word in line for word in words)]

        wait_for(told, SIGNAL_LIMIT_S, f"a signal with {words}")
        return told()[0] - began

    def _signals(self) -> list[tuple[float, str]]:
        lines = self._log.read_text().splitlines()
        found = [(re.search(r"SignalRaised\(time=([0-9.]+)", line), line) for line in lines]
        return [(float(match[1]), line) for match, line in found if match]


def wait_for(holds: Callable[[], object], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline:
            raise NotSeen(f"{limit_s:g} s without {what}")
        time.sleep(0.02)


def at_random(period_s: float) -> float:
    """Let some part of a period pass; the time then."""
    time.sleep(random.random() * period_s)
    return time.time()


# -- faults ----------------------------------------------------------------------------------------------------------


def kernel_ways(job: Job, runs: int) -> Iterator[tuple[str, Callable[[int], float]]]:
    def say(number: int) -> float:
        bus = f"0000:{number + 0x40:02x}:00"

        def begin() -> float:
            now = at_random(0.5)
            line = f"NVRM: Xid (PCI:{bus}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
            with job.kernel_log.open("a") as log:
                log.write(f"4,{900 + number},{time.monotonic_ns() // 1000},-;{line}\n")
            return now

        return job.seconds_to_signal(begin, "xid_79", bus)

    for _ in range(3 * runs):
        yield "kernel", say


def fake_gpus(folder: Path) -> nvml.FakeNvml:
    (folder / "nvml").mkdir()
    return nvml.FakeNvml(nvml.build(folder / "nvml"), folder, gpus=GPUS)


def gpu_ways(job: Job, gpus: nvml.FakeNvml, runs: int) -> list[tuple[str, Callable[[int], float]]]:
    """Of each kind one on each GPU; a GPU that is lost stays so, and comes last."""
    faults: list[tuple[str, Json, str]] = [
        ("xid", {"xid": 48}, "xid_48"),
        ("remap", {"failed": 1}, "row_remap_failed"),
        ("gpu_lost", {"lost": 1}, "gpu_lost"),
    ]

    def way(values: Json, told: str) -> Callable[[int], float]:
        def fail(number: int) -> float:
            def begin() -> float:
                now = at_random(3.0)
                gpus.set(number, **values)
                return now

            return job.seconds_to_signal(begin, f"'{told}'", f"GPU {number} ")

        return fail

    return [(kind, way(values, told)) for kind, values, told in faults for _ in range(min(runs, GPUS))]


def make_network() -> bool:
    """The job's own interface, a cable whose other end we hold, and whether taps can be had."""
    # what there was is of the other network
    subprocess.run(["mount", "-t", "sysfs", "sensors", "/sys"], check=True, timeout=10)
    for words in (
        "link set lo up", "link add evnet0 type veth peer name evpeer0", "link set evpeer0 up", "link set evnet0 up",
        f"addr add {ADDRESS}/24 dev evnet0",
        "link add evcable0 type veth peer name evfar0", "link set evcable0 up", "link set evfar0 up",
    ):  # fmt: skip
        ip(words)
    return os.path.exists("/dev/net/tun")


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, timeout=10)


class Tap:
    """A port whose reader we are: what is not read in time is dropped, and counted as a card does."""

    def __init__(self, number: int) -> None:
        self.name, self._address = f"evtap{number}", f"10.80.{number}.2"
        self._descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(self._descriptor, 0x400454CA, struct.pack("16sH22x", self.name.encode(), 0x0001 | 0x1000))
        ip(f"addr add 10.80.{number}.1/24 dev {self.name}")
        ip(f"link set {self.name} txqueuelen {QUEUE} up")
        ip(f"neigh add {self._address} lladdr 02:00:00:00:00:02 dev {self.name}")
        self._sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    def send(self, packets: int) -> None:
        """So many at once, of which those that do not fit are lost; then make room."""
        for _ in range(packets):
            try:
                self._sender.sendto(b"x", (self._address, 9))
            except OSError:
                pass
        try:
            while os.read(self._descriptor, 4096):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        self._sender.close()
        os.close(self._descriptor)


@contextmanager
def tap(number: int) -> Iterator[Tap]:
    made = Tap(number)
    try:
        yield made
    finally:
        made.close()


def network_ways(job: Job, taps: list[Tap], runs: int) -> list[tuple[str, Callable[[int], float]]]:
    def unplug(number: int) -> float:
        def begin() -> float:
            now = at_random(5.0)
            ip("link set evfar0 down")
            return now

        try:
            return job.seconds_to_signal(begin, "port:evcable0:down")
        finally:
            ip("link set evfar0 up")
            time.sleep(SETTLE_S)  # two looks: it is up again for the sensor too

    def lose(number: int) -> float:
        """Three in a hundred of 2,000 packets a second."""
        over, port = threading.Event(), taps[number]

        def send() -> None:
            while not over.wait(0.05):
                port.send(QUEUE + 3)

        thread = threading.Thread(target=send)

        def begin() -> float:
            now = at_random(5.0)
            thread.start()
            return now

        try:
            return job.seconds_to_signal(begin, f"port:{port.name}:loss")
        finally:
            over.set()
            thread.join()

    def lose_on_the_way(number: int) -> float:
        """Three in a hundred of what arrives for one TCP connection, at random; its sender sees them missing."""
        if number:
            time.sleep(FORGOTTEN_S)

        def begin() -> float:
            now = at_random(5.0)
            nft("table inet t { chain c { type filter hook input priority 0; "
                f"tcp dport {STREAM_PORT} numgen random mod 100 < 3 drop; }}; }}")  # fmt: skip
            return now

        with stream():
            try:
                return job.seconds_to_signal(begin, "tcp:resends")
            finally:
                nft("flush ruleset")

    ways = [("nic_down", unplug)] * runs + [("packet_loss", lose)] * min(runs, len(taps))
    return ways + [("tcp_resends", lose_on_the_way)] * (min(runs, 3) if shutil.which("nft") else 0)


def nft(rules: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True, capture_output=True, timeout=10)


@contextmanager
def stream() -> Iterator[None]:
    """Some hundred segments a second of TCP."""
    over = threading.Event()
    with socket.create_server((ADDRESS, STREAM_PORT)) as server:
        sender = socket.create_connection((ADDRESS, STREAM_PORT))
        receiver, _ = server.accept()

        def read() -> None:
            while receiver.recv(1 << 16):
                pass

        def send() -> None:
            sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while not over.wait(0.001):
                sender.sendall(b"x" * 100)

        threads = [threading.Thread(target=one, daemon=True) for one in (read, send)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            threads[1].join(30)
            sender.close()
            threads[0].join(30)
            receiver.close()


@contextmanager
def exporter() -> Iterator[str]:
    """The address of something that answers as dcgm-exporter does."""
    names = ["DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", *(f"DCGM_FI_DEV_FIELD_{number}" for number in range(29))]
    labels = [f'gpu="{gpu}",UUID="GPU-{gpu:04d}",modelName="NVIDIA H100",Hostname="node"' for gpu in range(GPUS)]
    page = "".join(f"# TYPE {name} gauge\n" + "".join(f"{name}{{{one}}} 0.5\n" for one in labels) for name in names)

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
    finally:
        server.shutdown()
        server.server_close()


# -- disks and mounts -------------------------------------------------------------------------------------------------

LOOKER = """
import asyncio, json, sys, time
from evertrain.agent.sensing import Sensing
from evertrain.detect.host import Host
from evertrain.model.spec import AgentSpec
from evertrain.observe.sensors.host import HostSensor

async def main():
    spec = AgentSpec(job="", run_id="", node="node", node_dir="", disk_dir="", log_root="", controller_url="",
                     token_file="", fired_dir="")
    told = set()
    def say():
        for sign in sensing.signs:
            if sign.key not in told:
                told.add(sign.key)
                print(json.dumps([time.time(), sign.kind, sign.device]), flush=True)
    sensing = Sensing(spec, [HostSensor(Host().judge, folders=sys.argv[1:])], say)
    await sensing.run()

asyncio.run(main())
"""
SERVER = """
import sys, time
from pathlib import Path
from support import dead_disk
with dead_disk.mounted(Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(600)
"""


def host_ways(folder: Path, runs: int, left_out: list[str]) -> Seconds:
    """All of them in one go, each at its own moment."""
    disks = [folder / f"disk-{number}" for number in range(runs)]
    mounts = [folder / f"mount-{number}" for number in range(runs)]
    with ExitStack() as undo:
        for disk in disks:
            disk.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "sensors", disk], check=True, timeout=10)
            undo.callback(subprocess.run, ["umount", "-l", disk], timeout=10)
        servers = {mount: server for mount in mounts if (server := serve(mount, undo)) is not None}
        if not servers:
            left_out.append("dead mounts: no FUSE")
        command = [sys.executable, "-c", LOOKER, *map(str, (*disks, *servers))]
        looker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        undo.callback(looker.communicate)
        undo.callback(looker.kill)
        assert looker.stdout is not None
        lines: list[tuple[float, str, str]] = []
        threading.Thread(target=lambda: lines.extend(map(json.loads, looker.stdout)), daemon=True).start()
        time.sleep(SETTLE_S)  # it has looked at them while they were well
        faults: list[tuple[str, Path, Callable[[], object]]] = [
            ("disk_full", disk, lambda disk=disk: (disk / "data").write_bytes(bytes((4 << 20) - (16 << 10))))  # type: ignore[misc]
            for disk in disks
        ]
        faults += [
            ("mount_dead", mount, lambda server=server: server.send_signal(signal.SIGSTOP))  # type: ignore[misc]
            for mount, server in servers.items()
        ]
        began: dict[str, float] = {}
        random.shuffle(faults)
        for _, place, fail in faults:
            began[str(place)] = at_random(2 * 10.0 / len(faults))
            fail()
        try:
            wait_for(lambda: {device for _, _, device in list(lines)} >= began.keys(), SIGNAL_LIMIT_S, "a sign of each")
        except NotSeen as error:
            print(error, flush=True)
        found: Seconds = {kind: [] for kind, _, _ in faults}
        for at, kind, device in list(lines):
            if device in began and kind in found:
                found[kind].append(at - began[device])
                print(f"{kind}: {found[kind][-1]:.2f} s", flush=True)
    return found


def serve(mount: Path, undo: ExitStack) -> subprocess.Popen[str] | None:
    """A process that is the server of a mount; None where there can be none."""
    mount.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, "-c", SERVER, str(mount)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    undo.callback(process.communicate)
    undo.callback(process.kill)  # closes its descriptor: whoever waits for the mount gets an error
    assert process.stdout is not None
    return process if process.stdout.readline() == "ready\n" else None


# -- the figures ------------------------------------------------------------------------------------------------------


def figures_of(
    seconds: Mapping[str, list[float]], costs: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, int]]:
    figures: dict[str, float] = {}
    samples: dict[str, int] = {}
    for kind, values in seconds.items():
        if values:
            figures |= {f"{kind}_p50_s": median(values), f"{kind}_max_s": max(values)}
            samples |= {f"{kind}_p50_s": len(values), f"{kind}_max_s": len(values)}
    figures |= {f"cost_percent_{name}": cost for name, cost in costs.items()}
    if costs:
        figures["cost_percent_all"] = sum(costs.values())
    return figures, samples | dict.fromkeys((name for name in figures if name.startswith("cost_")), 1)


def report(
    options: Namespace, seconds: Seconds, costs: Mapping[str, float], left_out: list[str], problems: list[str]
) -> None:
    print()
    rows = []
    for kind, values in seconds.items():
        if values:
            bound = BOUNDS.get(kind)
            met = "" if bound is None else f"{bound:g} {'met' if max(values) <= bound else 'MISSED'}"
            rows.append([kind, str(len(values)), f"{median(values):.2f}", f"{max(values):.2f}", met])
    print_table(["fault", "n", "median, s", "longest, s", "bound, s"], rows)
    print()
    print_table(["sensor", "% of a core"], [[name, f"{cost:.3f}"] for name, cost in costs.items()])
    total = sum(costs.values())
    print(f"\nall together {total:.3f} %, bound {COST_BOUND:g}: {'met' if total < COST_BOUND else 'MISSED'}")
    for line in (*(f"left out: {one}" for one in left_out), *(f"NOT SEEN: {one}" for one in problems)):
        print(line)
    write_report(options.json, *figures_of(seconds, costs))


if __name__ == "__main__":
    sys.exit(main())
