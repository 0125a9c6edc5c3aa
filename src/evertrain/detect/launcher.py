"""Which process ended first, where, and how? What torchrun, Slurm, MPI and Kubernetes say of the ends.

An exit code is weak evidence: it says how a process ended and rarely why. It decides only where nothing better does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

from evertrain.model.findings import Action, Category, Culprit, Finding
from evertrain.model.signals import Line

WORDS = (
    "exitcode",
    "(local_rank:",
    "host      :",
    "host     :",
    "rank      :",
    "root cause (first",
    "failures:",
    "exited with",
    "exit code",
    "exited on signal",
    "return code",
    "terminated with",
    "srun: error",
)

_ROOT = re.compile(r"Root Cause \(first observed failure\)")
_OTHERS = re.compile(r"^\s*Failures:")
_FIELD = re.compile(r"^\s*(host|rank|exitcode)\s*:\s*(\S+)(?: \(local_rank: (\d+)\))?")
_API = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
_SRUN = re.compile(
    r"srun: error: (?P<host>[\w.-]+(?:\[[\d,-]+\])?): tasks? (?P<task>[\d,-]+): "
    r"(?:Exited with exit code (?P<code>\d+)"
    r"|(?P<how>Segmentation fault|Killed|Aborted|Bus error|Terminated|Illegal instruction))"
)
_MPI = re.compile(r"rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exited on signal (?P<signal>\d+)")
_DEEPSPEED = re.compile(
    r"exits with return code = (-?\d+)|exited with (?:exit )?code (-?\d+)|Exit Code:\s+(\d+)"
    r"|terminated with (?:exit code|signal) (\S+)"
)
_HOW = {
    "Segmentation fault": -11,
    "Killed": -9,
    "Aborted": -6,
    "Bus error": -7,
    "Terminated": -15,
    "Illegal instruction": -4,
}
_BY_NAME = {"SIGSEGV": -11, "SIGKILL": -9, "SIGABRT": -6, "SIGBUS": -7, "SIGTERM": -15, "SIGILL": -4}


class End(Struct, frozen=True):
    code: int
    host: str | None = None
    rank: int | None = None
    is_root: bool = False
    """The launcher saw it first."""
    line: Line | None = None


def signed(code: int) -> int:
    """A shell's 128 + n and a launcher's -n say the same."""
    return 128 - code if 128 < code < 160 else code


class Ends:
    """Reads the launcher's lines in order."""

    def __init__(self) -> None:
        self.ends: list[End] = []
        self._block: dict[str, dict[str, str]] = {}
        self._is_root: dict[str, bool] = {}

    def read(self, line: Line) -> None:
        text = line.text
        if _ROOT.search(text):
            self._is_root[line.stream] = True
        elif _OTHERS.match(text):
            self._is_root[line.stream] = False
        elif field := _FIELD.match(text):
            block = self._block.setdefault(line.stream, {})
            block[field[1]] = field[2]
            if field[1] == "exitcode" and re.fullmatch(r"-?\d+", field[2]):
                rank = block.get("rank", "")
                self.ends.append(
                    End(signed(int(field[2])), block.get("host"), int(rank) if rank.isdigit() else None,
                        self._is_root.get(line.stream, False), line)
                )  # fmt: skip
                block.clear()
        elif found := _API.search(text):
            self.ends.append(End(signed(int(found[1])), line.host, None, False, line))
        elif found := _SRUN.search(line.raw):
            code = _HOW[found["how"]] if found["how"] else signed(int(found["code"]))
            tasks = found["task"]
            self.ends.append(End(code, found["host"], int(tasks) if tasks.isdigit() else None, False, line))
        elif found := _MPI.search(text):
            self.ends.append(End(-int(found["signal"]), found["host"], int(found["rank"]), False, line))
        elif found := _DEEPSPEED.search(text):
            how = next(group for group in found.groups() if group)
            code = _BY_NAME.get(how) or (int(how) if re.fullmatch(r"-?\d+", how) else 0)
            if code:
                self.ends.append(End(signed(code), line.host, line.rank, False, line))


def first(ends: Sequence[End]) -> End | None:
    """The one that the launcher calls the root, else the first that no launcher caused."""
    told = [end for end in ends if end.is_root] or [end for end in ends if end.code not in (0, 1, -15)] or list(ends)
    return next((end for end in told if end.host or end.rank is not None), told[0] if told else None)


def judge(ends: Sequence[End], exitcode: int | None) -> tuple[Finding, ...]:
    end = first(ends)
    code = end.code if end is not None else signed(exitcode) if exitcode is not None else 0
    if code in _MEANING:
        category, action, confidence, what, meaning = _MEANING[code]
        is_symptom = code in (-15, -2, -1)
    elif code != 0:
        category, action, confidence, what, meaning = "unknown", "human", 0.1, "", "a process failed"
        is_symptom = True
    else:
        return ()
    culprit = Culprit("unknown")
    if what and code != -11:
        culprit = Culprit("config", what)
    elif end is not None and end.rank is not None:
        culprit = Culprit("rank", end.rank)
    quoted = (end.line.quoted(),) if end is not None and end.line is not None else (f"exit code {exitcode}",)
    return (
        Finding(
            rule=f"exit{code}", group="exits", category=category, action=action, culprit=culprit, confidence=confidence,
            evidence=quoted, order=end.line.order if end is not None and end.line is not None else 0,
            rank=end.rank if end is not None else None, host=end.host if end is not None else None,
            is_symptom=is_symptom, note=meaning,
        ),
    )  # fmt: skip


_MEANING: dict[int, tuple[Category, Action, float, str, str]] = {
    -11: ("framework_bug", "human", 0.5, "native code", "native code crashed"),
    -4: (
        "framework_bug",
        "human",
        0.5,
        "build of a library",
        "the processor does not know an instruction of a library",
    ),
    -8: ("framework_bug", "human", 0.45, "native code", "native code divided by zero"),
    -7: ("container_config", "human", 0.5, "size of /dev/shm", "SIGBUS: most often a shared memory that is too small"),
    -9: ("oom_host", "user_code", 0.5, "host memory", "SIGKILL: most often the host's memory or a limit of it"),
    -6: ("unknown", "human", 0.15, "", "the process aborted itself"),
    -15: ("unknown", "human", 0.15, "", "somebody ended the process"),
    -2: ("unknown", "human", 0.15, "", "somebody interrupted the process"),
    -1: ("unknown", "human", 0.15, "", "the process lost its terminal"),
}
