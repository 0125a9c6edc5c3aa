"""What does this process know about the job that it is a rank of?

The launcher calls `begin` once, in the rank, before the user's script runs; `current` is None everywhere else (in
scripts outside `evertrain run`, and in children that a rank forks: a data loader's worker must not write the page
of its parent). Hooks, reports and the checkpointer tell the session what happened, and it tells the page.

A spawned rank imports this before the user's script: few standard modules are imported at the top here and in what
this imports, so that a script's neighbour named like one of them is still found.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import time

from evertrain.worker import page
from evertrain.worker.page import PageWriter
from evertrain.worker.steps import Durations, StepCounter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, SupportsFloat

    from evertrain.worker.barrier import Barrier
    from evertrain.worker.copier import Copier
    from evertrain.worker.faults import Armed
    from evertrain.worker.operations import Trace
    from evertrain.worker.rank_slots import RankSlots
    from evertrain.worker.replay import Drill, Recorder

IMPORT_TIME = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "ATEN_CPU_CAPABILITY", "TORCH_LOGS",
    "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_USE_RTLD_GLOBAL", "TORCH_SHOW_CPP_STACKTRACES", "PYTORCH_JIT",
    "PYTORCH_NVML_BASED_CUDA_CHECK", "LD_PRELOAD", "LD_LIBRARY_PATH",
)  # fmt: skip
"""Beginnings of names that torch and its libraries read once, while they are loaded."""

_USUAL_PHASES = frozenset({"train", "evaluate", "save"})
"""Declared phases after which training is what it was before."""


class Session:
    """One rank in one attempt."""

    def __init__(self, given: dict[str, Any], environment: dict[str, str]) -> None:
        """`environment`: what counts only before torch is imported, as it was before the script."""
        self.job: str = given["job"]
        self.term: int = given["term"]
        self.attempt: int = given["attempt"]
        self.node: str = given["node"]
        self.rank: int = given["rank"]
        self.local_rank: int = given["local_rank"]
        self.world_size: int = given["world_size"]
        self.slots_dir: str = given["slots_dir"]
        self.disk_dir: str = given["disk_dir"]
        self.resume: int | None = given["resume"]
        self.resume_attempt: int | None = given.get("resume_attempt")
        """That saved the step to resume; None: any of them."""
        self.resume_tier: str | None = given.get("resume_tier")
        self.resume_folder: str = given.get("resume_folder", "")
        """Of the step in the store, where that is the tier."""
        self.store_since: float | None = given.get("store_since")
        """Without a step to resume, one that the store has of a life since then will do; None: none will."""
        self.restart: bool = given["restart"]
        self.page_path: str = given["page"]
        self.page = PageWriter(self.page_path)
        self.page.reached = -1 if given.get("reached") is None else given["reached"]
        self.trace_path: str = given.get("trace") or ""
        self.trace: Trace | None = None
        """What its communication does is told there, from the first operation on."""
        self.faults: Armed | None = None
        if given.get("faults"):
            from evertrain.worker import faults

            self.faults = faults.arm(given["faults"], given["fired_dir"], rank=self.rank)
        self.replay: Recorder | None = None
        """What this rank does in a replay; None: it trains."""
        if given.get("replay"):
            from evertrain.worker.replay import Recorder

            self.replay = Recorder(given["replay"])
        self.drill: Drill | None = None
        if faults_in_replays := os.environ.get("EVERTRAIN_REPLAY_FAULT"):
            from evertrain.worker.replay import Drill

            self.drill = Drill(self, faults_in_replays)
        self.steps = StepCounter()
        self.durations = Durations()
        self.failed = False
        """The script has ended with an exception."""
        self.loss_is_finite = True
        """False from a reported loss that is NaN or infinite until the next finite one."""
        self.copier: Copier | None = None
        """Copies the state while training goes on; there once a Checkpointer is."""
        self.slots: RankSlots | None = None
        """Where the state is copied to, whichever Checkpointer saves it; there once a Checkpointer is."""
        self._environment = environment
        self._environment_checked = False
        self._code_checked = code_check is None
        self._base = "start"
        self._declared: list[str] = []
        # relative steps at the moment when the absolute step was last known
        self._known_at = 0
        self._is_declared = False
        """Inside a phase that is not training itself."""
        self._declared_s = self._declared_since = 0.0
        self._stage = 0
        self._step_is_open = False
        # the step that was remembered last: its number, and the arguments that say what it was
        self._remembered = (0, -1, 0, 0.0, 0.0)

    # -- phases ------------------------------------------------------------------------------------------------------

    def at(self, phase: str) -> None:
        """The run itself has moved on: start, init, train, exit."""
        if phase != self._base:
            self._base = phase
            self._show_phase()

    def enter(self, phase: str) -> None:
        """A declared phase begins; phases nest."""
        if self.replay is not None:
            self.replay.goes_on()
        self._count_declared()
        if not self._is_declared and phase not in _USUAL_PHASES:
            self._stage += 1
        self._declared.append(phase)
        if not self._is_declared and phase != "train":
            self._is_declared = True
            self._declared_since = time.monotonic()
        self._show_phase()

    def leave(self) -> None:
        self._count_declared()
        self._declared.pop()
        self._is_declared = any(phase != "train" for phase in self._declared)
        self._show_phase()

    def _count_declared(self) -> float:
        """Time spent inside declared phases until now."""
        if self._is_declared:
            now = time.monotonic()
            self._declared_s += now - self._declared_since
            self._declared_since = now
        return self._declared_s

    def _show_phase(self) -> None:
        now = time.monotonic()
        self.page.phase = page.text(self._declared[-1] if self._declared else self._base, 32)
        self.page.phase_time = self.page.progress_time = now
        self.page.write(now)

    def check_environment(self) -> None:
        """Notice, once, that the script has changed environment that only counts before torch is imported."""
        if not self._environment_checked:
            self._environment_checked = True
            if import_time_environment() != self._environment:
                self.page.flags |= page.ENV_CHANGED

    def check_code(self) -> None:
        """Raise, until it is not so, where this rank has imported code of another version than it is to run."""
        if not self._code_checked and code_check is not None:
            code_check(self.rank)
            self._code_checked = True

    # -- steps -------------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Finished steps: absolute where known, with the optimizer steps since then; else relative."""
        written = self.page
        return written.rel_step if written.abs_step < 0 else written.abs_step + written.rel_step - self._known_at

    def torch_is_there(self) -> None:
        """As early as something can be done about it."""
        if self.replay is not None:
            from evertrain.worker import replay

            replay.be_repeatable(self.replay.config.seed)
        if self.drill is not None:
            self.drill.begin()

    def optimizer_stepped(self, key: int) -> bool:
        """An optimizer has stepped; whether that finishes a training step."""
        written = self.page
        now = time.monotonic()
        finishes = self.steps.stepped(key)
        if finishes:
            written.rel_step += 1
            written.step_s = self.durations.ended(time.monotonic_ns())
            if written.rel_step == 1:
                self.check_environment()
                self.at("train")
                written.resumed_time = written.resumed_time or now
            self._remember_step(now, 0.0, 0.0, page.IS_OPEN)
            if self.drill is not None:
                self.drill.stepped()
        written.progress_time = now
        written.write(now)
        return finishes

    def finished(self, step: int, now: float) -> None:
        """The script has named `step` as finished. The caller writes the page."""
        written = self.page
        written.abs_step = step
        self._known_at = written.rel_step
        written.progress_time = now
        if not written.passed_time and step > written.reached:
            written.passed_step, written.passed_time = step, now

    def restored(self, step: int | None) -> None:
        """`load()` is done: training goes on after `step`, or begins."""
        now = time.monotonic()
        written = self.page
        if step is not None:
            written.resumed_step = written.abs_step = step
            self._known_at = written.rel_step
        written.resumed_time = written.progress_time = now
        written.write(now)

    def before_change(self) -> None:
        """What a save still copies may be changed after this."""
        if self.copier is not None:
            self.copier.before_change()

    # -- reports -----------------------------------------------------------------------------------------------------

    def report(
        self,
        step: int | None,
        loss: SupportsFloat | None,
        grad_norm: SupportsFloat | None,
        tokens: SupportsFloat | None,
        metrics: dict[str, SupportsFloat],
    ) -> None:
        written = self.page
        now = time.monotonic()
        if step is not None:
            self.finished(step, now)
        if loss is not None:
            written.loss = value = page.number(loss)
            written.flags |= page.HAS_LOSS
            self.loss_is_finite = math.isfinite(value)
            if step is not None:
                written.remember_loss(step, value)
        if grad_norm is not None:
            written.grad_norm = page.number(grad_norm)
            written.flags |= page.HAS_GRAD_NORM
        if tokens is not None and math.isfinite(more := page.number(tokens)):
            written.tokens += more
            written.flags |= page.HAS_TOKENS
        if metrics:
            written.set_metrics(metrics)
        said = page.HAS_LOSS * (loss is not None) | page.HAS_GRAD_NORM * (grad_norm is not None)
        if step is not None or said:
            self._remember_step(now, written.loss, written.grad_norm, said)
        written.progress_time = now
        written.write(now)
        if self.replay is not None:
            self.replay.reported(step, loss, grad_norm)
        if step is not None:
            self.fire("step", step)

    def _remember_step(self, now: float, loss: float, grad_norm: float, flags: int) -> None:
        """Keep it where none is missed. What the script says of a step that its optimizer has just made adds to it."""
        written = self.page
        count, _, rel_step, ended, declared_s = self._remembered
        if not self._step_is_open or flags & page.IS_OPEN:
            count, rel_step, ended = count + 1, written.rel_step, now
            declared_s = self._count_declared() if self._is_declared else self._declared_s
        self._step_is_open = bool(flags & page.IS_OPEN)
        if self._is_declared:
            flags &= ~(page.HAS_LOSS | page.HAS_GRAD_NORM)  # of an evaluation
        self._remembered = (count, self.step, rel_step, ended, declared_s)
        written.remember_step(
            *self._remembered, loss, grad_norm, written.tokens, flags | written.flags & page.HAS_TOKENS, self._stage
        )

    # -- faults ------------------------------------------------------------------------------------------------------

    def fire(self, point: str, step: int | None = None, stage: str = "") -> None:
        """A fault point has been reached: a drill may want something to happen here."""
        if self.faults:
            self.faults.reach(point, step, stage=stage)

    def before_optimizer_step(self, optimizer: Any) -> None:
        """Inside the step that follows the finished ones."""
        self.check_code()
        self.before_change()
        if self.replay is not None:
            self.replay.goes_on()
        if self.faults:
            self.faults.reach("step", self.step + 1, optimizer=optimizer, step_s=self.durations.median_s)


