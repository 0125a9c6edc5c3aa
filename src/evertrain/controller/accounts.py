"""How do a job's seconds add up? The sums of `ledger` over all its runs and over the newest one: JSON for `report`.

Per view: wall = productive + lost + not running. `not running` is the time between two runs: nobody had asked for the
job then, so ETTR leaves it out. Every group (by incident, phase, cause, mechanism) holds all lost seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from evertrain.controller import ledger
from evertrain.controller.ledger import Phase, Run, Stretch
from evertrain.controller.store import read_log
from evertrain.keeper.children import boot_id
from evertrain.model.records import AnyRecord, TermStarted

Json = dict[str, Any]

_HOUR_S = 3600.0


def of_database(database: Path, job: str, *, live: bool) -> Json:
    """The report of a job by its event store; `live`: something of it runs, and its clock runs on."""
    log = read_log(database)
    return report(log, job=job, now=_now(log) if live else None)


def _now(log: Sequence[AnyRecord]) -> float | None:
    """By the run's own clock; None where nobody here can read it."""
    clock = next((record.clock for record in reversed(log) if isinstance(record, TermStarted)), None)
    return clock.at(time.monotonic()) if clock is not None and clock.boot_id == boot_id() else None


def report(log: Iterable[AnyRecord], *, job: str, now: float | None) -> Json:
    """The whole report; `now` is None when nothing of the job lives any more."""
    runs = ledger.runs(log, now)
    return {
        "job": job,
        "time": runs[-1].end if runs else now,
        "all": _sums(runs),
        "run": _sums(runs[-1:]),
        "runs": [_run(seen, live=now is not None and seen is runs[-1]) for seen in runs],
        "attempts": [
            {"run": number, **attempt} for number, seen in enumerate(runs, 1) for attempt in ledger.attempts(seen.state)
        ],
    }


def _run(run: Run, *, live: bool) -> Json:
    assert run.state.run is not None
    ended = run.state.ended
    state = ended.state if ended is not None else "running" if live else "killed"
    return {"run_id": run.state.run.run_id, "started": run.start, "ended": None if live and not ended else run.end} | {
        "state": state,
        "wall_s": run.end - run.start,
        "ettr": ledger.share([run]),
    }


def _sums(runs: list[Run]) -> Json:
    parts = [part for run in runs for part in ledger.stretches(run)]
    lost = [part for part in parts if part.account is not None]
    idle = [max(0.0, after.start - before.end) for before, after in pairwise(runs)]
    productive_s, lost_s, idle_s = _total(part for part in parts if part.account is None), _total(lost), sum(idle, 0.0)
    return {
        "wall_s": productive_s + lost_s + idle_s,
        "productive_s": productive_s,
        "lost_s": lost_s,
        "not_running_s": idle_s,
        "ettr": ledger.share(runs),
        "ettr_hour": ledger.share(runs, _HOUR_S),
        "ettr_weighted": ledger.share(runs, weighted=True),
        "ettr_weighted_hour": ledger.share(runs, _HOUR_S, weighted=True),
        "by_incident": _incidents(runs, lost),
        "by_phase": _phases(lost),
        "by_category": _grouped(lost, lambda part: _account(part).category),
        "by_mechanism": _grouped(lost, lambda part: _account(part).mechanism),
    }


def _total(parts: Iterable[Stretch]) -> float:
    return sum((part.seconds for part in parts), 0.0)


def _account(part: Stretch) -> ledger.Account:
    assert part.account is not None
    return part.account


def _grouped(lost: list[Stretch], key: Callable[[Stretch], str]) -> dict[str, float]:
    """Seconds by name, the costliest first."""
    sums: dict[str, float] = {}
    for part in lost:
        sums[key(part)] = sums.get(key(part), 0.0) + part.seconds
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _phases(lost: list[Stretch]) -> dict[str, float]:
    """Seconds by phase, in the order in which phases come."""
    sums = _grouped(lost, lambda part: part.phase)
    return {phase: sums[phase] for phase in get_args(Phase) if phase in sums}


def _incidents(runs: list[Run], lost: list[Stretch]) -> list[Json]:
    """One row an account, in the order of time: incidents, and what is lost without one."""
    # an incident belongs to one run, but every later state knows it too
    causes = {number: one.opened.cause for run in runs for number, one in run.state.incidents.items()}
    rows: dict[ledger.Account, list[Stretch]] = {}
    for part in lost:
        rows.setdefault(_account(part), []).append(part)
    return [
        {
            "incident": account.incident,
            "cause": causes[account.incident] if account.incident is not None else account.category.replace("_", " "),
            "category": account.category,
            "mechanism": account.mechanism,
            "seconds": _phases(parts),
            "total_s": _total(parts),
        }
        for account, parts in rows.items()
    ]
