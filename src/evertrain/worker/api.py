"""What may a training script say to Evertrain, and ask of it? The small calls; all of them do nothing outside a job.

`evertrain/__init__.py` hands these out, with `settle` and `Checkpointer`, which have modules of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import SupportsFloat

from evertrain.worker import session


@dataclass(frozen=True, kw_only=True, slots=True)
class JobInfo:
    """This rank's place in its job."""

    job: str
    attempt: int
    """Counts the starts of the job, from 1; negative in a replay."""
    restart: bool
    """Whether an earlier attempt of this job has run before."""
    resume_step: int | None
    """The step that `Checkpointer.load()` will restore; None if training begins."""
    rank: int
    local_rank: int
    world_size: int
    node: str


def init() -> JobInfo | None:
    """Say which job this rank belongs to, or None if `evertrain run` did not start it.

    Asks nobody and waits for nobody: the rank was told everything at its start. Call it as often and wherever you
    like; nothing needs it to have been called. On a standby with `--standby-barrier init` the first call waits until
    the node takes over ranks.
    """
    if session.barrier is not None:
        session.barrier.wait()
    current = session.current
    if current is None:
        return None
    current.check_code()
    return JobInfo(
        job=current.job,
        attempt=current.attempt,
        restart=current.restart,
        resume_step=current.resume,
        rank=current.rank,
        local_rank=current.local_rank,
        world_size=current.world_size,
        node=current.node,
    )


def report(
    step: int | None = None,
    loss: SupportsFloat | None = None,
    grad_norm: SupportsFloat | None = None,
    tokens: SupportsFloat | None = None,
    **metrics: SupportsFloat,
) -> None:
    """Tell how training goes. A report shows up in `evertrain status`, counts as a sign of life, and never blocks.

    `step` names the step that has just been finished, and makes this job's steps absolute: after a restart Evertrain
    knows from it when training has passed the point where it was. A loss that is not finite keeps the checkpoint of
    its step from being used. `tokens` are those that this rank has trained on since its last report; where they are
    known, the weighted ETTR goes by tokens a second and not by steps. Of `metrics`, eight are kept. A tensor is read
    with `float()`; on a GPU that waits for it, so report a tensor only as often as you would print it.

    Takes a few microseconds, and nothing at all outside `evertrain run`.
    """
    current = session.joined("reports")
    if current is not None:
        current.report(step, loss, grad_norm, tokens, metrics)


class phase:  # reads as a statement: `with evertrain.phase("evaluate"):`
    """Declare what the script is doing while it makes no steps, so that it is not taken for hung.

    with evertrain.phase("evaluate"):
        evaluate(model)

    The name is yours; `evaluate` and `save` are also points where a drill can inject a fault. Phases nest: leaving
    the inner one returns to the outer one. Inside, parameters may be changed: what a save had still to copy of them is
    copied. Outside `evertrain run` nothing happens.
    """

    __slots__ = ("_name", "_session")

    def __init__(self, name: str) -> None:
        self._name = name
        self._session: session.Session | None = None

    def __enter__(self) -> None:
        self._session = current = session.joined(f"declares the phase {self._name!r}")
        if current is not None:
            current.before_change()
            current.enter(self._name)
            if self._name in ("evaluate", "save"):
                current.fire(self._name, current.step)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None and self._session is session.current:
            self._session.leave()
