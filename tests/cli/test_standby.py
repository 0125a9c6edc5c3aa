"""`evertrain standby`: the number is easy to see, and what it rests on is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli import logs
from cli.plans import known_job
from evertrain.cli.main import main
from evertrain.model import records as r
from evertrain.model.spec import Seats

DAY = 86400.0


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("EVERTRAIN_RUN_DIR", str(tmp_path / "runs"))
    return tmp_path / "runs"


def history(root: Path, job: str, *, days: float, failures: int = 0, seats: Seats | None = None) -> None:
    """A job of four nodes and one standby that has run so long."""
    nodes = tuple(f"node-{number}" for number in range(5))
    log: list[r.AnyRecord] = [
        r.RunStarted(
            time=0.0, run_id=f"{job}-1", nodes=nodes, standby=1, nproc_per_node=1, fresh=False, start="zygote",
            command="t.py", seats=seats,
        )
    ]  # fmt: skip
    if seats is not None:
        log.append(r.NodesSettled(time=0.0, nodes=nodes, standby=1))
    for _ in range(failures):
        log += [
            r.NodeChanged(time=0.0, node="node-1", state=state, because="")  # type: ignore[arg-type]
            for state in ("lost", "active")
        ]
    log.append(r.JobEnded(time=days * DAY, state="done", exit_code=0, message=""))
    logs.write(known_job(root, job) / "events.db", *log)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["standby", *words]) == 0
    return capsys.readouterr().out.splitlines()


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    (line,) = said(capsys, *words, "--json")
    found: dict[str, object] = json.loads(line)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["standby", *words])
    out, line = capsys.readouterr()
    assert out == "" and line.count("\n") == 1
    return code, line


@pytest.mark.parametrize(("nodes", "number"), [(128, 2), (256, 2), (512, 3), (1024, 4)])
def test_the_number_comes_first(capsys: pytest.CaptureFixture[str], nodes: int, number: int) -> None:
    words = ("--nodes", str(nodes), "--daily-failure-rate", "0.0012")
    first, second = said(capsys, *words)
    assert first == (
        f"{number} standby nodes for {nodes} nodes: on 0.99 of all days no more than {number} of them fail "
        f"(--standby {number})"
    )
    assert second == "failures per node and day: 0.0012 (as given)"
    found = answer(capsys, *words)
    assert (found["standby"], found["nodes"], found["daily_failure_rate"]) == (number, nodes, 0.0012)


def test_a_higher_quantile_needs_more(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--nodes", "1024", "--daily-failure-rate", "0.0012", "--quantile", "0.9999")
    assert answer(capsys, *words)["standby"] == 7


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--nodes", "0"), "--nodes 0: 1 to 100000 nodes"),
        (("--nodes", "-3"), "--nodes -3: 1 to 100000 nodes"),
        (("--nodes", "many"), "invalid int value: 'many'"),
        (("--nodes", "4", "--daily-failure-rate", "1.2"), "--daily-failure-rate 1.2: a share of the nodes, 0 to 1"),
        (("--nodes", "4", "--daily-failure-rate", "-1"), "--daily-failure-rate -1: a share"),
        (("--nodes", "4", "--daily-failure-rate", "nan"), "--daily-failure-rate nan: a share"),
        (("--nodes", "4", "--daily-failure-rate", "0.1%"), "invalid float value: '0.1%'"),
        (("--nodes", "4", "--quantile", "1"), "--quantile 1: between 0 and 1, as 0.99"),
        (("--nodez", "4"), "did you mean --nodes?"),
    ],
)
def test_bad_numbers_are_one_line_and_2(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], line: str) -> None:
    code, told = refused(capsys, *words)
    assert code == 2 and line in told


def test_the_rate_is_learnt_from_all_jobs_of_the_run_dir(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history(root, "one", days=10_000, failures=40)
    history(root, "two", days=10_000, failures=80)
    found = answer(capsys, "--nodes", "1024")
    assert (found["standby"], found["daily_failure_rate"], found["rate_is_upper_bound"]) == (4, 0.0012, False)
    assert found["rate_because"] == "120 failures in 100,000 node-days"
    # ... or from one of them
    assert answer(capsys, "--nodes", "1024", "--job", "two")["daily_failure_rate"] == 0.0016


def test_of_little_history_it_says_how_little(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history(root, "one", days=2, failures=1)
    first, second = said(capsys)
    assert first.startswith("1 standby node for 4 nodes: "), "the job's own nodes, without its standby"
    assert second.startswith("failures per node and day: 0.00563 (1 failure in 10 node-days, which is little: the 95%")


def test_without_history_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    code, line = refused(capsys, "--nodes", "1024")
    assert code == 1
    assert "from which a failure rate could be learnt; give one, as --daily-failure-rate 0.0012" in line
    assert refused(capsys)[0] == 1, "and without --nodes there is no job to take them from"


def test_a_job_on_several_machines_is_as_large_as_it_should_be(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history(root, "one", days=2, seats=Seats(6, 8, 1))
    assert answer(capsys, "--daily-failure-rate", "0.0012")["nodes"] == 8


def test_a_job_without_a_log_is_passed_over(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known_job(root, "new")
    history(root, "one", days=100)
    assert "0 failures in 500 node-days" in str(answer(capsys, "--nodes", "8")["rate_because"])
