"""Evertrain keeps distributed PyTorch training running. This is what a training script imports.

    job = evertrain.init()                                    # what this rank should know; None outside a job
    checkpointer = evertrain.Checkpointer({"model": model, "optimizer": optimizer})
    step = checkpointer.load() or 0
    evertrain.settle(model, batch)                            # restarts of DDP become bit-identical
    ...
    evertrain.report(step=step, loss=loss)
    checkpointer.save(step)

Nothing is loaded before it is used, and nothing here is needed: a script without it is restarted too.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from evertrain.worker.api import JobInfo, init, phase, report
    from evertrain.worker.checkpointer import Checkpointer
    from evertrain.worker.loader import ResumableLoader
    from evertrain.worker.replay import ReplayConfig, replay_config
    from evertrain.worker.settle import settle

__all__ = [
    "Checkpointer", "JobInfo", "ReplayConfig", "ResumableLoader", "init", "phase", "replay_config", "report", "settle",
]  # fmt: skip

_HOME = {
    "Checkpointer": "evertrain.worker.checkpointer",
    "JobInfo": "evertrain.worker.api",
    "ReplayConfig": "evertrain.worker.replay",
    "ResumableLoader": "evertrain.worker.loader",
    "init": "evertrain.worker.api",
    "phase": "evertrain.worker.api",
    "replay_config": "evertrain.worker.replay",
    "report": "evertrain.worker.api",
    "settle": "evertrain.worker.settle",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
