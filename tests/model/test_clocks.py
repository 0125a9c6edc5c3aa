"""All times of a report move together, and what is no time stays."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from evertrain.model.activity import RankActivity
from evertrain.model.clocks import shifted
from evertrain.model.report import AttemptReport, Exit, NodeReport, PageReport, RankError, RankReport
from evertrain.model.sensing import SensorState, Sign

ERROR = RankError(type="ValueError", time=40.0)
REPORT = NodeReport(
    node="node-0",
    attempts=(
        AttemptReport(
            attempt=1,
            phase="running",
            ranks=(
                RankReport(rank=0, pid=1, state="ended", exit=Exit(status=1, time=41.0, error=ERROR)),
                RankReport(rank=1, pid=2, state="ended", exit=Exit(status=-9, time=41.5)),
                RankReport(rank=2, pid=3, state="running"),
            ),
        ),
    ),
    pages=(
        PageReport(rank=2, attempt=1, pid=3, progress_time=42.0, resumed_time=30.0, passed_time=31.0, step_s=0.5),
        PageReport(rank=3, attempt=1, pid=4, progress_time=2.0),
    ),
    activities=(RankActivity(rank=2, node="node-0", still_s=3.0, inside=None, last=None, started=True),),
    sensors=(SensorState(name="gpu", state="blind", period_s=10.0, since=35.0, cpu_s=0.5),),
    signs=(Sign(key="gpu:0:lost", kind="gpu_lost", evidence="GPU 0 is gone", time=36.0),),
)


def times(value: Any) -> list[float]:
    """Every field called `time` or `…_time`, wherever it is."""
    if isinstance(value, dict):
        own = [one for name, one in value.items() if name.endswith("time") and isinstance(one, float)]
        return own + [time for one in value.values() for time in times(one)]
    return [time for one in value for time in times(one)] if isinstance(value, list | tuple) else []


def test_every_known_time_is_shifted_and_nothing_else() -> None:
    before, after = msgspec.to_builtins(REPORT), msgspec.to_builtins(shifted(REPORT, 100.0))
    assert sorted(times(before)) == [0.0, 0.0, 2.0, 30.0, 31.0, 36.0, 40.0, 41.0, 41.5, 42.0]
    assert sorted(times(after)) == [0.0, 0.0, 102.0, 130.0, 131.0, 136.0, 140.0, 141.0, 141.5, 142.0]
    assert after["activities"] == before["activities"]
    assert after["pages"][0]["step_s"] == 0.5
    (sensor,) = after["sensors"]
    assert (sensor["since"], sensor["period_s"], sensor["cpu_s"]) == (135.0, 10.0, 0.5)


@pytest.mark.parametrize("by_s", [3600.0, -3600.0])
def test_back_and_forth_is_the_same_report(by_s: float) -> None:
    # a wall time lies far from 0.0, which means unknown
    wall = shifted(REPORT, 1.75e9)
    assert shifted(shifted(wall, by_s), -by_s) == wall
    assert shifted(REPORT, 0.0) is REPORT
