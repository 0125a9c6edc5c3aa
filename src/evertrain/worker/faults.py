"""What should go wrong, where, and when? Fault points for drills: `--inject KIND[:key=value,…]@POINT[=N]`.

    kill:rank=2@step=20        SIGKILL inside step 20            exit:code=3@init        exit code 3
    raise:rank=1@evaluate      an exception                      stop:@save=12           SIGSTOP while saving step 12
    kill:stage=copied@save=9    beside the step after a save, also copying and committed
    hang:@step=5               sleeps for ever                   slow:factor=3@step=5    each step takes 3 times as long
    nan:rank=1@step=8          gradients become NaN              oom:@step=8             memory runs out, in bounds
    wipe:node=1@step=40            done to a node from outside, as are node-loss (with for=SECONDS it comes back),
                                   gpu-lost, network-alert and reading (an odd one, of its hardware)

Without `@POINT` a fault fires in the first step. Each fires once per job, whatever restarts it causes: the file
`<fired_dir>/<index>` is created, exclusively, before it acts. This module needs the standard library only, so the
command line can check what the user typed.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

RANK_KINDS = ("kill", "exit", "raise", "stop", "hang", "slow", "nan", "oom")
NODE_KINDS = ("wipe", "gpu-lost", "network-alert", "reading", "node-loss")
STAGES = ("copying", "copied", "committed")
"""Of a save, after its beginning: half of what is copied while training goes on is, all of it is, the save counts."""
AT_STAGES = ("kill", "stop", "hang")
POINTS = ("start", "init", "step", "save", "evaluate", "exit")

_OPTIONS = {
    **dict.fromkeys(RANK_KINDS, ("rank",)),
    **dict.fromkeys(NODE_KINDS, ("node",)),
    "node-loss": ("node", "for"),
    "exit": ("rank", "code"),
    "slow": ("rank", "factor", "steps"),
    **dict.fromkeys(AT_STAGES, ("rank", "stage")),
}
_OOM_HEADROOM = 256 << 20


class FaultError(ValueError):
    """A fault that cannot be understood; the text is one line for the user."""


class InjectedFault(RuntimeError):
    """Raised inside the training script by a `raise` fault."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that is to go wrong, as the user wrote it."""

    text: str
    kind: str
    point: str = "step"
    at: int | None = None
    """The step; None: the first time the point is reached."""
    rank: int = 0
    node: str | None = None
    code: int = 1
    factor: float = 3.0
    stage: str = ""
    """Of a save; "" is its beginning, when its slot is given up and before `save()` returns."""
    steps: int | None = None
    """How many steps stay slow; None: all of this attempt."""
    for_s: float | None = None
    """So long a lost node stays away; None: it never comes back."""

    @property
    def on_node(self) -> bool:
        """Done to a whole node from outside, not by the rank."""
        return self.kind in NODE_KINDS


def parse(text: str) -> Fault:
    """Understand one `--inject` argument; raises FaultError with one line that says what is wrong."""
    what, _, where = text.partition("@")
    kind, _, listed = what.partition(":")
    if kind not in _OPTIONS:
        raise FaultError(f"unknown fault {kind!r} in {text!r}; known are {', '.join(_OPTIONS)}")

    options: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in listed.split(","))):
        key, _, value = item.partition("=")
        if key not in _OPTIONS[kind]:
            raise FaultError(f"{kind} takes {' and '.join(_OPTIONS[kind])}, not {key!r}, in {text!r}")
        # `for` is a word of Python's own
        options["for_s" if key == "for" else key] = value if key in ("node", "stage") else _number(key, value, text)
    if kind in NODE_KINDS and not options.get("node"):
        raise FaultError(f"{kind} needs node=NAME or node=NUMBER, in {text!r}")
    if options.get("factor", 2.0) <= 1.0:
        raise FaultError(f"factor must be greater than 1, in {text!r}")

    point, given, step = where.removeprefix("phase=").partition("=")
    if where and point not in POINTS:
        raise FaultError(f"unknown point {point!r} in {text!r}; known are {', '.join(POINTS)}")
    if given and point not in ("step", "save"):
        raise FaultError(f"only step and save take a number, in {text!r}")
    if options.get("stage") and (point != "save" or options["stage"] not in STAGES):
        raise FaultError(f"stage is one of {', '.join(STAGES)} of a save, in {text!r}")
    if kind in NODE_KINDS and where and point != "step":
        raise FaultError(f"{kind} can only happen at a step, in {text!r}")
    if kind == "nan" and where and point != "step":
        raise FaultError(f"nan can only happen in a step, in {text!r}")
    return Fault(
        text=text, kind=kind, point=point or "step", at=int(_number(point, step, text)) if given else None, **options
    )


