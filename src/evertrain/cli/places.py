"""Where does a job keep its things?

    run dir         <root>/<job>/                            logs, checkpoints, code, tokens, result: may be on NFS
    node-local dir  the run dir, or /var/tmp/evertrain-<uid>/… where that is on a network file system: lock, database
    run folder      /dev/shm/evertrain-<uid>/<run_id>/       one folder a node: socket, pages, checkpoint slots

`job.json` in the run dir tells the other commands all of this. Where the job has nodes on several machines the run dir
may be one that they share: what is a machine's own carries the node's name (`of` with `member`).
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from evertrain.cli import mounts, processes
from evertrain.cli.memory import SHARED_MEMORY
from evertrain.cli.plan import Plan
from evertrain.model.errors import TroubleError

NODE_LOCAL = Path("/var/tmp")


@dataclass(frozen=True)
class Places:
    job: str
    run_id: str
    run_dir: Path
    local_dir: Path
    run_folder: Path
    log_root: Path
    member: str = ""
    """This node's name, where the job is served by another one."""

    @property
    def _suffix(self) -> str:
        return f"-{self.member}" if self.member else ""

    @property
    def database(self) -> Path:
        return self.local_dir / "events.db"

    @property
    def lock(self) -> Path:
        return self.local_dir / f"lock{self._suffix}"

    @property
    def token(self) -> Path:
        return self.run_dir / "token"

    @property
    def result(self) -> Path:
        return self.own_result if self.member else self.run_dir / "result.json"

    @property
    def own_token(self) -> Path:
        """The same for the job's own processes, which may be started again when the run dir is gone."""
        return self.run_folder / "token"

    @property
    def code_token(self) -> Path:
        """The secret without which nobody may have other code run; where the job is served."""
        return self.run_dir / "code-token"

    @property
    def own_code_token(self) -> Path:
        return self.run_folder / "code-token"

    @property
    def code_dir(self) -> Path:
        """Versions of the code: archives, and what is unpacked from them."""
        return self.run_dir / "code"

    @property
    def own_result(self) -> Path:
        """The same for `run`: a job must come to its end where the disk is full."""
        return self.run_folder / "result.json"

    @property
    def processes(self) -> Path:
        return self.run_dir / f"processes{self._suffix}"

    def node_dir(self, node: str) -> Path:
        return self.run_folder / node

    def disk_dir(self, node: str) -> Path:
        return self.run_dir / "checkpoints" / node

    def log(self, name: str) -> Path:
        return self.run_dir / "logs" / f"{name}.log"

    @property
    def run_log(self) -> Path:
        """What `run` prints in the background."""
        return self.log(f"run{self._suffix}")

    def fired(self) -> Path:
        """Drills that have been done, one file each, so that none is done twice."""
        return self.run_dir / f"fired-{self.run_id}"


def user_folder() -> Path:
    return SHARED_MEMORY / f"evertrain-{os.getuid()}"


def of(plan: Plan, run_id: str, mount_table: str | None = None, *, member: str = "") -> Places:
    """Names only; nothing is made yet."""
    run_dir = plan.root / plan.job
    local_dir = run_dir
    if mounts.is_network(run_dir, mount_table):
        folder = hashlib.sha256(os.path.realpath(run_dir).encode()).hexdigest()[:8]
        local_dir = NODE_LOCAL / f"evertrain-{os.getuid()}" / f"{plan.job}-{folder}"
    log_root = plan.log_dir / run_id if plan.log_dir is not None else run_dir / "logs"
    # two nodes of one job may be on one machine
    run_folder = user_folder() / (f"{run_id}.{member}" if member else run_id)
    return Places(plan.job, run_id, run_dir, local_dir, run_folder, log_root, member)


def make_run_dir(places: Places) -> None:
    """The run dir and the node-local one; a clear line where that cannot be."""
    root = places.run_dir.parent
    is_new = not root.exists()
    for folder in (places.run_dir, places.run_dir / "logs", places.processes, places.log_root, places.local_dir):
        if folder.is_relative_to(NODE_LOCAL):
            private(NODE_LOCAL / f"evertrain-{os.getuid()}")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise TroubleError(
                f"cannot make {folder} ({error.strerror}); --run-dir names another place for job folders"
            ) from error
    if is_new and root.name == ".evertrain":
        (root / ".gitignore").write_text("*\n")
    # root may write where the mode forbids it, but not on a read-only file system
    if not os.access(places.run_dir, os.W_OK | os.X_OK):
        raise TroubleError(f"{places.run_dir} is not writable; --run-dir names another place for job folders")


def make_run_folder(places: Places, nodes: tuple[str, ...]) -> None:
    """Shared memory of this run, one folder a node."""
    private(user_folder())
    for folder in (places.run_folder, *(places.node_dir(node) for node in nodes)):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise TroubleError(f"cannot make {folder}: {error.strerror}") from error


def private(folder: Path) -> None:
    """A folder of ours in a place where everybody may write; refused if somebody else made it first."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise TroubleError(f"cannot make {folder}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise TroubleError(f"{folder} belongs to somebody else or is open to others; remove it")


def write_json(file: Path, value: dict[str, Any]) -> None:
    write_private(file, json.dumps(value, indent=1).encode() + b"\n")


def write_private(file: Path, content: bytes) -> None:
    """Whole or not at all, readable by the user only."""
    fresh = file.with_name(f".{file.name}.{os.getpid()}.new")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(handle, "wb") as out:
        out.write(content)
    os.replace(fresh, file)


def write_job(places: Places, plan: Plan, url: str) -> None:
    """What `status` and the others need to know, also when nothing of the job runs any more."""
    write_json(
        places.run_dir / "job.json",
        {
            "job": places.job,
            "run_id": places.run_id,
            "run_dir": str(places.run_dir),
            "database": str(places.database),
            "lock": str(places.lock),
            "log_root": str(places.log_root),
            "run_folder": str(places.run_folder),
            "processes": str(places.processes),
            "boot_id": processes.boot_id(),
            "member": places.member,
            "url": url,
            "detached": plan.detach,
            "grace_s": plan.config.grace_s,
            "code": msgspec.to_builtins(plan.config.code),
            "started_time": time.time(),
        },
    )
