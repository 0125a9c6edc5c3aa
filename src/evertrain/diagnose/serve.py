"""How do test programs run on a node? One process imports torch and forks the ranks of each test.

It kills what is over its budget and never waits for a rank that cannot be killed (one inside a dead driver): such a
rank is reported, and the next test begins.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from types import ModuleType
from typing import Any, NoReturn

from evertrain.diagnose import PROGRAMS
from evertrain.worker import disguise

DEFAULTS: dict[str, Any] = {
    "ranks": 1, "device": "auto", "threads": 1, "folder": tempfile.gettempdir(), "environ": {},
}  # fmt: skip
BUDGET_S = 30.0
GRACE = 0.9
"""Of the budget: a program that watches the time ends by itself before it is killed."""
OTHERS_S = 2.0
"""After a rank died the others, which may wait for it, have so long."""
DEATH_S = 2.0
"""A killed process that is not gone after so long is left alone."""

Given = dict[str, Any]


def main() -> NoReturn:
    """Serve standard input; library output goes where errors go."""
    out = os.dup(1)
    os.dup2(2, 1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    serve(0, out)


def serve(source: int, out: int) -> NoReturn:
    """Serve one agent until it closes its end. Before torch's first operation, in a process without other threads."""
    lines = _Lines(source)
    given: Given = {**DEFAULTS, **(lines.next() or {})}
    os.environ.update(given["environ"])
    disguise.name_process("evertrain-tests")
    import torch

    if torch.cuda._initialized:
        _print(out, {"is": "unfit", "node": given["node"], "because": "CUDA is in use in this process"})
        os._exit(1)
    _print(out, {"is": "ready", "node": given["node"], "pid": os.getpid(), "torch": torch.__version__})
    while (test := lines.next()) is not None:
        began = time.monotonic()
        outcome, because = _Trial(given, test, lines, out).run()
        done = {
            "is": "done", "id": test.get("id"), "program": test.get("program"), "outcome": outcome, "because": because,
            "seconds": round(time.monotonic() - began, 3),
        }  # fmt: skip
        _print(out, done)
    os._exit(0)


class _Lines:
    """JSON lines of a descriptor."""

    def __init__(self, source: int) -> None:
        self.source = source
        self.is_over = False
        self._buffer = b""

    def next(self) -> dict[str, Any] | None:
        """Wait for the next one; None: there is none any more."""
        while b"\n" not in self._buffer and not self.is_over:
            self.read()
        line, _, self._buffer = self._buffer.partition(b"\n")
        if not line.strip():
            return None if self.is_over else self.next()
        found: dict[str, Any] = json.loads(line)
        return found

    def read(self) -> None:
        """Once, what there is; waits where nothing is."""
        received = os.read(self.source, 1 << 16)
        self.is_over = not received
        self._buffer += received

    def whole(self) -> list[dict[str, Any]]:
        """Lines that have come completely."""
        *whole, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in whole if line.strip()]


