"""How does a save go on while training does? A thread copies what only an optimizer changes, beside the next step.

    training   save(t) │ forward, backward of t+1            │ wait │ optimizer step t+1 │ save(t+1)
    copier             │ copy ──────────────────→ commit │ checksums, until the next save comes

`save` returns when all other state is copied. The next optimizer step waits for this rank's own copy; so does
whatever else may change the state: the next save, a load, a declared phase, the end of the script.

The copy must be what the state was at `save`. Others than the optimizer may change it all the same (averaged weights
swapped in for an evaluation): each tensor's version counter tells, and for writes that go around it (`.data`) a few
elements put aside at `save` do. Such a save is not committed.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evertrain.worker import gpu_copy, hooks
from evertrain.worker.slot_file import SlotFile
from evertrain.worker.snapshot import Snapshot, local

THREAD = "evertrain-copier"
_CANARIES = 16
_ELEMENTS = 4

Fire = Callable[[str], None]
"""Reaches a stage of a save at which a drill may want something to happen: copying, copied, committed."""


class Changed(Exception):
    """State that was changed while it was copied; the text is the name of a tensor."""


class _Canary(NamedTuple):
    """A few elements of a tensor, as they were at `save`."""

    at: int
    elements: Tensor


class Copy:
    """One save on its way into its slot.

    Once this has been made, all but the `late` tensors of the snapshot is in the slot; `run` does the rest.
    """

    def __init__(
        self,
        slot: SlotFile,
        taken: Snapshot,
        late: Sequence[int],
        ended: Callable[[Exception | None], None],
        fire: Fire | None = None,
        *,
        beside: bool,
    ) -> None:
        self._slot = slot
        self._ended = ended
        self._fire = fire
        later = set(late)
        early = [at for at in range(len(taken.tensors)) if at not in later]
        if early:
            torch._foreach_copy_([slot.views[at] for at in early], [taken.tensors[at] for at in early])
        self._late = late
        self._sources = [taken.tensors[at] for at in late]
        self._targets = [slot.views[at] for at in late]
        self._gpus = gpu_copy.prepare(self._sources, slot)
        self._watched: list[tuple[int, Tensor, int]] = []
        self._canaries: list[_Canary] = []
        if beside:
            # writes to a DTensor count there, writes to its shard here
            both = ((at, tensor) for at in late for tensor in (taken.tensors[at], taken.wholes[at]))
            self._watched = [(at, tensor, tensor._version) for at, tensor in both]
            self._canaries = _put_aside(self._sources, self._targets)
        self._looking = threading.Lock()
        self._looked = False
        self._changed: int | None = None

    def run(self, issued: Callable[[], None]) -> None:
        """Copy, commit, and say how it ended; `issued` is called when GPUs have been told all that is to be copied."""
        problem: Exception | None = None
        try:
            self._copy(issued)
            self._look()
            if self._changed is None:
                self._changed = self._changed_around_the_counters()
            if self._changed is not None:
                raise Changed(self._slot.names()[self._changed])
            self._reach("copied")
            self._slot.commit()
            self._reach("committed")
        except Exception as error:
            problem = error
        # the next save may not keep twice the state alive
        self._sources, self._watched, self._canaries = [], [], []
        self._ended(problem)

    def order(self) -> None:
        """Called in the thread that is about to change the state, once all is issued."""
        for gpu in self._gpus:
            gpu.order()
        self._look()

    def seal(self, hurry: Callable[[], bool]) -> None:
        """Checksums of what was committed, given up in a hurry."""
        self._slot.seal(hurry)

    def _copy(self, issued: Callable[[], None]) -> None:
        for gpu in self._gpus:
            gpu.start(self._targets, self._sources)
        rest = [at for at, source in enumerate(self._sources) if source.device.type != "cuda"]
        # one call for many tensors: the interpreter's lock is free meanwhile
        half = 0 if self._fire is None else len(rest) // 2
        self._copy_these(rest[:half])
        self._reach("copying")
        self._copy_these(rest[half:])
        issued()
        for gpu in self._gpus:
            gpu.finish()

    def _copy_these(self, some: Sequence[int]) -> None:
        if some:
            torch._foreach_copy_([self._targets[at] for at in some], [self._sources[at] for at in some])

    def _reach(self, stage: str) -> None:
        if self._fire is not None:
            self._fire(stage)

    def _look(self) -> None:
        """Have the counters moved? Looked at once, by whoever comes first: afterwards the optimizer may move them."""
        with self._looking:
            if not self._looked:
                self._looked = True
                moved = (at for at, tensor, version in self._watched if tensor._version != version)
                self._changed = next(moved, None)

    def _changed_around_the_counters(self) -> int | None:
        for at, elements in self._canaries:
            if not _same_bits(elements, _some_of(self._targets[at])):
                return self._late[at]
        return None


class Copier:
    """The thread, and what the others wait for. One a process; the thread begins with the first copy."""

    def __init__(self) -> None:
        self._moved = threading.Condition()
        self._copy: Copy | None = None
        """The one that is not finished yet."""
        self._issued = False
        self._to_seal: Copy | None = None
        self._sealing = False
        self._hurry = False
        self._thread: threading.Thread | None = None

    def start(self, copy: Copy) -> None:
        """Run a copy in the thread. The one before has been waited for."""
        with self._moved:
            self._copy, self._issued, self._to_seal, self._hurry = copy, False, copy, False
            self._moved.notify_all()
        self._begin()

    def run(self, copy: Copy) -> None:
        """Run a copy here and now; its checksums still come in the thread."""
        copy.run(lambda: None)
        with self._moved:
            self._to_seal, self._hurry = copy, False
            self._moved.notify_all()
        self._begin()

    def before_change(self) -> None:
        """The calling thread is about to change state: wait until that does no harm to the copy."""
        if self._copy is not None:
            with self._moved:
                self._moved.wait_for(lambda: self._copy is None or self._issued)
                copy = self._copy
            if copy is not None:
                copy.order()

    def wait(self) -> None:
        """Return when nothing is left to copy."""
        if self._copy is not None:
            with self._moved:
                self._moved.wait_for(lambda: self._copy is None)

    def make_way(self) -> None:
        """The same, and checksums are given up for the save that is about to begin."""
        self._hurry = True
        self.wait()

    def finish(self) -> None:
        """Return when nothing is left to copy, and the checksums of the last copy are there."""
        with self._moved:
            self._hurry = False
            self._moved.wait_for(lambda: self._copy is None and self._to_seal is None and not self._sealing)

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._moved:
                self._moved.wait_for(lambda: self._copy is not None or self._to_seal is not None)
                copy = self._copy
            if copy is not None:
                _survive(partial(copy.run, self._is_issued))
                with self._moved:
                    self._copy = None
                    self._moved.notify_all()
            with self._moved:
                copy, self._to_seal, self._sealing = self._to_seal, None, True
            if copy is not None:
                _survive(partial(copy.seal, self._is_wanted))
            with self._moved:
                self._sealing = False
                self._moved.notify_all()

    def _is_wanted(self) -> bool:
        return self._hurry or self._copy is not None

    def _is_issued(self) -> None:
        with self._moved:
            self._issued = True
            self._moved.notify_all()


def _survive(work: Callable[[], None]) -> None:
    """An optimizer waits for the thread, so nothing may end it: neither an error, nor that it cannot be told."""
    try:
        work()
    except Exception:
        with suppress(Exception):
            traceback.print_exc()


def hidden(taken: Snapshot, live: Iterable[Any]) -> list[int]:
    """Which tensors of a snapshot may be copied late: parameters and states of optimizers whose steps we see."""
    owned: set[tuple[torch.device, int, int] | None] = set()
    for optimizer in live:
        if isinstance(optimizer, torch.optim.Optimizer) and is_seen(optimizer):
            owned.update(_memory(tensor) for group in optimizer.param_groups for tensor in group["params"])
            owned.update(
                _memory(value)
                for state in optimizer.state.values()
                if isinstance(state, Mapping)
                for value in state.values()
                if isinstance(value, Tensor)
            )
    owned.discard(None)
    return [at for at, tensor in enumerate(taken.tensors) if not tensor.is_inference() and _memory(tensor) in owned]


def is_seen(optimizer: Any) -> bool:
    """Does our hook run before each step of this optimizer?"""
    # torch marks the `step` of each class whose optimizers call the hooks
    known = isinstance(optimizer, torch.optim.Optimizer) and hasattr(type(optimizer).step, "hooked")
    return known and hooks.installed()


def _memory(tensor: Tensor) -> tuple[torch.device, int, int] | None:
    """What the state that a model gives has in common with the parameter itself: the place in memory."""
    own = local(tensor)
    # sparse ones have no place in memory
    has_place = own.layout is torch.strided and own.numel() > 0
    return (own.device, own.data_ptr(), own.numel()) if has_place else None


def _put_aside(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> list[_Canary]:
    """Elements of the largest tensors, and of the last one, which is copied last."""
    able = [at for at, (one, other) in enumerate(zip(sources, targets, strict=True)) if one.stride() == other.stride()]
    largest = sorted(able, key=lambda at: sources[at].numel(), reverse=True)[: _CANARIES - 1]
    return [_Canary(at, _some_of(sources[at]).clone()) for at in {*largest, *able[-1:]}]


def _some_of(tensor: Tensor) -> Tensor:
    """Elements at even distances, in the order of memory, which is dense."""
    apart = max(1, tensor.numel() // _ELEMENTS)
    return tensor.as_strided((min(_ELEMENTS, tensor.numel()),), (apart,), tensor.storage_offset())


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.cpu().view(torch.uint8), other.contiguous().view(torch.uint8))