def _number(key: str, value: str, text: str) -> int | float:
    try:
        number = float(value) if key in ("factor", "for") else int(value)
    except ValueError:
        raise FaultError(f"{key}={value!r} is not a number, in {text!r}") from None
    if not 0 <= number < float("inf"):
        raise FaultError(f"{key}={value} must be a number from 0 on, in {text!r}")
    return number


class Armed:
    """The faults that wait in this rank."""

    def __init__(self, waiting: list[tuple[Fault, str]]) -> None:
        self._waiting = waiting
        self._slow: Fault | None = None
        self._slow_steps = 0
        self._delay_s = 0.0

    def __bool__(self) -> bool:
        return bool(self._waiting) or self._slow is not None

    def reach(
        self, point: str, step: int | None, *, stage: str = "", optimizer: Any = None, step_s: float = 0.0
    ) -> None:
        """A point has been reached; what waits for it happens now."""
        for fault, fired in list(self._waiting):
            if (fault.point, fault.stage) != (point, stage):
                continue
            if fault.at is not None and (step is None or step < fault.at):
                continue
            if fault.kind == "nan" and optimizer is None:
                continue
            self._waiting.remove((fault, fired))
            if _first_time(fired):
                self._act(fault, optimizer, step_s)
        if point == "step" and optimizer is not None and self._slow is not None:
            self._be_slow(self._slow)

    def _act(self, fault: Fault, optimizer: Any, step_s: float) -> None:
        print(f"evertrain: injected fault {fault.text}", file=sys.stderr, flush=True)
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exit":
                raise SystemExit(fault.code)
            case "raise":
                raise InjectedFault(fault.text)
            case "hang":
                while True:
                    time.sleep(3600)
            case "slow":
                # fixed now, since from now on the steps that could be measured are slow themselves
                self._slow, self._delay_s = fault, (fault.factor - 1) * (step_s or 0.05)
            case "nan":
                _poison(optimizer)
            case "oom":
                _run_out_of_memory()

    def _be_slow(self, fault: Fault) -> None:
        time.sleep(self._delay_s)
        self._slow_steps += 1
        if self._slow_steps == fault.steps:
            self._slow = None


def arm(texts: Iterable[str], fired_dir: str, *, rank: int) -> Armed:
    """The faults among `texts` that this rank brings about itself and that have not fired yet."""
    waiting = []
    for index, fault in enumerate(map(parse, texts)):
        if not fault.on_node and fault.rank == rank:
            fired = os.path.join(fired_dir, str(index))
            if not os.path.exists(fired):
                waiting.append((fault, fired))
    return Armed(waiting)


def _first_time(fired: str) -> bool:
    os.makedirs(os.path.dirname(fired), mode=0o700, exist_ok=True)
    try:
        os.close(os.open(fired, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    return True


def _poison(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.detach().fill_(float("nan"))


def _run_out_of_memory() -> None:
    """Meet a limit of our own: this process fails as if memory were gone, the machine notices nothing."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + _OOM_HEADROOM, before[1]))
    taken = []
    try:
        while True:
            taken.append(bytearray(16 << 20))
    finally:
        taken.clear()
        resource.setrlimit(resource.RLIMIT_AS, before)
