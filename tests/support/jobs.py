"""How does a test run a job? As a user does: `evertrain run …` as a process of its own, in a folder of its own.

    job = start_job("train.py", nproc=4, flags=["--inject", "kill:rank=2@step=5"])   # the fixture of tests/conftest.py
    job.wait_for_step(10)
    job.kill_rank(3)
    assert job.wait() == 0
    first, second = job.incidents()

Run directory, state folder and output all lie below the test's temporary folder, so that whatever belongs to a job can
be found by it, and `close()` ends every process of the job whatever the test did.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from support import ledgers, leftovers, processes
from support.processes import ProcessId
from support.waiting import eventually

EVERTRAIN = Path(sys.executable).with_name("evertrain")
SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLES = Path(__file__).parents[2] / "examples"
SESSION = secrets.token_hex(2)
"""Part of every job name that the helpers invent: what this test session leaves behind can be told from the rest."""
LAUNCHER_NAMES = ("EVERTRAIN_", "PET_", "TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Variables of an outer launcher or of the person who runs the tests; a job under test never sees them."""
STOP_LIMIT_S = 30.0
"""A job that a test leaves running must end in this time after SIGTERM: the default grace and a little more."""

_numbers = count(1)

Json = dict[str, Any]


def user_environment(
    folder: Path, extra: Mapping[str, str] | None = None, *, without: Sequence[str] = ()
) -> dict[str, str]:
    """The environment of the tests as a user would have it: no launcher's names, none that begins with `without`."""
    dropped = (*LAUNCHER_NAMES, *without)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**kept, "XDG_STATE_HOME": str(folder / "state"), "EVERTRAIN_RUN_DIR": str(folder / "runs"), **(extra or {})}


