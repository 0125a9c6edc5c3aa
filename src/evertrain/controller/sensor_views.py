"""What do the sensors of all nodes see? Summed up by sensor: with thousands of nodes nobody reads them one by one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from evertrain.decide.picture import Picture
from evertrain.decide.state import JobState
from evertrain.model.sensing import SensorState

MOST_NAMED = 8
STATES = ("ok", "blind", "absent", "starting")

Json = dict[str, Any]


def sensors(state: JobState, picture: Picture) -> list[Json]:
    """Each kind of sensor: on how many nodes it sees, what it saw last, and where it is blind and why."""
    found: dict[str, list[tuple[str, SensorState]]] = {}
    for node in state.roster:
        report = picture.report(node)
        for sensor in report.sensors if report is not None and picture.connected(node) else ():
            found.setdefault(sensor.name, []).append((node, sensor))
    return [_summed_up(name, of_nodes) for name, of_nodes in found.items()]


def blind(state: JobState, picture: Picture) -> list[str]:
    """One line for each sensor that cannot see, on its node."""
    return [
        f"{one['node']}: {sensor['name']}: {one['because']}"
        for sensor in sensors(state, picture)
        for one in sensor["blind_at"]
    ]


def _summed_up(name: str, of_nodes: list[tuple[str, SensorState]]) -> Json:
    by_state = {word: sum(sensor.state == word for _, sensor in of_nodes) for word in STATES}
    seeing = [(node, sensor) for node, sensor in of_nodes if sensor.state == "ok"]
    unseeing = [(node, sensor) for node, sensor in of_nodes if sensor.state == "blind"]
    absent = next((sensor.because for _, sensor in of_nodes if sensor.state == "absent"), "")
    return {
        "name": name,
        **by_state,
        "last": seeing[0][1].last if seeing else absent,
        "last_node": seeing[0][0] if seeing else None,
        "period_s": of_nodes[0][1].period_s,
        "cpu_fraction": _cost(sensor for _, sensor in of_nodes),
        "blind_at": [
            {"node": node, "because": sensor.because, "since": sensor.since} for node, sensor in unseeing[:MOST_NAMED]
        ],
    }


def _cost(of_nodes: Iterable[SensorState]) -> float | None:
    """Of one core, where it is dearest; None: it has not looked yet."""
    costs = [sensor.cpu_s / sensor.looks / sensor.period_s for sensor in of_nodes if sensor.looks and sensor.period_s]
    return round(max(costs), 6) if costs else None
