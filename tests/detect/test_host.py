"""When is something odd with a machine, and when is it the same event still?"""

from __future__ import annotations

from typing import Any

import pytest

from evertrain.detect.host import Host
from evertrain.detect.readings import grade
from evertrain.model.sensing import HostReading, Sign


class Machine:
    """Looked at every ten seconds."""

    def __init__(self) -> None:
        self.host, self.now = Host(), 1000.0

    def look(self, **seen: Any) -> tuple[Sign, ...]:
        self.now += 10.0
        return self.host.judge(HostReading(**seen), self.now)

    def looks(self, count: int, **seen: Any) -> list[tuple[Sign, ...]]:
        return [self.look(**seen) for _ in range(count)]


FULL: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("disk_full", *({"disk_free_fraction": {"/data": free}} for free in (0.019, 0.03, 0.05))),
    ("disk_full", *({"shared_memory_free_fraction": free} for free in (0.01, 0.03, 0.05))),
    ("memory_low", *({"memory_free_fraction": free} for free in (0.01, 0.03, 0.05))),
    ("descriptors_low", *({"descriptors_fraction": used} for used in (0.985, 0.97, 0.9))),
    ("clock_offset", *({"clock_offset_s": off} for off in (-1.1, -0.6, 0.1))),
]


@pytest.mark.parametrize(("kind", "bad", "near", "good"), FULL)
def test_what_is_odd_in_two_looks_is_a_sign_until_it_is_clearly_over(
    kind: str, bad: dict[str, Any], near: dict[str, Any], good: dict[str, Any]
) -> None:
    machine = Machine()
    assert machine.look(**bad) == ()
    (sign,) = machine.look(**bad)
    assert (sign.kind, grade(sign.kind), sign.time) == (kind, "condition", 1010.0)
    assert machine.looks(5, **near) == [(sign,)] * 5 == machine.looks(5, **bad)
    assert machine.look(**good) == ()
    assert machine.looks(100, **near) == [()] * 100, "near the limit is not over it"
    machine.look(**bad)
    (again,) = machine.look(**bad)
    assert again.key != sign.key


@pytest.mark.parametrize(("kind", "bad", "near", "good"), FULL)
def test_what_is_odd_in_one_look_only_is_nothing(
    kind: str, bad: dict[str, Any], near: dict[str, Any], good: dict[str, Any]
) -> None:
    machine = Machine()
    for _ in range(10):
        assert machine.look(**bad) == machine.look(**near) == machine.look(**bad) == machine.look(**good) == ()


def test_evidence_names_the_folder_what_was_read_and_the_limit() -> None:
    machine = Machine()
    machine.look(disk_free_fraction={"/data": 0.013, "/home": 0.5})
    (sign,) = machine.look(disk_free_fraction={"/data": 0.013, "/home": 0.5})
    assert sign.device == "/data"
    assert sign.evidence == "/data is full: 1.3% (the limit is 2%) are free; remove what is not needed"


def test_a_mount_is_dead_after_ten_seconds_and_alive_when_it_answers() -> None:
    machine = Machine()
    assert machine.look(mounts_dead={"/data": 0.5}) == ()
    assert machine.look(mounts_dead={"/data": 10.0}) == ()
    (dead,) = machine.look(mounts_dead={"/data": 20.5})
    assert (dead.kind, dead.device) == ("mount_dead", "/data")
    assert dead.evidence == "/data has not answered for 20 s; the limit is 10 s"
    assert machine.look(mounts_dead={"/data": 30.5}) == (dead,)
    assert machine.look() == ()


def test_disk_errors_count_when_they_are_many_at_a_time() -> None:
    machine = Machine()
    machine.look(disk_errors={"sda": 500, "sdb": 0})
    for count in range(500, 540, 2):
        assert machine.looks(3, disk_errors={"sda": count, "sdb": 0}) == [()] * 3, "asked for its health"
    (sign,) = machine.look(disk_errors={"sda": 560, "sdb": 0})
    assert (sign.kind, sign.device) == ("disk_errors", "sda") and "sda: 2" in sign.evidence
    machine.looks(7, disk_errors={"sda": 560, "sdb": 0})
    assert machine.look(disk_errors={"sda": 560, "sdb": 0}) == ()
    assert machine.look(disk_errors={"sda": 0, "sdb": 0}) == (), "another disk by this name"
    assert machine.look(disk_errors={"sda": 5, "sdb": 0}) == ()


def test_a_clock_that_nobody_has_kept_right_is_as_its_owner_wants_it() -> None:
    assert Machine().looks(50, clock_is_synchronised=False) == [()] * 50
    machine = Machine()
    machine.look(clock_is_synchronised=True)
    for _ in range(5):
        assert machine.looks(11, clock_is_synchronised=False) == [()] * 11, "the time service is started again"
        machine.look(clock_is_synchronised=True)
    (sign,) = machine.looks(12, clock_is_synchronised=False)[-1]
    assert sign.kind == "clock_unsynchronised"


def test_what_cannot_be_said_accuses_nobody() -> None:
    assert Machine().looks(50) == [()] * 50


def test_an_agent_that_is_started_again_soon_reports_the_same_event() -> None:
    signs = []
    for start in (1205.0, 1405.0, 1905.0):
        machine = Machine()
        machine.now = start
        signs += machine.looks(2, memory_free_fraction=0.01)[-1]
    assert signs[0].key == signs[1].key != signs[2].key