def evertrain(
    folder: Path,
    *words: str | Path,
    timeout_s: float = 30.0,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run one `evertrain` command to its end: for commands that look, and for those that must refuse."""
    return subprocess.run(
        [*prefix, EVERTRAIN, *words],
        cwd=folder,
        env=dict(environment or user_environment(folder)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@dataclass
class Job:
    """A running `evertrain run`."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]
    environment: dict[str, str]
    stdout: Path
    stderr: Path
    began: float
    prefix: tuple[str, ...] = ()
    """Before every command: what runs it on another machine."""
    _ended: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        threading.Thread(target=self._note_end, daemon=True).start()

    def _note_end(self) -> None:
        """When the command ended, whether or not the test was looking."""
        try:
            handle = os.pidfd_open(self.process.pid)
        except ProcessLookupError:
            return
        select.select([handle], [], [])
        self._ended.append(time.time())
        os.close(handle)

    @property
    def job_dir(self) -> Path:
        return Path(self.environment["EVERTRAIN_RUN_DIR"]) / self.name

    # --- looking

    @property
    def output(self) -> str:
        return self.stdout.read_text(errors="replace")

    @property
    def errors(self) -> str:
        return self.stderr.read_text(errors="replace")

    def status(self) -> Json:
        """What `evertrain status --json` prints, during or after the run."""
        status: Json = self._ask("status")
        return status

    def incidents(self) -> list[Json]:
        """What `evertrain incidents --json` prints, during or after the run."""
        incidents: list[Json] = self._ask("incidents")
        return incidents

    def report(self) -> Json:
        """What `evertrain report --json` prints, during or after the run."""
        report: Json = self._ask("report")
        return report

    def peek(self) -> Json | None:
        """The status straight from the controller: cheap enough to poll; None while there is no controller to ask."""
        if self.prefix:
            answer = self._command("status")
            return json.loads(answer.stdout) if answer.returncode == 0 else None
        status: Json | None = self.fetch("status")
        return status

    def peek_incidents(self) -> list[Json]:
        """The same with the incidents; none while there is no controller to ask."""
        incidents: list[Json] = self.fetch("incidents") or []
        return incidents

    def fetch(self, what: str) -> Any:
        """What the controller says, asked without a command; None while nobody answers."""
        try:
            url = json.loads((self.job_dir / "controller.json").read_bytes())["url"]
            token = (self.job_dir / "token").read_text().strip()
            request = urllib.request.Request(f"{url}/v1/{what}", headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request, timeout=5) as answer:
                return json.load(answer)
        except (OSError, ValueError, KeyError):
            return None

    def result(self) -> Json:
        """What the controller wrote down at the end."""
        result: Json = json.loads((self.job_dir / "result.json").read_bytes())
        return result

    def processes(self) -> dict[str, ProcessId]:
        """Keepers, agents, controller and run by name, as written down by the job."""
        return processes.recorded(self.job_dir)

    def rank_pids(self) -> dict[int, int]:
        """Pid of every rank that runs now."""
        return _pids((self.peek() or {}).get("workers", ()))

    # --- waiting

    def wait(self, timeout_s: float = 90.0) -> int:
        """Wait for the end of the run; its exit code, negative where a signal ended it."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {timeout_s:g} s\n{self.story()}") from None

    def wait_until(self, look: Callable[[Json], Any], what: str, *, within_s: float = 45.0) -> Json:
        """Poll the status until `look(status)` is true; return that status."""

        def seen() -> Json | None:
            status = self.peek()
            if status is None and self.process.poll() is not None:
                raise AssertionError(f"{self.name} ended with {self.process.returncode} before: {what}\n{self.story()}")
            return status if status is not None and look(status) else None

        found = eventually(seen, f"{self.name}: {what}", within_s=within_s, story=self.story)
        assert found is not None
        return found

    def wait_for_step(self, step: int, *, within_s: float = 45.0) -> Json:
        return self.wait_until(lambda status: (status["step"] or 0) >= step, f"step {step}", within_s=within_s)

    def wait_for_attempt(self, attempt: int, *, within_s: float = 45.0) -> Json:
        return self.wait_until(lambda status: status["attempt"] >= attempt, f"attempt {attempt}", within_s=within_s)

    def wait_for_phase(self, rank: int, phase: str, *, within_s: float = 45.0) -> Json:
        def there(status: Json) -> bool:
            return any(worker["rank"] == rank and worker["phase"] == phase for worker in status["workers"])

        return self.wait_until(there, f"rank {rank} in phase {phase}", within_s=within_s)

    def wait_for_file(self, name: str, *, within_s: float = 45.0) -> Path:
        """Wait for a file that the script writes into the test's folder."""
        file = self.folder / name
        eventually(file.exists, f"{self.name}: file {name}", within_s=within_s, story=self.story)
        return file

    # --- hurting

    def kill_rank(self, rank: int, signal_number: int = signal.SIGKILL) -> int:
        """Send a signal to one rank, from outside; its pid."""
        status = self.wait_until(lambda status: rank in _pids(status["workers"]), f"rank {rank} has a pid")
        pid = _pids(status["workers"])[rank]
        process = processes.identify(pid)
        assert process is not None and processes.send(process, signal_number), (
            f"rank {rank} (pid {pid}) is gone already"
        )
        return pid

    def kill(self, name: str, signal_number: int = signal.SIGKILL) -> ProcessId:
        """Send a signal to `controller`, `agent-node-0`, `keeper-node-0`, … as the job wrote it down."""
        process = self.processes()[name]
        assert processes.send(process, signal_number), f"{name} (pid {process.pid}) is gone already"
        return process

    def interrupt(self, signal_number: int = signal.SIGINT) -> None:
        self.process.send_signal(signal_number)

    # --- the end

    def end(self) -> bool:
        """End the job politely if it still runs, else by force; whether it ended by itself or politely."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()  # before its children, which it would start again
            self.process.wait(10)
            return False
        return True

    def accounts(self) -> list[str]:
        """What does not add up in the ledger; nothing is known of a command that was killed, or that took part only."""
        if self.process.returncode is None or self.process.returncode < 0 or not self._ended:
            return []
        if "; served by http" in self.errors:
            return []
        return [f"{self.name}: {fault}" for fault in ledgers.faults(self.job_dir, self.began, self._ended[0])]

    def story(self, lines: int = 40) -> str:
        """The last lines of everything that the job printed and logged."""
        files = [self.stdout, self.stderr, *sorted(self.job_dir.glob("logs/*.log"))]
        files += sorted(self.job_dir.glob("logs/attempt_*/*/std*.log"))[-8:]
        parts = [
            f"--- {file.name if file.parent == self.folder else file.relative_to(self.job_dir)}\n{_tail(file, lines)}"
            for file in files
        ]
        return "\n".join([f"=== {self.name}: exit code {self.process.poll()}", *parts])

    def _command(self, command: str) -> subprocess.CompletedProcess[str]:
        words = (command, "--job", self.name, "--json")
        return evertrain(self.folder, *words, environment=self.environment, prefix=self.prefix)

    def _ask(self, command: str) -> Any:
        answer = self._command(command)
        assert answer.returncode == 0, f"{command}: {answer.stderr}\n{self.story()}"
        return json.loads(answer.stdout)


def start(
    folder: Path,
    script: str | Path,
    *,
    nproc: int = 2,
    flags: Sequence[str] = (),
    args: Sequence[str | Path] = (),
    job: str | None = None,
    environment: Mapping[str, str] | None = None,
    without: Sequence[str] = (),
    prefix: Sequence[str] = (),
) -> Job:
    """Start `evertrain run` in `folder`, with a script of the folder, of tests/support/scripts, or any path.

    Prefer the fixture `start_job`, which closes the job at the end of the test.
    """
    name = job or f"{Path(script).stem.replace('_', '-')}-{SESSION}-{next(_numbers)}"
    whole = user_environment(folder, environment, without=without)
    number = sum(1 for _ in folder.glob("run-*.stdout"))
    stdout, stderr = folder / f"run-{number}.stdout", folder / f"run-{number}.stderr"
    path = next((place / script for place in (folder, SCRIPTS) if (place / script).exists()), Path(script))
    command: list[str | Path] = [
        *prefix,
        EVERTRAIN,
        "run",
        f"--nproc-per-node={nproc}",
        "--job",
        name,
        *flags,
        path,
        *args,
    ]
    began = time.time()
    with stdout.open("wb") as out, stderr.open("wb") as err:
        process = subprocess.Popen(command, cwd=folder, env=whole, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    return Job(name, folder, process, whole, stdout, stderr, began, tuple(prefix))


def close(folder: Path, started: Sequence[Job]) -> None:
    """End every job of a test, see what they leave behind, take that away, and print each job's story.

    pytest shows the stories where the test failed; what was left behind fails the last test of the suite. A ledger that
    does not add up fails the test.
    """
    stuck = [job.name for job in started if not job.end()]
    if stuck:
        found = [f"{name}: still running {STOP_LIMIT_S:g} s after SIGTERM" for name in stuck]
    else:
        found = leftovers.after_a_while(folder, [job.name for job in started], within_s=10)
    leftovers.found_at_close.extend(found)
    for job in started:
        print(job.story())
    faults = [fault for job in started for fault in job.accounts()]
    leftovers.clear_away(folder, [job.name for job in started])
    assert not faults, "; ".join(faults)


def _pids(workers: Sequence[Json]) -> dict[int, int]:
    return {worker["rank"]: worker["pid"] for worker in workers if worker["pid"]}


def _tail(file: Path, lines: int) -> str:
    try:
        return "\n".join(file.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return "(gone)"
