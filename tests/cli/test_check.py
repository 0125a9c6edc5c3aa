"""The exit code is what schedulers act upon, and a sensor that hangs keeps nobody waiting."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from evertrain.agent import sensing
from evertrain.cli import check
from evertrain.cli.main import main
from evertrain.model.sensing import Seen, Sign


class Fake:
    """A sensor that sees what it is told to."""

    period_s = 0.05
    limit_s = 0.3

    def __init__(self, name: str, *seen: Seen | Exception, hangs: bool = False) -> None:
        self.name = name
        self._seen = list(seen)
        self._hangs = hangs
        self.over = threading.Event()

    def look(self, now: float) -> Seen:
        if self._hangs:
            self.over.wait(30)
        one = self._seen.pop(0) if len(self._seen) > 1 else self._seen[0]
        if isinstance(one, Exception):
            raise one
        return one


def sign(kind: str, evidence: str = "seen") -> Sign:
    return Sign(key=kind, kind=kind, evidence=evidence, time=0.0)


WELL = Seen(last="all well")
ODD = Seen(signs=(sign("gpu_hot", "GPU 3: 92 C"),), last="8 GPUs")
BROKEN = Seen(signs=(sign("gpu_lost", "GPU 3 is lost"),), last="7 GPUs")
BLIND = Seen(blind="no permission")
ABSENT = Seen(absent="no driver")


@pytest.mark.parametrize(
    ("seen", "code"),
    [
        ([WELL, WELL], 0), ([WELL, ABSENT], 0), ([ABSENT, ABSENT], 0), ([WELL, ODD], 1), ([ODD, BLIND], 1),
        ([WELL, BROKEN], 2), ([BROKEN, ODD, BLIND], 2), ([WELL, BLIND], 3), ([], 3),
    ],
)  # fmt: skip
def test_the_worst_counts(seen: Sequence[Seen], code: int) -> None:
    sensors = [Fake(name, one) for name, one in zip(("host", "gpu", "network"), seen, strict=False)]
    assert check.worst(check.look(sensors, 0.1)) == code


def test_what_was_seen_once_is_not_forgotten() -> None:
    (found,) = check.look([Fake("gpu", BROKEN, WELL)], 1.2)
    assert (found.status, found.line) == (check.CRITICAL, "GPU 3 is lost")


def test_a_sensor_that_hangs_or_fails_is_unknown() -> None:
    hanging, failing = Fake("host", WELL, hangs=True), Fake("gpu", ValueError("no"))
    began = time.monotonic()
    found = check.look([hanging, failing, Fake("network", WELL)], 0.1)
    assert time.monotonic() - began < 5
    hanging.over.set()
    assert [one.status for one in found] == [3, 3, 0]
    assert found[0].line == "no answer within 0.3 s" and "ValueError: no" in found[1].line


def test_what_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sensors = [Fake("host", WELL), Fake("gpu", ODD), Fake("network", WELL)]
    monkeypatch.setattr(sensing, "sensors_here", lambda folder: sensors)
    assert main(["check", "--seconds", "0.1"]) == 1
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "WARNING - all: gpu: GPU 3: 92 C"
    assert rest == ["host: OK: all well", "gpu: WARNING: GPU 3: 92 C", "network: OK: all well"]
    assert main(["check", "network", "--seconds", "0.1", "--json"]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert said["status"] == "ok" and [one["name"] for one in said["checks"]] == ["network"]


def test_a_group_that_is_named_has_to_be_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = {"gpu": ABSENT, "dcgm": Seen(absent="nobody listens"), "host": WELL, "network": ABSENT}
    monkeypatch.setattr(sensing, "sensors_here", lambda folder: [Fake(name, seen) for name, seen in here.items()])

    def lines(*words: str, code: int) -> list[str]:
        assert main(["check", *words, "--seconds", "0.1"]) == code
        return capsys.readouterr().out.splitlines()

    assert lines("gpu", code=3) == [
        "UNKNOWN - gpu: gpu: nothing of that kind here: no driver; dcgm: nothing of that kind here: nobody listens",
        "gpu: UNKNOWN: nothing of that kind here: no driver",
        "dcgm: UNKNOWN: nothing of that kind here: nobody listens",
    ]
    assert lines("network", code=3)[0] == "UNKNOWN - network: network: nothing of that kind here: no driver"
    said: dict[str, Any] = json.loads(lines("gpu", "--json", code=3)[0])
    assert (said["status"], said["checks"][0]["status"]) == ("unknown", "unknown")
    # as part of all there is nothing odd about it
    assert "gpu: OK: none here: no driver" in lines(code=0) == lines("all", code=0)
    here["dcgm"] = WELL
    assert lines("gpu", code=0)[1] == "gpu: OK: none here: no driver", "one of the two sees them"


def test_bad_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "disk"]) == 3, "a scheduler must not take a typing error for a broken machine"
    assert main(["check", "--seconds", "0"]) == 3
    assert "more than 0" in capsys.readouterr().err