current: Session | None = None
barrier: Barrier | None = None
"""In a process that runs its script before it is known which rank it is."""
code_check: Callable[[int], None] | None = None
"""Raises where the rank of this number has imported code of another version than its own; None: there is but one."""


def begin(given: dict[str, Any], environment: dict[str, str] | None = None) -> None:
    """Become the rank that `given` describes. Called once, by the launcher before the script or by `init()` in it.

    `environment`: import-time variables as they were before the script; None: it has not begun.
    """
    global current
    current = session = Session(given, import_time_environment() if environment is None else environment)
    session._show_phase()
    atexit.register(end)
    if "torch" in sys.modules:
        session.torch_is_there()
    session.fire("start")


def joined(what: str) -> Session | None:
    """The session, for a call that only a rank can make or that does nothing outside a job."""
    if barrier is not None:
        barrier.give_up(f"the script {what} before it calls evertrain.init()")
    return current


def end() -> None:
    """The script is over. Safe to call again."""
    session = current
    if session is not None and session._base not in ("exit", "failed"):
        session._declared.clear()
        if session.copier is not None:
            session.copier.wait() if session.failed else session.copier.finish()
        if session.replay is not None and not session.failed:
            session.replay.goes_on()
        session.at("failed" if session.failed else "exit")
        if session.failed:
            return  # a drill of the exit is meant for a script that has come to its end
        try:
            session.fire("exit")
        except SystemExit as leave:  # exceptions cannot change the exit code this late
            os._exit(leave.code if isinstance(leave.code, int) else 1)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)


def import_time_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(IMPORT_TIME)}


def _forget() -> None:
    global current, barrier
    current = barrier = None


os.register_at_fork(after_in_child=_forget)
