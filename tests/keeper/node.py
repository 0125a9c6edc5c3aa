"""A node without the rest of the product: a real keeper, and the smallest agent that can talk to it.

    with Node(tmp_path, "train.py", nproc=2) as node:
        node.prepare(1)
        node.go(1)
        node.wait_for(lambda state: state["attempts"]["1"]["phase"] == "ended")

Leaving the `with` ends the keeper and everything below it, whatever the test did.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import evertrain.keeper.main
from evertrain.worker import page

Json = dict[str, Any]
KEEPER = evertrain.keeper.main.__file__
OUTER = ("OMP_", "MKL_", "OPENBLAS_", "PYTHON", "TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE")


def user_environ(**more: str) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if not name.startswith(OUTER)}, **more}


class Node:
    """One keeper and our connection to it."""

    def __init__(
        self,
        folder: Path,
        target: str,
        *args: str,
        kind: str = "script",
        start: str = "spawn",
        nproc: int = 1,
        preload: Sequence[str] = (),
        environ: dict[str, str] | None = None,
        command: Sequence[str] = (KEEPER,),
        stdin: Any = subprocess.DEVNULL,
        python: str = sys.executable,
        log: Path | None = None,
        **spec: Any,
    ) -> None:
        self.folder = folder
        self.node_dir = Path(f"/dev/shm/evertrain-test-{os.getpid()}-{time.monotonic_ns():x}") / "node-0"
        self.nproc = nproc
        self.log = folder / "keeper.log"
        owner, self.owner = os.pipe()
        file = folder / "keeper.json"
        described = {
            "job": "test", "run_id": "test-0", "node": "node-0", "node_dir": str(self.node_dir), "log_dir": str(folder),
            "start": start, "python": python, "command": {"kind": kind, "target": target, "args": args},
            "preload": preload, "local_world_size": nproc, "owner_fd": owner, "grace_s": 25.0, "orphan_limit_s": 600.0,
        }  # fmt: skip
        file.write_text(json.dumps(described | spec))
        self.log.touch()
        with (log or self.log).open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-I", *command, str(file)],
                cwd=folder,
                env=user_environ() if environ is None else environ,
                stdin=stdin,
                stdout=output,
                stderr=output,
                pass_fds=[owner],
            )
        os.close(owner)
        self.state: Json = {}
        self.errors: list[Json] = []
        self.heard_time = 0.0
        self._socket: socket.socket | None = None
        self._rest = b""
        try:
            self.connect()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    # -- as an agent -------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Become the agent, in place of any other."""
        deadline = time.monotonic() + 10
        while True:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.connect(str(self.node_dir / "keeper.sock"))
                break
            except OSError:
                sock.close()
                assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.01)
        self.disconnect()
        self._socket, self._rest, self.state = sock, b"", {}
        self.wait_for(lambda state: True)

    def disconnect(self) -> None:
        if self._socket:
            self._socket.close()
            self._socket = None

    def send(self, **command: Any) -> None:
        self.send_bytes(json.dumps(command).encode() + b"\n")

    def send_bytes(self, line: bytes) -> None:
        assert self._socket
        self._socket.sendall(line)

    def wait_for(self, seen: Callable[[Json], Any], within_s: float = 20.0) -> Json:
        """Listen until the state is as wanted."""
        deadline = time.monotonic() + within_s
        while not (self.state and seen(self.state)):
            self._listen(deadline)
        return self.state

    def wait_for_error(self, within_s: float = 10.0) -> str:
        deadline = time.monotonic() + within_s
        while not self.errors:
            self._listen(deadline)
        return str(self.errors.pop(0)["error"])

    def _listen(self, deadline: float) -> None:
        assert self._socket
        self._socket.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            received = self._socket.recv(1 << 20)
        except TimeoutError:
            raise AssertionError(f"not in time; state {json.dumps(self.state, indent=1)}\n{self.story()}") from None
        if not received:
            raise ConnectionError("the keeper has hung up")
        self.heard_time = time.monotonic()
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message["is"] == "state":
                self.state = message
            else:
                self.errors.append(message)

    # -- attempts ----------------------------------------------------------------------------------------------------

    def prepare(self, attempt: int, *, store: bool = False, term: int = 1, wait: bool = True, **more: Any) -> None:
        ranks = list(range(self.nproc))
        self.send(do="prepare", term=term, attempt=attempt, ranks=ranks, store=store, **more)
        if wait:
            self.wait_for(lambda state: self.phase(attempt) == "prepared", 60)

    def go(
        self, attempt: int, *, term: int = 1, env: dict[str, str] | None = None, args: Sequence[str] | None = None
    ) -> None:
        orders = {str(rank): {**self.orders(attempt, rank, env or {}), "args": args} for rank in range(self.nproc)}
        code = self.state["code"]["digest"] if self.state["code"] else ""
        self.send(do="go", term=term, attempt=attempt, ranks=orders, code=code)

    def orders(self, attempt: int, rank: int, env: dict[str, str]) -> Json:
        folder = self.rank_folder(attempt, rank)
        folder.mkdir(parents=True, exist_ok=True)
        path = self.node_dir / f"a{attempt}-r{rank}"
        page.create(str(path), job="test", term=1, attempt=attempt, rank=rank)
        session = {
            "job": "test", "run_id": "test-0", "term": 1, "attempt": attempt, "node": "node-0", "rank": rank,
            "local_rank": rank, "world_size": self.nproc, "page": str(path), "slots_dir": str(self.node_dir / "slots"),
            "disk_dir": str(self.folder / "disk"), "resume": None, "resume_tier": None, "reached": None,
            "restart": attempt > 1, "faults": [], "fired_dir": str(self.folder / "fired"),
            "exception_path": str(folder / "exception.json"), "mesh": None,
        }  # fmt: skip
        port = self.state["attempts"][str(attempt)]["store_port"]
        env = {**self.rank_environ(rank, port), **env}
        return {"env": env, "session": session, "stdout": str(folder / "out"), "stderr": str(folder / "err")}

    def rank_environ(self, rank: int, port: int | None) -> dict[str, str]:
        return {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.nproc), "MASTER_ADDR": "localhost",
            "LOCAL_WORLD_SIZE": str(self.nproc), "MASTER_PORT": str(port or 0), "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip

    def run(self, attempt: int = 1, *, store: bool = False, within_s: float = 60.0) -> dict[int, int]:
        """A whole attempt; the exit status of every rank."""
        self.prepare(attempt, store=store)
        self.go(attempt)
        self.wait_for(lambda state: self.phase(attempt) == "ended", within_s)
        return {rank: self.rank(attempt, rank)["exit"]["status"] for rank in range(self.nproc)}

    def attempt(self, attempt: int) -> Json:
        found: Json = self.state["attempts"].get(str(attempt), {})
        return found

    def phase(self, attempt: int) -> str | None:
        return self.attempt(attempt).get("phase")

    def rank(self, attempt: int, rank: int = 0) -> Json:
        found: Json = self.attempt(attempt)["ranks"][str(rank)]
        return found

    def rank_folder(self, attempt: int, rank: int = 0) -> Path:
        return self.folder / f"attempt_{attempt}" / str(rank)

    def output(self, attempt: int, rank: int = 0, stream: str = "out") -> str:
        file = self.rank_folder(attempt, rank) / stream
        return file.read_text(errors="replace") if file.exists() else ""

    def story(self) -> str:
        files = [self.log, *self.folder.glob("zygote*.log"), *self.folder.glob("attempt_*/*/err")]
        return "\n".join(f"--- {file.relative_to(self.folder)}\n{file.read_text()[-2000:]}" for file in files)

    # -- the end -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disconnect()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()  # its ranks die with it
                self.process.wait(10)
        os.close(self.owner)
        shutil.rmtree(self.node_dir.parent, ignore_errors=True)

    def kill_keeper(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
