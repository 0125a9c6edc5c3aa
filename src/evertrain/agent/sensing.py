"""What do this node's sensors see? Each looks in a thread of its own, so that none can hold up another, or the agent.

A look that takes longer than it may is left alone until it comes back: its sensor is blind until then, and no second
look begins beside it. Nothing that a sensor does ends the agent. Times are by the monotonic clock.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from evertrain.keeper.children import boot_id
from evertrain.model.sensing import KernelMessage, Seen, SensorState, Sign
from evertrain.model.spec import AgentSpec

if TYPE_CHECKING:
    from evertrain.detect.kernel import KernelRules

_log = logging.getLogger(__name__)

KEEP_S = 600.0
"""So long a sign is told after it was seen last."""
MOST_SIGNS = 128
"""That are told; the newest of all."""
_JITTER = 0.1
"""Sensors of many agents on one machine must not all look at once."""
_CATALOGUE_AFTER_S = 20.0
_ABSENT_S = 60.0
"""What has nothing to look at is asked again so seldom."""

State = Literal["starting", "ok", "blind", "absent"]


class Sensor(Protocol):
    """Reads the world; `look` may block, and is never called twice at a time."""

    name: str
    period_s: float
    limit_s: float

    def look(self, now: float) -> Seen: ...


class Sensing:
    """Runs the sensors; `sensors` and `signs` are what they have come to."""

    def __init__(
        self,
        spec: AgentSpec,
        sensors: Sequence[Sensor],
        wake: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`wake` is called in the event loop; `jitter` gives a number from 0 to 1 for each wait."""
        self._clock = clock
        self._signs = _Signs()
        self._stop = threading.Event()
        self._wake = wake
        self._watched = [_Watched(sensor, self._found, self._stop, clock, jitter) for sensor in sensors]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._node = spec.node

    async def run(self) -> None:
        """Never returns; a look that is under way at the end is left behind."""
        self._loop = asyncio.get_running_loop()
        for watched in self._watched:
            name = f"sensor {watched.sensor.name} of {self._node}"
            threading.Thread(target=watched.work, name=name, daemon=True).start()
        try:
            await asyncio.Event().wait()
        finally:
            self._stop.set()

    @property
    def sensors(self) -> tuple[SensorState, ...]:
        now = self._clock()
        return tuple(watched.state(now) for watched in self._watched)

    @property
    def signs(self) -> tuple[Sign, ...]:
        """Those that hold or were seen of late, oldest first."""
        return self._signs.at(self._clock())

    def _found(self, signs: Sequence[Sign]) -> None:
        """In a sensor's thread: take what it has seen."""
        new = self._signs.see(signs, self._clock())
        for sign in new:
            _log.warning("%s: %s", sign.kind, sign.evidence)
        if new and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:  # the agent has left
                pass


class _Signs:
    """By key, with the time when each was seen last. What was said of an event first is kept: it is told once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[Sign, float]] = {}

    def see(self, signs: Sequence[Sign], now: float) -> list[Sign]:
        """Those that are new."""
        with self._lock:
            self._forget(now)
            new = []
            for sign in signs:
                known = self._kept.get(sign.key)
                if known is None:
                    new.append(sign)
                self._kept[sign.key] = (sign if known is None else known[0], now)
            for sign in sorted((one for one, _ in self._kept.values()), key=lambda one: one.time)[:-MOST_SIGNS]:
                del self._kept[sign.key]
            return [sign for sign in new if sign.key in self._kept]

    def at(self, now: float) -> tuple[Sign, ...]:
        with self._lock:
            self._forget(now)
            return tuple(sorted((sign for sign, _ in self._kept.values()), key=lambda sign: (sign.time, sign.key)))

    def _forget(self, now: float) -> None:
        self._kept = {key: (sign, last) for key, (sign, last) in self._kept.items() if now - last <= KEEP_S}


class _Watched:
    """One sensor, and how it is doing."""

    def __init__(
        self,
        sensor: Sensor,
        found: Callable[[Sequence[Sign]], None],
        stop: threading.Event,
        clock: Callable[[], float],
        jitter: Callable[[], float],
    ) -> None:
        self.sensor = sensor
        self._found, self._stop, self._clock, self._jitter = found, stop, clock, jitter
        self._lock = threading.Lock()
        self._began: float | None = None
        """Of the look that is under way."""
        self._state: State = "starting"
        self._because = ""
        self._last = ""
        self._since = clock()
        self._looks = 0
        self._cpu_s = 0.0

    def state(self, now: float) -> SensorState:
        sensor = self.sensor
        with self._lock:
            state, because, since = self._state, self._because, self._since
            if self._began is not None and now - self._began > sensor.limit_s:
                because = f"no answer for {now - self._began:.0f} s; it may take {sensor.limit_s:g} s"
                since = since if state == "blind" else self._began + sensor.limit_s
                state = "blind"
            return SensorState(
                name=sensor.name,
                state=state,
                period_s=sensor.period_s,
                last=self._last,
                because=because,
                since=since,
                looks=self._looks,
                cpu_s=round(self._cpu_s, 6),
            )

    def work(self) -> None:
        """The sensor's thread. It does not give way to ranks: the event loop would wait for it where it waits."""
        # the first look comes soon, at another moment for each sensor
        wait_s = min(1.0, self.sensor.period_s) * self._jitter()
        while not self._stop.wait(wait_s):
            seen = self._look()
            if self._stop.is_set():
                return
            self._found(seen.signs)
            period_s = max(self.sensor.period_s, _ABSENT_S) if seen.absent else self.sensor.period_s
            wait_s = period_s * (1.0 + _JITTER * (2.0 * self._jitter() - 1.0))

    def _look(self) -> Seen:
        began, cpu = self._clock(), time.thread_time()
        with self._lock:
            self._began = began
        try:
            seen = self.sensor.look(began)
        except Exception as error:
            _log.exception("sensor %s", self.sensor.name)
            seen = Seen(blind=f"the sensor itself failed: {type(error).__name__}: {error}; see the agent's log")
        with self._lock:
            self._began = None
            self._looks += 1
            self._cpu_s += time.thread_time() - cpu
            state: State = "blind" if seen.blind else "absent" if seen.absent else "ok"
            if state != self._state or self._clock() - began > self.sensor.limit_s:
                self._state, self._since = state, self._clock()
            self._because = seen.blind or seen.absent
            self._last = seen.last or self._last
        return seen


