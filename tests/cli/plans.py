"""Plans for tests: what the flags would give, without a script that has to exist."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from evertrain.cli import places
from evertrain.cli.console import Console
from evertrain.cli.plan import Plan
from evertrain.cli.sizes import played
from evertrain.model.config import Config
from evertrain.model.spec import Command


def plan(root: Path, **different: Any) -> Plan:
    usual: dict[str, Any] = {
        "job": "job",
        "command": Command(kind="script", target="train.py"),
        "named": True,
        "nodes": played(1),
        "machines": None,
        "devices": {},
        "nproc": 2,
        "start": "zygote",
        "standby_barrier": "start",
        "python": sys.executable,
        "preload": (),
        "mesh": None,
        "max_restarts": None,
        "faults": (),
        "role": "default",
        "signals_to_handle": "SIGTERM,SIGINT",
        "master_addr": None,
        "master_port": None,
        "local_addr": None,
        "virtual_local_rank": False,
        "listen_port": 0,
        "token_file": None,
        "root": root,
        "log_dir": None,
        "code_root": None,
        "console": Console(),
        "observe_only": False,
        "fresh": False,
        "detach": False,
        "config": Config(),
        "notes": (),
    }
    return Plan(**{**usual, **different})


def known_job(root: Path, name: str, **different: Any) -> Path:
    """The run dir of a job that other commands know and of which nothing runs, described as `run` does it."""
    made = plan(root, job=name)
    here = places.of(made, f"{name}-1")
    here.run_dir.mkdir(parents=True)
    places.write_job(here, made, "http://127.0.0.1:1")
    described = json.loads((here.run_dir / "job.json").read_bytes())
    assert different.keys() <= described.keys()
    places.write_json(here.run_dir / "job.json", {**described, **different})
    return here.run_dir
