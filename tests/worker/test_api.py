"""The few calls that a script may make, inside a job and outside."""

from __future__ import annotations

import subprocess
import sys

import pytest

import evertrain
from evertrain.observe import pages

from .gang import Gang


def test_exported_names() -> None:
    assert evertrain.__all__ == [
        "Checkpointer", "JobInfo", "ReplayConfig", "ResumableLoader", "init", "phase", "replay_config", "report",
        "settle",
    ]  # fmt: skip
    for name in evertrain.__all__:
        assert getattr(evertrain, name).__name__ == name
    assert set(evertrain.__all__) <= set(dir(evertrain))


def test_importing_it_loads_nothing() -> None:
    code = (
        "import sys; before = set(sys.modules); import evertrain\n"
        "print(*sorted(name for name in set(sys.modules) - before))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() in (["__future__", "evertrain"], ["evertrain"])


def test_outside_a_job_nothing_happens() -> None:
    assert evertrain.init() is None
    evertrain.report(step=3, loss=1.0, accuracy=0.5)
    with evertrain.phase("evaluate"):
        pass


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        evertrain.nothing  # noqa: B018


def test_a_rank_knows_its_place(gang: Gang) -> None:
    script = """
info = evertrain.init()
say([info.job, info.attempt, info.restart, info.resume_step, info.rank, info.local_rank, info.world_size, info.node])
"""
    results = gang.run(script, attempt=3, resume=12)
    assert results[1].said == ["test", 3, True, 12, 1, 1, 2, "node-0"]


def test_reports_reach_the_page(gang: Gang) -> None:
    script = """
w = torch.ones(2, requires_grad=True)
evertrain.report(step=7, loss=w.sum(), grad_norm=torch.tensor(0.5), tokens=1000, accuracy=torch.tensor(0.25))
evertrain.report(tokens=24)
evertrain.report(tokens=float("nan"))
os._exit(0)
"""
    (result,) = gang.run(script, world=1, reached=6)
    view = result.page
    assert view is not None and result.err == ""
    assert (view.abs_step, view.loss, view.grad_norm, view.tokens) == (7, 2.0, 0.5, 1024.0)
    assert view.metrics == {"accuracy": 0.25}
    assert view.passed_time > 0


def test_a_step_reached_before_does_not_pass(gang: Gang) -> None:
    (result,) = gang.run("evertrain.report(step=6)", world=1, reached=6)
    assert result.page is not None and result.page.abs_step == 6 and result.page.passed_time == 0.0


def test_phases_nest(gang: Gang) -> None:
    script = """
from evertrain.worker import session
seen = []
def note(): seen.append(session.current.page.phase.decode())
note(); join(); note()
with evertrain.phase("evaluate"):
    note()
    with evertrain.phase("generate samples"): note()
    note()
    try:
        with evertrain.phase("fails"): raise KeyError
    except KeyError: note()
note()
say(seen)
"""
    (result,) = gang.run(script, world=1)
    assert result.said == ["start", "train", "evaluate", "generate samples", "evaluate", "evaluate", "train"]


def steps_of(gang: Gang, script: str) -> list[pages.StepRecord]:
    (result,) = gang.run(script, world=1)
    assert result.err == ""
    reader = pages.StepReader(gang.folder / "run-1" / "page-0")
    found = reader.read()
    reader.close()
    return found


OPTIMIZER = "w = torch.ones(2, requires_grad=True); w.grad = torch.ones(2); o = torch.optim.SGD([w], lr=0.1)\n"


def test_every_step_is_remembered_with_what_was_said_of_it(gang: Gang) -> None:
    script = (
        OPTIMIZER
        + """
for step in range(40, 43):
    o.step()
    evertrain.report(step=step, loss=step / 2, grad_norm=1.5 if step == 41 else None, tokens=10)
evertrain.report(step=43, loss=float("nan"))
os._exit(0)
"""
    )
    found = steps_of(gang, script)
    assert [(one.step, one.rel_step, one.grad_norm, one.tokens) for one in found] == [
        (40, 1, None, 10.0), (41, 2, 1.5, 20.0), (42, 3, None, 30.0), (43, 3, None, 30.0),
    ]  # fmt: skip
    assert [str(one.loss) for one in found] == ["20.0", "20.5", "21.0", "nan"]
    assert [one.count for one in found] == [1, 2, 3, 4]


def test_a_script_that_says_nothing_has_steps_all_the_same(gang: Gang) -> None:
    found = steps_of(gang, OPTIMIZER + "for _ in range(4): o.step()\nos._exit(0)")
    assert [(one.step, one.loss, one.tokens) for one in found] == [(1, None, None), (2, None, None), (3, None, None)]
    times = [one.time for one in found]
    assert times == sorted(times) and times[0] > 0


def test_what_is_declared_is_no_time_of_steps_and_its_losses_are_none(gang: Gang) -> None:
    script = """
import time
evertrain.report(step=1, loss=1.0)
with evertrain.phase("evaluate"):
    with evertrain.phase("rare samples"):
        time.sleep(0.02)
    evertrain.report(loss=float("nan"))
with evertrain.phase("train"):
    evertrain.report(step=2, loss=2.0)
with evertrain.phase("explore"):
    time.sleep(0.02)
evertrain.report(step=3, loss=3.0)
os._exit(0)
"""
    found = steps_of(gang, script)
    assert [(one.step, one.loss, one.stage) for one in found] == [(1, 1.0, 0), (1, None, 0), (2, 2.0, 0), (3, 3.0, 1)]
    declared = [one.declared_s for one in found]
    assert declared[0] == 0 and declared[1] >= 0.02 and declared[2] < declared[3] - 0.019
