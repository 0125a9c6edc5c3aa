"""A decision can be taken again from the log, by the policy that held then."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from evertrain.decide import ladder
from evertrain.decide.replay import replay
from evertrain.model import records as r
from evertrain.model.config import LadderConfig
from evertrain.model.decisions import Policy, Restart
from support.ladders import Job

ALL = Policy(sources=("inspect", "replay", "roll_back"))


def checked() -> Job:
    """Two crashes; the checks name somebody, who is replaced."""
    job = Job(standby=1, policy=ALL)
    job.fails()
    job.restarts()
    job.fails()
    job.answers("inspect", "suspects", "node-2")
    return job


def test_every_decision_of_an_incident_is_taken_again_and_agrees() -> None:
    again = replay(checked().log, 2)
    assert [one.decided.action for one in again] == ["inspect", "evict"]
    assert all(one.agrees for one in again)


def test_it_agrees_after_the_log_was_written_and_read() -> None:
    data = msgspec.json.encode(checked().log)
    assert all(one.agrees for one in replay(msgspec.json.decode(data, type=list[r.AnyRecord]), 2))


def test_a_decision_that_would_be_another_now_differs() -> None:
    log = checked().log
    changed = [
        replace(one, actions=(Restart(because="as it was"),))
        if isinstance(one, r.Decided) and one.action == "inspect"
        else one
        for one in log
    ]
    (first, *_) = replay(changed, 2)
    assert not first.agrees and not first.problem


def test_each_is_taken_by_the_policy_that_held_then() -> None:
    job = Job(standby=1)
    job.alert()
    job.policy = Policy(ladder=LadderConfig(alerts_to_evict=3))
    job.hash = ladder.policy_hash(job.policy)
    job.write(r.PolicyAdopted(time=job.now, hash=job.hash, policy=job.policy))
    job.opens("node-1")
    job.alert()
    job.alert()
    found = replay(job.log, 1)
    assert [(one.agrees, one.decided.policy) for one in found] == [(True, job.hash)] * 2


def test_decisions_that_cannot_be_taken_again_say_why() -> None:
    job = Job()
    job.opens("node-1")
    old = r.Decided(time=1.0, incident=1, action="restart", because="it was so")
    (one,) = replay([*job.log, old], 1)
    assert not one.agrees and "older version" in one.problem
    job.fails()
    unknown = [replace(one, policy="f00") if isinstance(one, r.Decided) else one for one in job.log]
    (one,) = replay(unknown, 2)
    assert not one.agrees and "f00" in one.problem
