"""Between stopped machines a link that is slow or loses packets is named, and told from a machine that is."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import examined, fleet, machines
from support.fleet import Fleet
from support.machines import Host

NO_MACHINES = machines.why_not()
USUAL, TENTH = 200, 20
"""Megabits a second."""


@pytest.fixture(scope="module")
def server() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="evertrain-test-") as folder:
        with fleet.server(Path(folder) / "socket") as path:
            yield path


@pytest.fixture
def four() -> Iterator[list[Host]]:
    if NO_MACHINES:
        pytest.skip(NO_MACHINES)
    with machines.mesh(4) as hosts:
        yield hosts


def examine(hosts: list[Host], server: Path, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Who is accused, and what else was noted, when the network is what was seen."""
    opened = Fleet(server, folder)
    try:
        nodes = {
            host.name: opened.node(host.name, netns=host.namespace, environ={"GLOO_SOCKET_IFNAME": Host.HOME})
            for host in hosts
        }
        store = opened.store(hosts[0].address, hosts[0].namespace)
        addresses = {host.name: host.address for host in hosts}
        exam = examined.Job(nodes, store=store, addresses=addresses).examine("nccl", 90.0)
    finally:
        opened.close()
    return exam.accused, [note for note in examined.notes(exam) if "exchange between nodes" in note]


def named(first: Host, second: Host) -> str:
    return f"the link of {first.name} and {second.name} is bad, each is well towards others"


@pytest.mark.matrix
def test_where_all_is_well_nothing_is_said(four: list[Host], server: Path, tmp_path: Path) -> None:
    for host in four:
        host.shape(USUAL)
    assert examine(four, server, tmp_path) == ({}, [])


def test_a_link_at_a_tenth_is_named_and_nobody_has_to_go(four: list[Host], server: Path, tmp_path: Path) -> None:
    one, other = four[1], four[2]
    for host in four:
        host.shape(USUAL, {other.name: TENTH} if host is one else {one.name: TENTH} if host is other else {})
    accused, notes = examine(four, server, tmp_path)
    assert not accused
    assert named(one, other) in notes[0] and "% of the fleet's median" in notes[1], notes


@pytest.mark.matrix
def test_a_link_that_loses_two_in_a_hundred_is_named(four: list[Host], server: Path, tmp_path: Path) -> None:
    if why := four[2].lose(2, [four[1].address]):
        pytest.skip(why)
    for host in four:
        host.shape(USUAL)
    accused, notes = examine(four, server, tmp_path)
    assert not accused
    assert named(four[1], four[2]) in notes[0] and "TCP had to send" in notes[1], notes


@pytest.mark.parametrize("trouble", [pytest.param("slow", marks=pytest.mark.matrix), "lossy"])
def test_a_machine_of_which_every_link_is_bad_is_told_from_a_bad_link(
    four: list[Host], server: Path, tmp_path: Path, trouble: str
) -> None:
    if trouble == "lossy" and (why := four[2].lose(2)):
        pytest.skip(why)
    for host in four:
        host.shape(TENTH if trouble == "slow" and host is four[2] else USUAL)
    accused, notes = examine(four, server, tmp_path)
    assert list(accused) == [four[2].name] and not any("the link of" in note for note in notes)
    assert ("TCP had to send" in accused[four[2].name]) is (trouble == "lossy")
