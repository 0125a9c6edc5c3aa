"""One line an event, and none without one."""

from __future__ import annotations

from typing import Any

from evertrain.cli import narrate
from evertrain.cli.poll import Seen

Json = dict[str, Any]


def status(**different: Any) -> Json:
    usual = {
        "state": "running",
        "attempt": 1,
        "resume": None,
        "start": {"wanted": "zygote", "mode": "zygote", "reason": ""},
        "nodes": [{"id": "node-0", "state": "active"}],
        "message": "",
    }
    return {**usual, **different}


def incident(**different: Any) -> Json:
    usual = {
        "id": 1,
        "attempt": 1,
        "cause": "killed (SIGKILL)",
        "ranks": [2],
        "nodes": ["node-0"],
        "step": 20,
        "action": "restart",
        "open": True,
        "first_new_step": None,
        "seconds": {"detect": 0.01, "locate": 0.0, "failover": 0.2, "recompute": None},
    }
    return {**usual, **different}


def test_nothing_new_nothing_said() -> None:
    seen = Seen(status(), (incident(),))
    assert narrate.lines(seen, seen) == []


def test_a_first_attempt_and_what_it_resumes() -> None:
    assert narrate.lines(None, Seen(status())) == ["attempt 1 runs"]
    assert narrate.lines(None, Seen(status(attempt=4, resume=20))) == ["attempt 4 runs, resumed from step 20"]


def asked(**different: Any) -> Json:
    usual = {
        "restart": "a",
        "from_step": None,
        "verify": None,
        "args": None,
        "env": [],
        "back": False,
        "verified": None,
    }
    return {**usual, **different}


def verified(**different: Any) -> Json:
    return {"problem": "", "difference": None, "first_step": 39, "last_step": 41, "ranks": 4, **different}


def test_a_restart_that_was_asked_for() -> None:
    calm = Seen(status())
    assert narrate.lines(calm, Seen(status(restart=asked()))) == ["restart asked for: from the newest step"]
    wish = asked(from_step=38, args=["--name", "a b"], env=["A", "B"])
    assert narrate.lines(calm, Seen(status(restart=wish))) == [
        "restart asked for: from step 38; arguments: --name 'a b'; environment: A, B"
    ]
    before = Seen(status(restart=asked()))
    assert narrate.lines(before, Seen(status(restart=asked(back=True)))) == []
    assert narrate.lines(before, Seen(status(restart=asked(restart="b", verify=1)))) == [
        "restart asked for: to repeat the last step"
    ]


def test_what_came_of_repeated_steps() -> None:
    before = Seen(status(restart=asked(verify=3)))
    after = Seen(status(restart=asked(verify=3, verified=verified())))
    assert narrate.lines(before, after) == ["steps 39 to 41 repeated: the losses of 4 ranks are the same bits"]
    assert narrate.lines(after, after) == []
    difference = {"step": 40, "rank": 2, "node": "node-1", "before": "0.1", "again": "0.2"}
    assert narrate.verified(verified(difference=difference)) == (
        "step 40 did not come out the same: rank 2 on node-1 reported the loss 0.1, and then 0.2"
    )
    assert narrate.verified(verified(problem="why")) == "nothing could be compared: why"
    assert narrate.verified(verified(first_step=41)) == "step 41 repeated: the losses of 4 ranks are the same bits"


def test_an_incident_from_its_beginning_to_its_end() -> None:
    calm, hit = Seen(status()), Seen(status(), (incident(),))
    seconds = {"detect": 0.01, "locate": 0.0, "failover": 0.2, "recompute": 0.1}
    over = Seen(status(attempt=2, resume=19), (incident(open=False, first_new_step=21, seconds=seconds),))
    assert narrate.lines(calm, hit) == ["incident 1: rank 2 on node-0: killed (SIGKILL) in step 20"]
    assert narrate.lines(hit, over) == [
        "attempt 2 runs, resumed from step 19",
        "incident 1 is over: 0.31 s until step 21, the first new one",
    ]


def test_what_happened_between_two_looks_is_told_in_its_order() -> None:
    first, second = incident(open=False), incident(id=2, attempt=2, ranks=[0], step=21)
    assert narrate.lines(Seen(status()), Seen(status(attempt=2, resume=19), (first, second))) == [
        "incident 1: rank 2 on node-0: killed (SIGKILL) in step 20",
        "attempt 2 runs, resumed from step 19",
        "incident 1 is over",
        "incident 2: rank 0 on node-0: killed (SIGKILL) in step 21",
    ]


def test_an_incident_that_came_and_went_between_two_looks() -> None:
    watched = incident(cause="hang (busy)", action="tolerate", open=False)
    assert narrate.lines(Seen(status()), Seen(status(), (watched,))) == [
        "incident 1: rank 2 on node-0: hang (busy) in step 20",
        "incident 1: tolerate",
    ]
    seen = Seen(status(), (incident(cause="hang (busy)", action="tolerate"),))
    assert narrate.lines(seen, Seen(status(), (watched,))) == ["incident 1 is over"]


