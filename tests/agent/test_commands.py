"""From what is to what should be, whatever was missed in between."""

from __future__ import annotations

from typing import Any

from evertrain.agent.commands import NOT_READY, Code, commands
from evertrain.model.code import CodeOrder
from evertrain.model.report import Desired, DesiredAttempt, Go


def order(*attempts: DesiredAttempt, **more: Any) -> Desired:
    return Desired(job="job", term=2, attempts=attempts, ranks=(0, 1), **more)


def wants(number: int, phase: Any, **more: Any) -> DesiredAttempt:
    go = None
    if phase == "go":
        go = Go(
            master_addr="localhost", master_port=1, world_size=2, group_rank=0, group_world_size=1, local_world_size=2,
            restart_count=0, max_restarts=0, role="default", signals_to_handle="", virtual_local_rank=False,
            mesh=None, resume=None, reached=None, faults=(), ranks=(),
        )  # fmt: skip
    return DesiredAttempt(attempt=number, phase=phase, ranks=(0, 1), store=True, go=go, **more)


def state(**phases: str) -> dict[str, Any]:
    rank_state = {"prepared": "waiting", "running": "running", "ended": "ended", "preparing": "waiting"}
    return {
        "attempts": {
            name[1:]: {"phase": phase, "error": "", "ranks": {str(r): {"state": rank_state[phase]} for r in (0, 1)}}
            for name, phase in phases.items()
        }
    }


def do(order: Desired, state: dict[str, Any], code: Code = None) -> list[tuple[str, int]]:
    lines: dict[str, Any] = {"0": {}, "1": {}}
    return [(found["do"], found.get("attempt", 0)) for found in commands(order, state, lambda _: lines, code=code)]


def test_prepare_what_is_missing_and_nothing_twice() -> None:
    assert do(order(wants(1, "prepare")), state()) == [("prepare", 1)]
    assert do(order(wants(1, "prepare")), state(a1="preparing")) == []
    assert do(order(wants(1, "prepare")), state(a1="prepared")) == []


def test_go_only_from_prepared() -> None:
    assert do(order(wants(1, "go")), state(a1="prepared")) == [("go", 1)]
    assert do(order(wants(1, "go")), state(a1="running")) == []
    assert do(order(wants(1, "go")), state()) == [], "it died with its keeper: the controller decides"


def test_end_while_the_next_one_waits() -> None:
    both = order(wants(1, "end"), wants(2, "prepare"))
    assert do(both, state(a1="running", a2="prepared")) == [("end", 1)]
    assert do(both, state(a1="ended", a2="prepared")) == []


def test_what_nobody_asked_for_is_ended_and_then_forgotten() -> None:
    assert do(order(wants(2, "go")), state(a1="ended", a2="prepared")) == [("forget", 1), ("go", 2)]
    assert do(order(wants(2, "prepare")), state(a1="running")) == [("end", 1), ("prepare", 2)]


def test_a_prepared_attempt_with_a_dead_rank_is_made_again() -> None:
    spoilt = state(a2="prepared")
    spoilt["attempts"]["2"]["ranks"]["1"]["state"] = "ended"
    assert do(order(wants(2, "prepare")), spoilt) == [("end", 2)]
    assert do(order(wants(2, "prepare")), state(a2="ended")) == [("forget", 2)]


def test_what_waits_with_another_environment_is_never_let_go() -> None:
    changed = order(wants(2, "go"), env={"A": "1"})
    old = state(a1="ended", a2="prepared")
    assert do(changed, old) == [("configure", 0), ("forget", 1)]
    assert commands(changed, old, lambda _: {})[0]["env"] == {"A": "1"}
    assert do(changed, {**old, "env": {"A": "1"}}) == [("forget", 1), ("go", 2)]
    dropped = order(wants(2, "prepare"))
    assert do(dropped, {**state(), "env": {"A": "1"}}) == [("configure", 0), ("prepare", 2)], "a new run has none"


def test_an_end_does_not_wait_for_an_environment() -> None:
    both = order(wants(1, "end"), wants(2, "prepare"), env={"A": "1"})
    assert do(both, state(a1="running", a2="prepared")) == [("configure", 0), ("end", 1)]


def test_shutdown_is_all_there_is_to_do() -> None:
    assert do(order(wants(1, "go"), shutdown=True), state(a1="running")) == [("shutdown", 0)]


