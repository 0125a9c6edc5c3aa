"""Real ranks for tests: scripts run by forks of one process that has imported torch, as the zygote does it.

    results = gang.run(script, attempt=2, resume=5, faults=["kill@save=7"])

Ranks find each other through a file; scripts begin with `PRELUDE`'s names in place.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from evertrain.observe import pages
from evertrain.observe.pages import PageView
from evertrain.trace import rings
from evertrain.worker import page


class Result(NamedTuple):
    """How one rank ended."""

    status: int
    """Exit code, or minus the signal."""
    out: str
    err: str
    page: PageView | None
    said: Any
    """What the script passed to `say`."""
    ring: Path
    """The trace of its collectives."""


class Gang:
    """Runs scripts on a few ranks of this machine; slots, disk and fired faults stay from run to run."""

    def __init__(self, server: subprocess.Popen[str], folder: Path) -> None:
        self._server = server
        self.folder = folder
        self.slots_dir = folder / "slots"
        self.disk_dir = folder / "disk"
        self._runs = 0

    def run(
        self,
        script: str,
        *,
        world: int = 2,
        attempt: int = 1,
        resume: int | None = None,
        reached: int | None = None,
        tier: str | None = None,
        faults: Sequence[str] = (),
        inside: bool = True,
        env: dict[str, str] | None = None,
        told: dict[str, Any] | None = None,
        timeout_s: float = 60.0,
    ) -> list[Result]:
        """Run the script's source on `world` ranks and wait for all; hung ones are killed and fail the test.

        `told` is what the session is told beside the rest.
        """
        self._runs += 1
        work = self.folder / f"run-{self._runs}"
        work.mkdir(parents=True)
        (work / "script.py").write_text(script)
        ranks = []
        for rank in range(world):
            session = None
            if inside:
                path = work / f"page-{rank}"
                page.create(str(path), job="test", term=1, attempt=attempt, rank=rank)
                ring = {"job": "test", "node": "node-0", "term": 1, "attempt": attempt, "rank": rank}
                rings.create(str(work / f"ring-{rank}"), writer="hook", capacity=4096, table=256, **ring)
                session = {
                    "job": "test", "run_id": "test-1", "term": 1, "attempt": attempt, "node": "node-0", "rank": rank,
                    "local_rank": rank, "world_size": world, "page": str(path), "slots_dir": str(self.slots_dir),
                    "disk_dir": str(self.disk_dir), "resume": resume, "resume_tier": tier, "reached": reached,
                    "restart": attempt > 1, "faults": list(faults), "fired_dir": str(self.folder / "fired"),
                    "trace": str(work / f"ring-{rank}"),
                    **(told or {}),
                }  # fmt: skip
            ranks.append(
                {
                    "session": session,
                    "out": str(work / f"out-{rank}"),
                    "err": str(work / f"err-{rank}"),
                    "env": {
                        "RANK": str(rank),
                        "WORLD_SIZE": str(world),
                        "LOCAL_WORLD_SIZE": str(world),
                        "LOCAL_RANK": str(rank),
                        "INIT_METHOD": f"file://{work}/store",
                        "SAY": str(work / f"said-{rank}"),
                        **(env or {}),
                    },
                }
            )
        request = {"script": str(work / "script.py"), "ranks": ranks, "timeout_s": timeout_s}
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        statuses = json.loads(self._server.stdout.readline())
        return [self._result(work, rank, status) for rank, status in enumerate(statuses)]

    def _result(self, work: Path, rank: int, status: int) -> Result:
        said = work / f"said-{rank}"
        return Result(
            status=status,
            out=(work / f"out-{rank}").read_text(),
            err=(work / f"err-{rank}").read_text(),
            page=pages.read(work / f"page-{rank}")[0],
            said=json.loads(said.read_text()) if said.exists() else None,
            ring=work / f"ring-{rank}",
        )


@contextmanager
def server() -> Iterator[subprocess.Popen[str]]:
    """The process that has imported torch; one for many gangs."""
    started = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
    )
    try:
        yield started
    finally:
        assert started.stdin is not None and started.stdout is not None
        started.stdin.close()
        try:
            started.wait(10)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
        started.stdout.close()


PRELUDE = """
import hashlib, json, os, random, sys, time
import torch, torch.distributed as dist
import evertrain
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def join():
    dist.init_process_group("gloo", init_method=os.environ["INIT_METHOD"], rank=RANK, world_size=WORLD)

def say(value):
    with open(os.environ["SAY"], "w") as file:
        json.dump(value, file)

def bits(*tensors):
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return hashlib.sha256(b"".join(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                                    for t in local)).hexdigest()[:16]
"""


def _serve() -> None:
    import torch
    import torch._dynamo

    from evertrain.worker import hooks, session

    torch.set_num_threads(1)
    hooks.install()
    for line in sys.stdin:
        request = json.loads(line)
        pids = []
        for rank in request["ranks"]:
            pid = os.fork()
            if pid == 0:
                os.environ.update(rank["env"])
                for descriptor, name in ((1, "out"), (2, "err")):
                    os.dup2(os.open(rank[name], os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
                if rank["session"] is not None:
                    session.begin(rank["session"])
                _become(request["script"])
            pids.append(pid)
        print(json.dumps(_statuses(pids, time.monotonic() + request["timeout_s"])), flush=True)


def _become(script: str) -> NoReturn:
    """Run the script and end as an interpreter would, but for the second that it takes to take torch apart."""
    code: Any = 0
    try:
        exec(compile(PRELUDE + Path(script).read_text(), script, "exec"), {"__name__": "__main__"})
    except SystemExit as leave:
        code = leave.code
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _statuses(pids: list[int], deadline: float) -> list[int]:
    statuses: dict[int, int] = {}
    while len(statuses) < len(pids):
        for pid in pids:
            if pid not in statuses:
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
        # a rank that died leaves the others waiting, as it would in a job; the launcher would end them
        if any(status for status in statuses.values()):
            deadline = min(deadline, time.monotonic() + 1.0)
        time.sleep(0.005)
    return [statuses[pid] for pid in pids]


if __name__ == "__main__":
    _serve()
