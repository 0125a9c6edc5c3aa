"""What do the sensors say of this machine, now? For `evertrain check`, and for the test that a node makes of itself.

Each looks in a thread of its own; what hangs is left behind, and is not asked again before it is back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from evertrain.agent.sensing import Sensor
    from evertrain.model.sensing import Seen, Sign

GROUPS: Mapping[str, tuple[str, ...]] = {
    "host": ("host", "kernel"),
    "gpu": ("gpu", "dcgm"),
    "network": ("network",),
}
OK, WARNING, CRITICAL, UNKNOWN = 0, 1, 2, 3
"""As monitoring plug-ins number them."""
_LEAST_PAUSE_S = 0.5
_MOST_NAMED = 3


class Found(NamedTuple):
    """What one sensor has come to."""

    name: str
    status: int
    line: str
    signs: tuple[Sign, ...] = ()
    absent: str = ""
    """Why there is nothing to look at on this machine."""


def look(sensors: Sequence[Sensor], seconds: float) -> list[Found]:
    """Have all of them look, again and again, for so long; each in a thread of its own."""
    return _found([_Watched(sensor, time.monotonic() + seconds) for sensor in sensors])


class Inspection:
    """The same sensors, asked now and then: one look each, which tells what is broken for certain.

    What shows only in several looks is news of the agent's own sensors.
    """

    def __init__(self, make: Callable[[], Sequence[Sensor]]) -> None:
        """`make` is called with the first look."""
        self._make = make
        self._sensors: Sequence[Sensor] | None = None
        self._lock = threading.Lock()
        self._watched: dict[str, _Watched] = {}
        """The last look of each sensor."""

    def look(self, group: str) -> list[Found]:
        """Blocks as long as the sensors of the group may take."""
        with self._lock:
            if self._sensors is None:
                self._sensors = self._make()
        asked = []
        for sensor in self._sensors:
            if sensor.name in GROUPS[group]:
                last = self._watched.get(sensor.name)
                hangs = last is not None and last.is_alive()
                self._watched[sensor.name] = last if last is not None and hangs else _Watched(sensor, time.monotonic())
                asked.append(self._watched[sensor.name])
        return _found(asked)


def _found(watched: Sequence[_Watched]) -> list[Found]:
    for one in watched:
        if one.ident is None:  # else it hangs since it was asked before
            one.start()
    for one in watched:
        one.join(max(0.0, one.latest - time.monotonic()))
    return [one.found() for one in watched]


class _Watched(threading.Thread):
    def __init__(self, sensor: Sensor, until: float) -> None:
        super().__init__(name=f"check {sensor.name}", daemon=True)
        self._sensor = sensor
        self._until = until
        self.latest = until + sensor.limit_s
        """A look that begins at the last moment may take that long."""
        self._seen: list[Seen] = []
        self._trouble = ""

    def run(self) -> None:
        while True:
            try:
                self._seen.append(self._sensor.look(time.monotonic()))
            except Exception as error:
                self._trouble = f"the sensor itself failed: {type(error).__name__}: {error}"
                return
            pause_s = max(_LEAST_PAUSE_S, min(1.0, self._sensor.period_s))
            if self._seen[-1].absent or time.monotonic() + pause_s > self._until:
                return
            time.sleep(pause_s)

    def found(self) -> Found:
        name = self._sensor.name
        seen = list(self._seen)
        signs = {sign.key: sign for one in seen for sign in one.signs}
        last = seen[-1] if seen else None
        if signs:
            from evertrain.detect import readings

            is_fault = any(readings.grade(sign.kind) == "fault" for sign in signs.values())
            lines = [sign.evidence for sign in signs.values()]
            more = f"; and {len(lines) - _MOST_NAMED} more" if len(lines) > _MOST_NAMED else ""
            line = "; ".join(lines[:_MOST_NAMED]) + more
            return Found(name, CRITICAL if is_fault else WARNING, line, tuple(signs.values()))
        if self._trouble:
            return Found(name, UNKNOWN, self._trouble)
        if last is None or self.is_alive():
            return Found(name, UNKNOWN, f"no answer within {self._sensor.limit_s:g} s")
        if last.blind:
            return Found(name, UNKNOWN, f"cannot see: {last.blind}")
        if last.absent:
            return Found(name, OK, f"none here: {last.absent}", absent=last.absent)
        return Found(name, OK, last.last)
