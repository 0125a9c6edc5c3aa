"""Is this run a replay, and what did it give? What a script asks, and the digest that all groups must agree on.

    reports ─▶ their bits ─┐
    optimizer steps ───────┤ in the order of the program
    the last of them ─▶ bits of all parameters ─▶ the first report, save, phase or step after it, or the end ─▶ digest

Groups of nodes replay the job with the same seed and batches (`decide.replaying`), so healthy ones agree bit by bit.
The digest of each rank goes into a file beside its page; whatever the script does after that, nobody waits for.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

from evertrain.worker import page, session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from typing import Any, SupportsFloat

FAULT = "EVERTRAIN_REPLAY_FAULT"
"""Makes a node compute wrongly in the job's own script, in drills: see `diagnose.fault`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayConfig:
    """How this script is to run because it is being replayed."""

    layers: int | None
    """So many layers is the model to have; None: all of its own."""
    dp: int
    """Replicas of the model in this group: the data-parallel size. All other parallel sizes are the job's own."""
    steps: int
    """So many steps are enough."""
    from_step: int | None
    """Train on the batches of the steps after this one; None: on the first ones."""
    seed: int
    """The same in all groups, for whatever the script draws by chance."""


def replay_config() -> ReplayConfig | None:
    """What a script should know about the replay that it is part of; None: this is no replay, but training itself.

    A script that asks for this takes part in replays, the last thing that is tried when the numbers of a job are wrong
    and nobody knows why: groups of its nodes run it again, and the node at which those groups meet that give other bits
    than the rest is taken out. For that it has to

    - build its model with `layers`, where that is given,
    - take sizes from the process group as it is: `WORLD_SIZE` is that of the group, and `dp` the size that changes,
    - draw seeds and batches by rank and by the position in the data *inside* the group, as with any world size,
    - write no results of its own: a replay is ended when its steps are done.

    Losses and gradient norms that `report` is told and the parameters of all `torch.optim` optimizers are compared by
    themselves. `Checkpointer.load()` restores nothing in a replay, and `save()` saves nothing. Random generators begin
    with the seed, and PyTorch's deterministic algorithms are on, as far as there are any. On a standby that runs ahead
    of its start it waits as `init()` does.
    """
    if session.barrier is not None:
        session.barrier.wait()
    current = session.current
    if current is None:
        return None
    if current.replay is not None:
        return current.replay.config
    if not current.page.flags & page.TAKES_REPLAYS:
        current.page.flags |= page.TAKES_REPLAYS
        current.page.write()
    return None


class Recorder:
    """What one rank does in a replay, in the order in which the script does it."""

    def __init__(self, given: dict[str, Any]) -> None:
        import hashlib

        self.config = ReplayConfig(**given["config"])
        self._path: str = given["result"]
        self._hash = hashlib.sha256()
        self._optimizers: list[Any] = []
        self._steps = 0
        self._by_report: int | None = None
        self._is_over = False

    def reported(self, step: int | None, loss: SupportsFloat | None, grad_norm: SupportsFloat | None) -> None:
        """Evaluations count as well: they are part of the program."""
        if self._is_over:
            return
        for name, value in ((b"loss", loss), (b"norm", grad_norm)):
            if value is not None:
                self._hash.update(name + struct.pack("<d", page.number(value)))
        if not self._optimizers and step is not None and step != self._by_report:
            # no optimizer can be seen
            self._by_report = step
            self._steps += 1
        self.goes_on()

    def stepped(self, optimizer: Any, *, finishes: bool) -> None:
        """An optimizer has stepped; whether that finishes a step of training."""
        if self._is_over:
            return
        if not any(one is optimizer for one in self._optimizers):
            self._optimizers.append(optimizer)
        if finishes:
            self._steps += 1
            self._hash.update(b"step")

    def goes_on(self) -> None:
        """The script has come to something after its last step: all that belongs to that has been said."""
        if self._is_over or self._steps < self.config.steps:
            return
        self._is_over = True
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._hash.update(bits_of(parameter))
        fresh = f"{self._path}.new"
        with open(fresh, "w") as file:
            file.write(self._hash.hexdigest())
        os.replace(fresh, self._path)


def bits_of(tensor: Any) -> bytes:
    """The content of a tensor, of a DTensor its part on this rank."""
    import ctypes

    local = tensor.detach()
    if hasattr(local, "to_local"):
        local = local.to_local()
    local = (local.to_dense() if local.is_sparse else local).cpu().contiguous()
    return ctypes.string_at(local.data_ptr(), local.numel() * local.element_size()) if local.numel() else b""


def be_repeatable(seed: int) -> None:
    """What a script draws by chance without a seed of its own, and kernels of which there are several."""
    import random

    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed % 2**32)


class Drill:
    """Flips a bit of a matrix product in every step, where a drill wants it."""

    def __init__(self, current: session.Session, faults: str) -> None:
        from evertrain.diagnose import fault

        try:
            known = fault.parse(faults, FAULT)
        except ValueError as error:
            raise SystemExit(f"evertrain: {error}") from None
        place, run = (current.node, current.local_rank), str(current.attempt)
        self._drawn = [one for one in known if (one.node, one.rank) == place and one.is_drawn(run)]
        self._running: list[AbstractContextManager[object]] = []

    def begin(self) -> None:
        """Torch has been imported."""
        from evertrain.diagnose import fault

        self._running = [fault.flipping(one) for one in self._drawn]
        for one in self._running:
            one.__enter__()

    def stepped(self) -> None:
        for one in self._running:
            one.seen = 0  # type: ignore[attr-defined]
