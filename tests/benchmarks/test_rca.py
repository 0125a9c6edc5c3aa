"""What the benchmark of root causes makes of what was true and what was said."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import rca
from netbed import bed as beds
from netbed import score
from netbed.bed import Bed, Machine
from netbed.faults import FAULTS, SECONDS
from netbed.score import Effect, Outcome, Seen, Truth, Verdict
from support.waiting import eventually

BENCHMARKS = Path(rca.__file__).parent
NODES = tuple(f"node-{rank}" for rank in range(8))
FELT = Effect(before=0.25, during=1.0, after=0.25, longest=1.5, ratio=4.0)
WEAK = Effect(before=0.25, during=0.3, after=0.25, longest=0.4, ratio=1.2)


def truth(fault: str = "slow", *ranks: int, began: float = 100.0) -> Truth:
    return Truth(fault, ranks or (3,), began, began + SECONDS)


def said(time: float, ranks: list[int], component: str = "compute", id: int = 1, **more: Any) -> Seen:
    nodes = [NODES[rank] for rank in ranks]
    incident = {"id": id, "cause": "slow", "ranks": ranks, "nodes": nodes, "links": [], "component": component} | more
    return Seen(time, incident)


def judged(*seen: Seen, of: Truth | None = None, alarms: Sequence[float] = (102.5,)) -> Outcome:
    return score.judge(of or truth(), FELT, alarms, seen)


def localised(outcome: Outcome) -> bool:
    return score.is_localised(outcome, is_network=FAULTS[outcome.truth.fault].is_network)


# --- verdicts


def test_times_count_from_the_fault_to_the_alarm_and_from_there_to_a_name() -> None:
    changes = (said(103.5, [], "none"), said(103.9, [2]), said(105.0, [3]), said(106.0, [3], evidence=["more"]))
    outcome = judged(*changes, alarms=[50.0, 103.25, 104.0])
    assert outcome.detected_s == pytest.approx(3.25)
    assert outcome.named_s == pytest.approx(0.65)
    assert outcome.settled_s == pytest.approx(1.75)  # what it says beside does not matter
    assert outcome.first == Verdict((2,), "compute")
    assert localised(outcome)
    assert not score.is_first_right(outcome, is_network=False)


def test_the_last_verdict_counts_also_where_it_is_worse() -> None:
    assert not localised(judged(said(103, [3]), said(105, [2])))
    assert not localised(judged(said(103, [3]), said(105, [2, 3])))
    assert not localised(judged(said(103, [3]), said(105, [], "none")))


def test_a_name_that_comes_back_has_not_settled_before() -> None:
    outcome = judged(said(102, [3]), said(103, [2]), said(105, [3]))
    assert outcome.settled_s == pytest.approx(2.5)


def test_nothing_said_is_nothing_found() -> None:
    assert judged(alarms=()).detected_s is None
    assert judged().detected_s == pytest.approx(2.5) and judged().named_s is None
    assert not localised(judged())
    # what is said before the fault, or long after it, is of something else
    late = 100 + SECONDS + score.LATE_S + 1
    elsewhere = judged(said(99, [3]), said(late, [3], id=2), alarms=[98, late])
    assert elsewhere.detected_s is None and elsewhere.last is None


def test_incidents_that_are_not_about_communication_do_not_find_a_fault() -> None:
    assert judged(said(101, [3], component="")).last is None


def test_of_a_link_the_right_pair_is_enough_and_of_a_rank_it_is_not() -> None:
    pair = said(103, [2, 3], "network", links=[[2, 3]])
    on_link = judged(pair, of=truth("loss"))
    assert localised(on_link) and score.is_by_pair(on_link)
    assert not localised(judged(pair, of=truth("slow")))
    assert not localised(judged(said(103, [1, 2], "network", links=[[1, 2]]), of=truth("loss")))
    # two that are named without saying that it is their link
    assert not localised(judged(said(103, [2, 3], "network"), of=truth("loss")))


def test_of_two_links_either_is_right_and_both_are() -> None:
    both = truth("traffic", 1, 6)
    for named, is_right in (([1], True), ([6], True), ([1, 6], True), ([1, 2], False), ([2], False)):
        assert localised(judged(said(103, named, "network"), of=both)) is is_right


# --- what counts


def steps(*parts: tuple[float, float], start: float = 80.0) -> list[float]:
    """Beginnings of steps: of so many seconds each until then."""
    times = [start]
    for until, each in parts:
        while times[-1] < until - 1e-9:
            times.append(times[-1] + each)
    return times


def test_a_fault_is_felt_by_the_mean_step_or_by_one_long_one() -> None:
    one = truth()
    usual = score.usual_step_s(steps((100, 0.25), (110, 0.5), (140, 0.25)), [one])
    assert usual == pytest.approx(0.25)
    twice = score.effect(one, steps((100, 0.25), (110, 0.5), (140, 0.25)), usual)
    assert twice.ratio == pytest.approx(2.0) and twice.is_felt
    assert twice.before == pytest.approx(0.25) and twice.after == pytest.approx(0.25)
    hardly = score.effect(one, steps((100, 0.25), (110, 0.4), (140, 0.25)), usual)
    assert not hardly.is_felt
    stuck = score.effect(one, [*steps((100, 0.25)), *steps((140, 0.25), start=112)], usual)
    assert stuck.longest == pytest.approx(12.0) and stuck.is_felt


def test_a_single_long_step_is_felt_where_the_others_are_quick() -> None:
    one = truth()
    times = [*steps((103, 0.25)), *steps((140, 0.25), start=106.1)]
    assert score.effect(one, times, 0.25).is_felt


def test_figures_are_of_the_faults_that_were_felt() -> None:
    outcomes = [
        score.judge(truth(), FELT, [103], [said(103.5, [3])]),
        score.judge(truth("quota", 5, began=200), FELT, [205], [said(205.5, [5], "network", id=2)]),
        score.judge(truth("slow", 1, began=300), WEAK, [], []),
        score.judge(truth("narrow", 4, began=400), FELT, [], []),
    ]
    is_network = {name: fault.is_network for name, fault in FAULTS.items()}
    components = {name: fault.components for name, fault in FAULTS.items()}
    figures = score.figures(outcomes, is_network, components)
    assert figures["felt_fraction"] == pytest.approx(3 / 4)
    assert figures["detected_fraction"] == pytest.approx(2 / 3)
    assert figures["localised_fraction"] == pytest.approx(2 / 3)
    assert figures["component_right_fraction"] == pytest.approx(1 / 3)
    assert figures["detection_p50_s"] == pytest.approx(4.0)
    assert figures["detection_p100_s"] == pytest.approx(5.0)


def false(truths: list[Truth], *seen: Seen) -> list[str]:
    return score.false_triggers(truths, (), seen, NODES)


def test_whatever_is_said_while_nothing_is_wrong_is_false() -> None:
    one = truth()
    assert false([one], said(103, [3])) == []
    (line,) = false([one], said(90, [3]))
    assert "nothing was wrong" in line
    (line,) = false([], said(90, [], component=""))
    assert "nothing was wrong" in line
    assert score.false_triggers([one], [103, 117], [], NODES) == []
    (line,) = score.false_triggers([one], [90], [], NODES)
    assert "an alarm" in line


def test_a_second_incident_of_a_fault_is_false_only_if_it_names_somebody_else() -> None:
    one = truth()
    assert false([one], said(103, [3]), said(108, [3], id=2)) == []
    assert len(false([one], said(103, [3]), said(108, [2], id=2))) == 1
    assert false([one], said(102, [3], "", id=2), said(103, [2])) == []
    assert len(false([one], said(102, [1], "", id=2), said(103, [3]))) == 1


# --- plans and parts


def test_a_plan_has_each_fault_once_far_enough_apart_and_is_another_one_each_round() -> None:
    plan = rca.plan_of(list(FAULTS), "1-0", rca.GAP_S)
    assert sorted(one["fault"] for one in plan) == sorted(FAULTS)
    assert all(one["after_s"] >= 12 and 0 <= one["rank"] < beds.RANKS for one in plan)
    assert plan == rca.plan_of(list(FAULTS), "1-0", rca.GAP_S)
    assert plan != rca.plan_of(list(FAULTS), "1-1", rca.GAP_S)


def test_no_part_takes_longer_than_it_may() -> None:
    faults_s = len(FAULTS) * (SECONDS + rca.GAP_S[1]) + rca.WARM_S + 2 * rca.CORES_S
    assert faults_s < 600 - 120
    quick_s = len(FAULTS) * (SECONDS + rca.QUICK_GAP_S[1]) + rca.WARM_S + rca.QUICK_HEALTHY_S
    assert quick_s < 480 - 60


def test_parts_that_are_done_are_remembered(tmp_path: Path) -> None:
    state = tmp_path / "below" / "parts.jsonl"
    assert rca.known(state) == {}
    rca.keep(state, {"part": "faults 1", "truths": []})
    rca.keep(state, {"part": "healthy 1", "truths": []})
    assert list(rca.known(state)) == ["faults 1", "healthy 1"]


# --- the bed


@pytest.fixture(scope="module")
def bed() -> Iterator[tuple[Bed, list[Machine]]]:
    """Two machines, for all tests here; nothing is left of them."""
    if reason := beds.why_not():
        pytest.skip(reason)
    with beds.made(2) as made:
        yield made
    assert left_of(made[0].token) == []


def left_of(token: str) -> list[str]:
    spaces = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    places = [*Path("/tmp").glob(f"{token}*"), *Path("/sys/fs/cgroup").glob(f"*/{token}"), beds.NOTES / f"{token}.json"]
    return [line for line in spaces.splitlines() if token in line] + [str(one) for one in places if one.exists()]


def output_of(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout


def test_machines_have_their_own_names_and_networks(bed: tuple[Bed, list[Machine]]) -> None:
    made, (first, second) = bed
    assert [output_of(*one.prefix, "hostname").strip() for one in (first, second)] == [made.name(0), made.name(1)]
    assert output_of(*second.prefix, "ls", "/sys/class/net").split() == ["data0", "lo", "mgmt0"]
    if made.groups.folder is not None:
        assert "rank-1" in output_of(*second.prefix, "ls", str(made.groups.folder))
    assert output_of(sys.executable, "-c", TALK, made.data_address(0), *first.prefix, "--", *second.prefix) == "hello\n"


TALK = """
import subprocess, sys
address, words = sys.argv[1], sys.argv[2:]
here, there = words[:words.index("--")], words[words.index("--") + 1:]
listen = f"import socket; server = socket.create_server(({address!r}, 5000)); print(1, flush=True); " \\
    "print(server.accept()[0].recv(10).decode())"
