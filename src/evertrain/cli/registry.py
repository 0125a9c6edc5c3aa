"""Which jobs has this user run on this machine? So that `evertrain status` finds the newest one from any folder.

    ${XDG_STATE_HOME:-~/.local/state}/evertrain/jobs/<job>.json

A home that cannot be written costs this convenience and nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evertrain.cli.parsing import did_you_mean
from evertrain.model.errors import TroubleError


@dataclass(frozen=True)
class KnownJob:
    """A job as its `job.json` describes it."""

    job: str
    run_id: str
    run_dir: Path
    database: Path
    lock: Path
    log_root: Path
    run_folder: Path
    processes: Path
    boot_id: str
    """Of the machine that wrote this: pids mean nothing on another one."""
    served_by: str
    """Another node's address, where that one has the log; else empty."""
    detached: bool
    grace_s: float
    started_time: float
    code: Mapping[str, Any]
    """How its code is captured, as `CodeConfig` has it."""


def folder(environ: Mapping[str, str]) -> Path | None:
    if state := environ.get("XDG_STATE_HOME"):
        return Path(state) / "evertrain" / "jobs"
    home = os.path.expanduser("~")
    return Path(home) / ".local" / "state" / "evertrain" / "jobs" if home != "~" else None


def remember(job: str, run_dir: Path, run_id: str, started_time: float, environ: Mapping[str, str]) -> None:
    """Note a run; silently nothing where there is no place for it."""
    if (jobs := folder(environ)) is None:
        return
    entry = {"job": job, "run_dir": str(run_dir), "run_id": run_id, "started_time": started_time}
    try:
        jobs.mkdir(parents=True, exist_ok=True)
        fresh = jobs / f".{job}.{os.getpid()}.new"
        fresh.write_text(json.dumps(entry))
        fresh.replace(jobs / f"{job}.json")
    except OSError:
        pass


def find(job: str | None, root: Path | None, environ: Mapping[str, str]) -> KnownJob:
    """The job of that name, else the newest: below `root` if one is given, else of the registry and this folder."""
    known = below(root, environ) if root is not None else [*below(None, environ), *_registered(environ)]
    by_name = {one.job: one for one in sorted(known, key=lambda one: one.started_time)}
    if job is None:
        if not by_name:
            where = f"below {root}" if root is not None else "here"
            raise TroubleError(f"there is no job {where}; `evertrain run` starts one, --run-dir names another place")
        return max(by_name.values(), key=lambda one: one.started_time)
    if job not in by_name:
        names = ", ".join(sorted(by_name)) or "none"
        raise TroubleError(f"there is no job {job}{did_you_mean(job, by_name)} (known: {names})")
    return by_name[job]


def below(root: Path | None, environ: Mapping[str, str]) -> list[KnownJob]:
    """All jobs of one folder (None: the usual one); the folder of one job is taken as well as the folder of all."""
    root = root if root is not None else default_root(environ)
    found = (_described(run_dir) for run_dir in (root, *sorted(root.glob("*/"))))
    return [job for job in found if job is not None]


def default_root(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("EVERTRAIN_RUN_DIR") or ".evertrain")


def _registered(environ: Mapping[str, str]) -> list[KnownJob]:
    if (jobs := folder(environ)) is None:
        return []
    entries = (_read(file) for file in sorted(jobs.glob("*.json")))
    found = (_described(Path(entry["run_dir"])) for entry in entries if "run_dir" in entry)
    return [job for job in found if job is not None]


def _described(run_dir: Path) -> KnownJob | None:
    record = _read(run_dir / "job.json")
    try:
        return KnownJob(
            job=record["job"],
            run_id=record["run_id"],
            run_dir=run_dir.absolute(),
            database=Path(record["database"]),
            lock=Path(record["lock"]),
            log_root=Path(record["log_root"]),
            run_folder=Path(record["run_folder"]),
            processes=Path(record["processes"]),
            boot_id=record["boot_id"],
            served_by=record["url"] if record["member"] else "",
            detached=record["detached"],
            grace_s=record["grace_s"],
            started_time=record["started_time"],
            code=record.get("code", {}),
        )
    except KeyError:
        return None


def _read(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