def test_what_is_decided_is_said_with_its_reason_and_a_plain_restart_is_not() -> None:
    because = "node-1: gpu lost: evicted; node-2 takes over from node-1"
    before = Seen(status(), (incident(action="none", because=""),))
    assert narrate.lines(before, Seen(status(), (incident(action="evict", because=because),))) == [
        f"incident 1: evict: {because}"
    ]
    assert narrate.lines(before, Seen(status(), (incident(action="restart", because="restart in place"),))) == []


def test_what_can_be_done_against_the_next_one_is_said_also_of_a_plain_restart() -> None:
    advice = 'hang: restart in place; declare what takes so long: `with evertrain.phase("…"):`'
    before = Seen(status(), (incident(action="none", because=""),))
    now = Seen(status(), (incident(action="restart", because=advice),))
    assert narrate.lines(before, now) == [f"incident 1: restart: {advice}"]


def test_a_verdict_that_is_corrected_is_said_again() -> None:
    before, after = Seen(status(), (incident(cause="connection lost"),)), Seen(status(), (incident(),))
    assert narrate.lines(before, after) == ["incident 1: rank 2 on node-0: killed (SIGKILL) in step 20"]


def test_another_start_mode_than_asked_for_has_its_reason() -> None:
    start = {"wanted": "zygote", "mode": "parked", "reason": "CUDA was initialised"}
    said = narrate.lines(Seen(status()), Seen(status(start=start)))
    assert said == ["ranks are started by parked instead of zygote: CUDA was initialised"]


def test_nodes_that_are_gone_and_messages() -> None:
    nodes = [{"id": "node-0", "state": "lost"}]
    said = narrate.lines(Seen(status()), Seen(status(nodes=nodes, message="no checkpoint")))
    assert said == ["node-0 is lost", "no checkpoint"]


def test_a_node_that_comes_back() -> None:
    away, back = [{"id": "node-0", "state": "unusable"}], [{"id": "node-0", "state": "active"}]
    assert narrate.lines(Seen(status(nodes=away)), Seen(status(nodes=back))) == ["node-0 is active again"]


def test_the_last_message_is_left_to_the_summary() -> None:
    assert narrate.lines(Seen(status()), Seen(status(state="done", message="every rank exited with 0"))) == []


def test_many_ranks_are_cut_short() -> None:
    many = incident(ranks=list(range(20)), nodes=["node-0", "node-1"])
    assert narrate.where(many) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more on node-0, node-1"


def asked_for(**different: Any) -> Json:
    usual = {
        "change": "c",
        "act": "update",
        "version": 2,
        "author": "ann",
        "reason": "fix loss",
        "urgent": True,
        "latest": 1.0,
        "incident": None,
    }
    return {**usual, **different}


def test_other_code_from_the_wish_to_its_ranks() -> None:
    calm, waits = Seen(status(version=1, change=None)), Seen(status(version=1, change=asked_for()))
    runs = Seen(status(attempt=2, resume=40, version=2, change=None))
    assert narrate.lines(calm, waits) == ["update to version 2 by ann: fix loss; it comes at once"]
    assert narrate.lines(waits, waits) == []
    assert narrate.lines(waits, runs) == [
        "attempt 2 runs, resumed from step 40",
        "version 2 runs (update by ann: fix loss)",
    ]
    assert narrate.lines(runs, runs) == []


def test_code_that_waits_says_until_when() -> None:
    later = asked_for(urgent=False, reason="", author="")
    said = narrate.lines(Seen(status(version=1)), Seen(status(version=1, change=later)))
    assert said == [f"update to version 2; it comes with the next restart, at the latest {narrate.day(1.0)}"]


def test_a_roll_back_after_an_incident() -> None:
    undo = asked_for(act="rollback", version=1, author="evertrain", reason="incident 3: hang", incident=3)
    before, during = Seen(status(attempt=2, version=2)), Seen(status(attempt=2, version=2, change=undo))
    assert narrate.lines(before, during) == ["roll-back to version 1 after incident 3: hang; it comes at once"]
    assert narrate.lines(during, Seen(status(attempt=3, version=1))) == [
        "attempt 3 runs",
        "version 1 runs (roll-back after incident 3: hang)",
    ]


def test_what_is_given_up_and_what_takes_its_place() -> None:
    waits = Seen(status(version=1, change=asked_for()))
    assert narrate.lines(waits, Seen(status(version=1, change=None))) == [
        "update to version 2 does not come; see `evertrain versions`"
    ]
    other = asked_for(change="d", version=3, reason="")
    assert narrate.lines(waits, Seen(status(version=1, change=other))) == [
        "update to version 3 by ann; it comes at once"
    ]


def test_a_change_between_two_looks_and_the_first_capture() -> None:
    assert narrate.lines(Seen(status(version=1)), Seen(status(attempt=2, version=2))) == [
        "attempt 2 runs",
        "version 2 runs",
    ]
    assert narrate.lines(Seen(status(version=None)), Seen(status(version=1))) == []
    assert narrate.lines(None, Seen(status(version=5))) == ["attempt 1 runs"]


def test_a_run_again_says_that_another_version_ran_last() -> None:
    before, after = Seen(status(version=None)), Seen(status(version=1, left_version=3))
    assert narrate.lines(before, after) == [
        "your own files run, version 1; version 3 ran last: `evertrain rollback` can go on with it"
    ]
    assert narrate.lines(before, Seen(status(version=1, left_version=None))) == []