speak = f"import socket; socket.create_connection(({address!r}, 5000), 5).sendall(b'hello')"
with subprocess.Popen([*here, sys.executable, "-c", listen], stdout=subprocess.PIPE, text=True) as server:
    server.stdout.readline()
    subprocess.run([*there, sys.executable, "-c", speak], check=True)
    print(server.stdout.readline(), end="")
"""

ABANDON = f"""
import os, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from netbed import bed
with bed.made(2) as (made, _):
    print(made.token, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_what_a_killed_bed_leaves_the_next_one_takes_away(bed: tuple[Bed, list[Machine]]) -> None:
    killed = subprocess.run([sys.executable, "-c", ABANDON], capture_output=True, text=True, timeout=60)
    token = killed.stdout.strip()
    assert killed.returncode == -9 and left_of(token) != []
    beds.clear_dead()
    assert left_of(token) == []
    assert left_of(bed[0].token) != []


@pytest.mark.parametrize("name", ["link-down", "narrow", "loss", "one-way-loss", "quota", "slow", "slow-copy"])
def test_a_fault_is_over_when_its_block_is(name: str, bed: tuple[Bed, list[Machine]]) -> None:
    if reason := FAULTS[name].why_not():
        pytest.skip(reason)
    made, _ = bed
    before = state_of(made)
    with FAULTS[name].way(made, 1, random.Random(1)):
        assert state_of(made) != before
    assert state_of(made) == before


def state_of(bed: Bed) -> list[str]:
    """All that a fault may change."""
    asked = [
        ["ip", "-n", bed.space(1), "-br", "link", "show", "data0"],
        ["tc", "-n", bed.space(1), "qdisc", "show", "dev", "data0"],
    ]
    if shutil.which("nft"):
        asked.append([*bed.in_space(bed.switch), "nft", "list", "tables"])
    found = [output_of(*one) for one in asked]
    groups = bed.groups.folder
    files = [*(groups or Path("/nowhere")).glob("rank-1/cpu.[cm]*"), *bed.control.glob("rank-*")]
    return found + [f"{file.name} {file.read_text()}" for file in sorted(files) if "stat" not in file.name]


def test_processes_of_a_bed_are_those_in_its_networks(bed: tuple[Bed, list[Machine]]) -> None:
    made, machines = bed
    with subprocess.Popen([*machines[1].prefix, "sleep", "60"]) as sleeper:
        eventually(lambda: sleeper.pid in {one.pid for one in made.processes()}, "the sleeper")
        sleeper.kill()
    assert os.getpid() not in {one.pid for one in made.processes()}