class _Trial:
    """One test: its ranks, what they say, and what it comes to."""

    def __init__(self, given: Given, test: dict[str, Any], asked: _Lines, out: int) -> None:
        self._given = given
        self._test = test
        self._asked = asked
        self._out = out
        self._running: dict[int, int] = {}
        """Pids by rank."""
        self._wrong: list[str] = []
        self._errors: list[str] = []
        self._absent: list[str] = []

    def run(self) -> tuple[str, str]:
        name, parameters = self._test.get("program"), self._test.get("parameters") or {}
        if name not in PROGRAMS:
            return "refused", f"no test program {name!r}; there are {', '.join(PROGRAMS)}"
        program = importlib.import_module(f"evertrain.diagnose.{name}")
        try:
            inspect.signature(program.run).bind(None, **parameters)
        except TypeError as error:
            known = list(inspect.signature(program.run).parameters)[1:]
            return "refused", f"{name} takes {', '.join(known)}: {error}"
        budget_s = float(self._test.get("budget_s") or BUDGET_S)
        try:
            scratch = tempfile.mkdtemp(prefix="evertrain-test-", dir=self._given["folder"])
        except OSError as error:  # a full disk: nothing can be tested, and nothing was
            return "absent", f"no scratch folder in {self._given['folder']}: {error.strerror or error}"
        try:
            late = self._watch(program, parameters, budget_s, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        if self._wrong:
            return "failed", "; ".join(self._wrong[:3])
        if late:
            return "late", f"not within {budget_s:g} s: {late}"
        if self._errors:
            return "crashed", "; ".join(self._errors[:3])
        if self._absent:
            return "absent", self._absent[0]
        return "passed", ""

    def _watch(self, program: ModuleType, parameters: dict[str, Any], budget_s: float, scratch: str) -> str:
        """Start all ranks and hear them to their end. Who was late, in words."""
        began, parent = time.monotonic(), os.getpid()
        heard: dict[int, tuple[int, _Lines]] = {}
        ranks: int = self._given["ranks"] if program.ON_EACH_RANK else 1
        for rank in range(ranks):
            hear, tell = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(hear)
                deadline = began + budget_s * GRACE
                _be_rank(self._given, self._test, program, parameters, rank, ranks, scratch, deadline, tell, parent)
            os.close(tell)
            self._running[rank] = pid
            heard[hear] = (rank, _Lines(hear))
        limit, late = began + budget_s, ""
        while heard and not self._asked.is_over:
            left_s = limit - time.monotonic()
            if left_s <= 0:
                if limit == began + budget_s:
                    late = ", ".join(f"rank {rank}" for rank, _ in sorted(heard.values(), key=lambda one: one[0]))
                break
            ready, _, _ = select.select([*heard, self._asked.source], [], [], left_s)
            if self._asked.source in ready:
                self._asked.read()
            for source in set(ready) & heard.keys():
                rank, lines = heard[source]
                lines.read()
                for line in lines.whole():
                    self._take(rank, line)
                if lines.is_over:
                    os.close(source)
                    del heard[source]
                    if not self._ended_well(rank):
                        limit = min(limit, time.monotonic() + OTHERS_S)
        for source in heard:
            os.close(source)
        self._end_all()
        return late

    def _take(self, rank: int, line: dict[str, Any]) -> None:
        if line["is"] == "error":
            (self._absent if line["absent"] else self._errors).append(f"rank {rank}: {line['text']}")
            return
        if line["ok"] is False:
            self._wrong.append(f"rank {rank}: {line['name']}: {line['detail'].get('because', line['value'])}")
        _print(self._out, {**line, "id": self._test.get("id"), "rank": rank})

    def _ended_well(self, rank: int) -> bool:
        """Its line is closed, so it is about to be gone."""
        status = self._reap(rank)
        if status is None:
            self._errors.append(f"rank {rank}: closed its line and did not end")
        elif status < 0:
            self._errors.append(f"rank {rank}: ended by {signal.Signals(-status).name}")
        elif status > 1:  # 1: it has said why
            self._errors.append(f"rank {rank}: ended with {status}")
        return status == 0

    def _reap(self, rank: int) -> int | None:
        limit = time.monotonic() + DEATH_S
        while time.monotonic() < limit:
            pid, status = os.waitpid(self._running[rank], os.WNOHANG)
            if pid:
                del self._running[rank]
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        return None

    def _end_all(self) -> None:
        for pid in self._running.values():
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for rank in list(self._running):
            if self._reap(rank) is None:
                self._errors.append(f"rank {rank}: pid {self._running[rank]} cannot be killed")


def _be_rank(
    given: Given,
    test: dict[str, Any],
    program: ModuleType,
    parameters: dict[str, Any],
    rank: int,
    ranks: int,
    scratch: str,
    deadline: float,
    tell: int,
    parent: int,
) -> NoReturn:
    """In the forked process: run the program, say what is to be said, and end at once."""
    status = 1
    try:
        os.setsid()
        disguise.die_with_parent(parent)
        from evertrain.diagnose import bench

        program.run(
            bench.Bench(
                node=given["node"], rank=rank, ranks=ranks, device=bench.choose_device(given["device"], rank),
                threads=given["threads"], folder=given["folder"], rendezvous=os.path.join(scratch, "ranks"),
                salt=f"{test['program']}:{test.get('id')}", deadline=deadline, send=lambda line: _print(tell, line),
            ),
            **parameters,
        )  # fmt: skip
        status = 0
    except BaseException as error:
        is_absent = type(error).__name__ == "Absent"
        if not is_absent:
            traceback.print_exc()
        text = str(error).strip().splitlines()
        words = text[0] if text else ""
        said = words if is_absent else f"{type(error).__name__}: {words}"
        _print(tell, {"is": "error", "text": said, "absent": is_absent})
        status = 0 if is_absent else 1
    finally:
        sys.stderr.flush()
        os._exit(status)


def _print(out: int, line: dict[str, Any]) -> None:
    content = json.dumps(line).encode() + b"\n"
    try:
        while content:
            content = content[os.write(out, content) :]
    except BrokenPipeError:  # nobody is there to hear it
        os._exit(1)