# -- which sensors there are -------------------------------------------------------------------------------------------


class Unfit:
    """Stands for a sensor that cannot even be made."""

    period_s = _ABSENT_S
    limit_s = 1.0

    def __init__(self, name: str, error: Exception) -> None:
        self.name = name
        self._because = f"the sensor cannot be made: {type(error).__name__}: {error}; see the agent's log"

    def look(self, now: float) -> Seen:
        return Seen(blind=self._because)


def sensors_of(spec: AgentSpec) -> list[Sensor]:
    """All that this version has; one that cannot be loaded is blind, and keeps nobody else from seeing."""
    found: list[Sensor] = []
    for name, make in MAKERS.items():
        try:
            found.append(make(spec))
        except ModuleNotFoundError as error:
            if error.name != f"evertrain.observe.sensors.{name}":
                found.append(Unfit(name, error))
        except Exception as error:
            _log.exception("sensor %s", name)
            found.append(Unfit(name, error))
    return found


def sensors_here(folder: str) -> list[Sensor]:
    """The same without a job, for a machine whose training would write to `folder`."""
    return sensors_of(
        AgentSpec(
            job="",
            run_id="",
            node=socket.gethostname(),
            node_dir="",
            disk_dir=folder,
            log_root=folder,
            controller_url="",
            token_file="",
            # whatever leads to other machines counts
            address="",
            fired_dir="",
        )
    )


def _network(spec: AgentSpec) -> Sensor:
    from evertrain.detect.network import Ports, Resends
    from evertrain.observe.sensors.network import NetworkSensor

    return NetworkSensor(Ports().judge, Resends().judge, address=spec.address)


def _host(spec: AgentSpec) -> Sensor:
    from evertrain.detect.host import Host
    from evertrain.observe.sensors.host import HostSensor

    folders = (spec.log_root, spec.disk_dir, spec.code_dir, os.getcwd())
    return HostSensor(Host().judge, folders=folders, shared_memory=spec.node_dir or "/dev/shm")


def _gpu(spec: AgentSpec) -> Sensor:
    from evertrain.detect.gpu import GpuRules
    from evertrain.observe.sensors.gpu import GpuSensor

    return GpuSensor(GpuRules(boot_id=boot_id()))


def _dcgm(spec: AgentSpec) -> Sensor:
    from evertrain.observe.sensors.dcgm import DcgmSensor

    return DcgmSensor()


def _kernel(spec: AgentSpec) -> Sensor:
    from evertrain.observe.sensors.kernel import VARIABLE, KernelSensor

    # of several nodes on one machine each may have a log of its own
    environ = {name: value.replace("{node}", spec.node) for name, value in os.environ.items() if name == VARIABLE}
    memory = Path(spec.node_dir) / "kernel.json" if spec.node_dir else None
    rules = _KernelRules()
    if memory is not None:
        rules.load_later()
    return KernelSensor(rules, memory=memory, environ=environ)


class _KernelRules:
    """Half a second of CPU is not spent while a job starts; later on it would make the first message late."""

    def __init__(self) -> None:
        self._rules: KernelRules | None = None
        self._lock = threading.Lock()

    def load_later(self, after_s: float = _CATALOGUE_AFTER_S) -> None:
        timer = threading.Timer(after_s, self._load)
        timer.daemon = True
        timer.start()

    def _load(self) -> KernelRules:
        with self._lock:
            if self._rules is None:
                from evertrain.detect.catalogue import build
                from evertrain.detect.kernel import KernelRules
                from evertrain.observe import rules

                self._rules = KernelRules(build(rules.contents(()), ()))
            return self._rules

    def __call__(self, messages: Sequence[KernelMessage]) -> tuple[Sign, ...]:
        return self._load()(messages) if messages else ()


MAKERS: dict[str, Callable[[AgentSpec], Sensor]] = {
    "gpu": _gpu,
    "dcgm": _dcgm,
    "kernel": _kernel,
    "network": _network,
    "host": _host,
}
"""They import when they are called: what one sensor needs and this machine lacks costs that sensor only."""
