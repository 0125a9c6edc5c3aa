"""The few calls that a script may make, inside a job and outside."""

from __future__ import annotations

import subprocess
import sys

import pytest

import evertrain

from .gang import Gang


def test_exported_names() -> None:
    assert evertrain.__all__ == ["Checkpointer", "JobInfo", "ResumableLoader", "init", "phase", "report", "settle"]
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
