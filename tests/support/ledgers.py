"""Does the ledger of a job add up? The wall time of its command is measured from outside.

The ledger's time reaches from the first line of `evertrain run` to the record of the job's end. Outside of it lie the
start of the interpreter and what comes after that record: processes leave, the last output and the summary are shown,
shared memory is removed. On a fast machine of its own that takes 0.15 s, on a slow one with others on it 0.35 s,
however long the job was, so a short job is allowed `ENDS_S` where 1 % would be less. Both consist of many short turns
of one process after the other, and each of them waits for everybody else who wants to run: both limits are multiplied
by the machine's load where that is above 1.
"""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from evertrain.controller import accounts
from evertrain.controller.store import read_log
from evertrain.decide.applying import fold
from evertrain.model.records import AnyRecord, JobEnded, RunStarted

ENDS_S, ENDS_FRACTION = 0.7, 0.01
GROUPS = ("by_phase", "by_category", "by_mechanism")


def faults(job_dir: Path, began: float, ended: float) -> list[str]:
    """What does not add up, in words, in the run that a command which lived from `began` to `ended` has written.

    Left out are a run without a record of its end (it was killed, or could not write) and one that outlived its command
    (`--detach`): nobody outside can tell how long they were. Where a process stays that nothing can end, the command
    waits for it for some seconds after the job's end; then only the sums are looked at.
    """
    log = _of_command(job_dir, began, ended)
    if not log or not isinstance(log[-1], JobEnded) or log[-1].time > ended:
        return []
    sums = accounts.report(log, job=job_dir.name, now=None)["run"]
    stays = any(node.state == "unusable" for node in fold(log).nodes.values())
    return [*([] if stays else _against(sums, ended - began)), *_within(sums)]


def _of_command(job_dir: Path, began: float, ended: float) -> list[AnyRecord]:
    """The log up to the end of this command's run; empty where it has written none (it was refused)."""
    try:
        database = json.loads((job_dir / "job.json").read_bytes())["database"]
    except OSError:
        return []
    log = read_log(Path(database))
    starts = [index for index, record in enumerate(log) if isinstance(record, RunStarted)]
    for start, end in pairwise([*starts, len(log)]):
        if began <= log[start].time <= ended:
            return log[:end]
    return []


def _against(sums: dict[str, Any], wall_s: float) -> list[str]:
    booked_s = sums["productive_s"] + sums["lost_s"] + sums["not_running_s"]
    load = max(1.0, os.getloadavg()[0])
    if abs(wall_s - booked_s) <= max(ENDS_S, ENDS_FRACTION * wall_s) * load:
        return []
    return [f"the command took {wall_s:.2f} s, the ledger knows of {booked_s:.2f} s (load {load:.1f})"]


def _within(sums: dict[str, Any]) -> list[str]:
    lost_s = pytest.approx(sums["lost_s"], abs=1e-6)
    totals = {name: sum(sums[name].values()) for name in GROUPS}
    totals["by_incident"] = sum(row["total_s"] for row in sums["by_incident"])
    rows = [row for row in sums["by_incident"] if sum(row["seconds"].values()) != pytest.approx(row["total_s"])]
    wrong = [
        f"{name} adds up to {total:.6f} s, not {sums['lost_s']:.6f}"
        for name, total in totals.items()
        if total != lost_s
    ]
    return [*wrong, *(f"the phases of {row['cause']} do not add up to {row['total_s']:.6f} s" for row in rows)]
