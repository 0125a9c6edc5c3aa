"""From what is to what should be, whatever was missed in between."""

from __future__ import annotations

from typing import Any

from evertrain.agent.commands import commands
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


def do(order: Desired, state: dict[str, Any]) -> list[tuple[str, int]]:
    return [(found["do"], found.get("attempt", 0)) for found in commands(order, state, lambda _: {"0": {}, "1": {}})]


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