def test_ranks_run_ahead_as_asked_and_are_not_asked_twice() -> None:
    asked = {"ranks": {"0": {"env": {}}}, "unknown": ["RANK"]}
    ahead = {"attempts": {}, "early": {"asked": asked, "state": "failed"}}
    none = {"attempts": {}, "early": {"asked": None, "state": ""}}
    for seen, early, expected in (
        (none, asked, [{"do": "run_ahead", "term": 2, "asked": asked}]),
        (ahead, asked, []),
        (none, None, []),
        (ahead, None, [{"do": "run_ahead", "term": 2, "asked": None}]),
        (ahead, {**asked, "unknown": []}, [{"do": "run_ahead", "term": 2, "asked": {**asked, "unknown": []}}]),
    ):
        assert commands(order(), seen, lambda _: {}, early) == expected


def test_what_is_prepared_comes_before_ranks_are_no_longer_wanted_ahead() -> None:
    ahead = {"attempts": {}, "early": {"asked": {"ranks": {}, "unknown": []}, "state": "waiting"}}
    assert do(order(wants(1, "prepare")), ahead) == [("prepare", 1), ("run_ahead", 0)]


def test_nothing_runs_ahead_before_the_keeper_has_the_environment() -> None:
    seen = {"attempts": {}, "env": {}, "early": {"asked": None, "state": ""}}
    found = commands(order(env={"A": "1"}), seen, lambda _: {}, {"ranks": {}, "unknown": []})
    assert [command["do"] for command in found] == ["configure"]


CODE = {"version": 2, "digest": "d" * 64, "root": "/home/user/project", "folder": "/run/code/dddddddddddddddd-0a1b2c"}
ORDERED = CodeOrder(version=2, digest="d" * 64)


def test_a_version_is_configured_and_what_waits_is_let_go_when_the_keeper_has_it() -> None:
    changed = order(wants(2, "go"), code=ORDERED)
    old = state(a1="ended", a2="prepared")
    assert do(changed, old, CODE) == [("configure", 0), ("forget", 1)]
    assert commands(changed, old, lambda _: {}, code=CODE)[0] == {
        "do": "configure", "term": 2, "env": {}, "code": CODE
    }  # fmt: skip
    ready = {**old, "code": CODE}
    assert do(changed, ready, CODE) == [("forget", 1), ("go", 2)]
    assert commands(changed, ready, lambda _: {}, code=CODE)[1]["code"] == CODE["digest"]


def test_in_place_is_said_as_well() -> None:
    (configure, *_) = commands(order(env={"A": "1"}), state(), lambda _: {})
    assert configure["code"] is None
    (go,) = commands(order(wants(1, "go")), {**state(a1="prepared"), "code": None}, lambda _: {})
    assert go["code"] == ""


def test_back_in_place_is_a_change_like_another() -> None:
    assert do(order(wants(2, "go")), {**state(a2="prepared"), "code": CODE}) == [("configure", 0)]


def test_nothing_is_configured_or_let_go_for_a_version_that_is_not_here_yet() -> None:
    changed = order(wants(1, "end"), wants(2, "prepare"), wants(3, "go"), code=ORDERED, env={"A": "1"})
    seen = state(a1="running", a3="prepared")
    assert do(changed, seen, NOT_READY) == [("end", 1), ("prepare", 2)]
    # nor for what the keeper has of before
    assert do(changed, {**seen, "code": {**CODE, "version": 1}, "env": {"A": "1"}}, NOT_READY) == [
        ("end", 1),
        ("prepare", 2),
    ]
    ahead = {**seen, "early": {"asked": None, "state": ""}}
    assert "run_ahead" not in [
        found["do"] for found in commands(changed, ahead, lambda _: {}, {"ranks": {}}, NOT_READY)
    ]


def test_the_same_files_under_another_number_are_another_version() -> None:
    """Its arguments may be others, and so may be what waits."""
    seen = {**state(a2="prepared"), "code": CODE}
    assert do(order(wants(2, "go"), code=ORDERED), seen, {**CODE, "version": 3}) == [("configure", 0)]
    assert do(order(wants(2, "go"), code=ORDERED), seen, {**CODE, "folder": "/elsewhere"}) == [("configure", 0)]
