"""How does a rank keep its state, so that losing the process costs no step?

Inside `evertrain run`, `save` copies this rank's state into one of three slots in the node's shared memory. The slots
outlive the process; the controller picks the newest step that all ranks have complete and `load` of the next attempt
obeys it. When a job is stopped, its node writes the newest common step to disk.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from evertrain.worker import directory, pins, rng, room, session, slots, snapshot
from evertrain.worker.faults import InjectedFault
from evertrain.worker.shared_store import SharedStore
from evertrain.worker.slot_file import Describe, SlotDamaged, SlotFile, file_bytes, open_slot
from evertrain.worker.slots import Part
from evertrain.worker.snapshot import Snapshot, SnapshotError, TensorPlace
from evertrain.worker.store_files import StoreError
from evertrain.worker.store_reader import StoredStep

_RNG = "random number generators"


class Stateful(Protocol):
    """Anything that gives its state and takes it back: modules, optimizers, schedulers, samplers."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class CheckpointError(RuntimeError):
    """A checkpoint that should be restored and cannot be."""


class Checkpointer:
    """Saves and restores the state of this rank.

    `state` maps names of your choice to tensors and to objects with `state_dict()` and `load_state_dict()`. The
    states of the random number generators (`random`, NumPy, torch, CUDA) are always part of it. Shards of FSDP2 and
    other DTensors stay shards: each rank saves and restores its own.

    Inside `evertrain run` checkpoints live in the node's memory, and on its disk where memory is too small. Every
    `store_every_s` seconds, or every `store_every_steps` steps, the nodes write one to `store` as well: a folder that
    all nodes see, or a URL that fsspec knows, in PyTorch's Distributed Checkpoint format. It is where a job goes on
    from when all else is gone, and with another number of ranks.

    Elsewhere `save` itself writes to `store` (each time, or every `store_every_steps` steps), where the last three
    steps are kept; without `store` nothing is saved and `load` finds nothing.
    """

    def __init__(
        self,
        state: Mapping[str, Tensor | Stateful],
        store: str | os.PathLike[str] | None = None,
        *,
        store_every_s: float = 1800.0,
        store_every_steps: int | None = None,
    ) -> None:
        for name, value in state.items():
            if not isinstance(value, Tensor) and not (
                callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
            ):
                raise TypeError(
                    f"state[{name!r}] is {type(value).__name__}; a Checkpointer takes tensors and objects with "
                    f"state_dict() and load_state_dict()"
                )
        self._state = dict(state)
        self._session = session.current
        self._not_kept = 0
        """Steps in a row."""
        self._slots = _Slots(self._session) if self._session is not None else None
        self._store = SharedStore(store, store_every_s, store_every_steps, self._session) if store is not None else None

    def save(self, step: int) -> None:
        """Keep the state after `step` finished steps. When this returns, the state may change again.

        A step whose reported loss is not finite is not kept. A save that fails never ends training: it says so on
        stderr, older checkpoints stay, and the next save tries again.
        """
        if self._session is None:
            if self._store is not None:
                self._save_outside(step, self._store)
            return
        current = self._session
        current.finished(step, time.monotonic())
        current.enter("save")
        try:
            if current.loss_is_finite:
                self._save(step, current)
                self._not_kept = 0
            else:
                self._tell(f"{_who(current)}: the loss reported at step {step} is not finite; its state is not kept")
        except InjectedFault:
            raise
        except Exception as error:
            self._tell(f"{_who(current)} could not save step {step}: {error}; the next save tries again")
        finally:
            current.leave()

    def load(self) -> int | None:
        """Restore the state that training should go on from; returns its step, or None to begin from the start.

        Inside `evertrain run` the controller has chosen the step, the same for all ranks: nothing is communicated
        here. Raises CheckpointError, and never silently begins anew, if the chosen step is not here and whole.
        """
        if self._session is None:
            stored = self._newest_in(self._store, 0.0) if self._store is not None else None
            if stored is None:
                return None
            self._put_back_stored(stored)
            return stored.manifest.step
        assert self._slots is not None
        resume = self._session.resume
        if resume is not None and self._session.resume_tier == "store":
            if self._store is None:
                raise CheckpointError(
                    f"{_who(self._session)}: training should go on from step {resume} in "
                    f"{self._session.resume_folder}, but the Checkpointer was given no store"
                )
            self._put_back_stored(self._chosen_in(self._store, self._session.resume_folder))
        elif resume is not None:
            self._put_back(resume, *self._slots.find(resume))
        elif self._store is not None and self._session.store_since is not None:
            # nobody knows of any step, as on new machines: the store may
            stored = self._newest_in(self._store, self._session.store_since)
            if stored is not None:
                if self._session.rank == 0:
                    _say(f"going on from step {stored.manifest.step}, the newest one in {stored.folder.url}")
                self._put_back_stored(stored)
                resume = stored.manifest.step
        self._slots.drop_newer_than(-1 if resume is None else resume)
        self._session.restored(resume)
        return resume

    def wait(self) -> None:
        """Return when everything saved is safe. Saves are complete when `save` returns, so this is now."""

    def _tell(self, line: str) -> None:
        """What holds for every step from now on is said ever more rarely."""
        self._not_kept += 1
        if self._not_kept.bit_count() == 1:
            _say(line if self._not_kept == 1 else f"{line} ({self._not_kept} in a row)")

    def _save_outside(self, step: int, store: SharedStore) -> None:
        try:
            states = self._states()
            store.save(step, snapshot.take(states), directory.names(states, self._state))
            self._not_kept = 0
        except Exception as error:
            self._tell(f"rank {os.environ.get('RANK', '0')} could not save step {step}: {error}")

    def _newest_in(self, store: SharedStore, since: float) -> StoredStep | None:
        try:
            return store.newest(since)
        except StoreError as error:
            raise CheckpointError(f"whether there is a step to go on from cannot be said: {error}") from error

    def _chosen_in(self, store: SharedStore, folder: str) -> StoredStep:
        try:
            return store.chosen(folder)
        except StoreError as error:
            raise CheckpointError(str(error)) from error

    def _put_back_stored(self, stored: StoredStep) -> None:
        """From the store: what this rank saved, or its part of what others did."""
        assert self._store is not None
        step = stored.manifest.step
        try:
            exact = self._store.exact(stored, self._state)
            if exact is not None:
                self._put_back(step, *exact)
            else:
                rng.restore(self._store.spread(stored, self._state, aside=_RNG))
        except StoreError as error:
            raise CheckpointError(str(error)) from error
        except (SnapshotError, RuntimeError, ValueError, KeyError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"the checkpoint of step {step} in {stored.folder.url} does not fit: {error}"
            ) from error

    def _states(self) -> dict[str, Any]:
        state = {name: snapshot.state_of(value) for name, value in self._state.items()}
        return {**state, _RNG: rng.capture()}

    def _save(self, step: int, current: session.Session) -> None:
        assert self._slots is not None
        states = self._states()
        taken = snapshot.take(states)

        def describe(places: Sequence[TensorPlace], parts: Sequence[Part]) -> bytes:
            known = directory.names(states, self._state)
            store = self._store.settings if self._store is not None else None
            return directory.of_snapshot(taken, places, parts, known, store)

        slot = self._slots.write(step, taken, describe)
        current.fire("save", step)
        slot.commit()
        slot.seal()

    def _put_back(self, step: int, entries: dict[str, bytes], tensors: list[Tensor]) -> None:
        if missing := self._state.keys() - entries.keys():
            raise CheckpointError(f"the checkpoint of step {step} has no {', '.join(map(repr, sorted(missing)))}")
        if unknown := entries.keys() - self._state.keys() - {_RNG}:
            raise CheckpointError(
                f"the checkpoint of step {step} has {', '.join(map(repr, sorted(unknown)))}, which the Checkpointer "
                f"was not given"
            )
        meshes = snapshot.live_meshes(self._state.values())
        for name, value in self._state.items():
            try:
                snapshot.put_back(name, value, entries[name], tensors, meshes)
            except (SnapshotError, RuntimeError, ValueError, KeyError) as error:
                raise CheckpointError(f"state[{name!r}] does not fit the checkpoint of step {step}: {error}") from error
        rng.restore(snapshot.rebuild(entries[_RNG], tensors, meshes, copy=True))


class _Slots:
    """This rank's slots: in memory, or on disk when memory is too small."""

    def __init__(self, current: session.Session) -> None:
        self._session = current
        self._in_memory = os.path.join(current.slots_dir, f"r{current.rank}")
        self._on_disk = os.path.join(current.disk_dir, "slots", f"r{current.rank}")
        self._files: list[SlotFile] = []
        self._pins = pins.NOTHING

    def write(self, step: int, taken: Snapshot, describe: Describe) -> SlotFile:
        """Copy a snapshot into the slot whose turn it is; the caller commits it."""
        if not self._files:
            size = sum(tensor.numel() * tensor.element_size() for tensor in taken.tensors)
            self._files = self._place(file_bytes(size + sum(map(len, taken.entries.values()))))
        current = self._session
        own = [file.header for file in self._files]
        kept = slots.newest_in_common(own, current.slots_dir, current.rank)
        pinned = self._pinned(own)
        index = slots.slot_to_overwrite(own, kept, pinned)
        if index is None and len(own) < slots.MOST_SLOTS:
            index = len(own)
            self._files.append(SlotFile(os.path.join(os.path.dirname(self._files[0].path), str(index))))
        if index is None:
            index = slots.slot_to_overwrite(own, kept)
        assert index is not None
        slot = self._files[index]
        header = slots.SlotHeader(
            slots.WRITING, current.job, current.term, current.attempt, current.rank, current.world_size, step,
            time.time(),
        )  # fmt: skip
        try:
            slot.begin(header, taken, describe)
            torch._foreach_copy_(slot.views, taken.tensors)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or slot.path.startswith(self._on_disk):
                raise
            self._files = self._move_to_disk(str(error))
            return self.write(step, taken, describe)
        return slot

    def _pinned(self, own: Sequence[slots.SlotHeader | None]) -> frozenset[slots.Save]:
        """What this node's agent wants kept; while that cannot be read, what it wanted before."""
        self._pins = pins.read(self._session.slots_dir) or self._pins
        return self._pins.of(save for save in map(slots.save_in, own) if save is not None)

    def find(self, step: int) -> tuple[dict[str, bytes], list[Tensor]]:
        """The content of the chosen step, from the tier that the controller saw it in, else from any."""
        reasons = []
        for path in self._copies_of(step):
            header = slots.read(path)
            if header is None or header.state != slots.COMPLETE:
                reasons.append(f"{path} is damaged or incomplete")
            elif header.world_size != self._session.world_size:
                reasons.append(
                    f"{path} was saved by {header.world_size} ranks, now there are {self._session.world_size}"
                )
            else:
                try:
                    return open_slot(path, header)
                except SlotDamaged as damage:
                    reasons.append(f"{path}: {damage}")
        where = " and ".join((self._in_memory, self._session.disk_dir))
        raise CheckpointError(
            f"{_who(self._session)}: training should go on from step {step}, but there is no whole copy of it in "
            f"{where}" + "".join(f"; {reason}" for reason in reasons)
        )

    def _copies_of(self, step: int) -> list[str]:
        memory = [path for path in _slot_paths(self._in_memory) if _holds(path, step)]
        disk = [path for path in _slot_paths(self._on_disk) if _holds(path, step)]
        flushed = slots.flushed_path(self._session.disk_dir, step, self._session.rank)
        if os.path.exists(flushed):
            disk.append(flushed)
        return disk + memory if self._session.resume_tier == "disk" else memory + disk

    def drop_newer_than(self, step: int) -> None:
        """Steps after the one that training goes on from belong to a past that did not happen."""
        for folder in (self._in_memory, self._on_disk):
            for path in _slot_paths(folder):
                file = SlotFile(path)
                if file.header is not None and file.header.step > step:
                    file.clear()
        self._files = []

    def _place(self, each: int) -> list[SlotFile]:
        files = [SlotFile(path) for path in _slot_paths(self._in_memory)]
        present = sum(file.size for file in files)
        wanted = max(0, slots.SLOTS * each - present) * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        os.makedirs(self._session.slots_dir, mode=0o700, exist_ok=True)
        free = room.free_bytes(self._session.slots_dir)
        if wanted <= room.FRACTION * free:
            return files
        return self._move_to_disk(f"{wanted:,} bytes more of shared memory are needed on this node, {free:,} are free")

    def _move_to_disk(self, reason: str) -> list[SlotFile]:
        _say(f"{_who(self._session)}: {reason}; checkpoints go to {self._on_disk} instead, which is slower")
        return [SlotFile(path) for path in _slot_paths(self._on_disk)]


def _slot_paths(folder: str) -> list[str]:
    """Those that every rank has, and those that pins have made necessary."""
    more = [str(index) for index in range(slots.SLOTS, slots.MOST_SLOTS)]
    extra = [name for name in more if os.path.exists(os.path.join(folder, name))]
    return [os.path.join(folder, name) for name in (*map(str, range(slots.SLOTS)), *extra)]


def _holds(path: str, step: int) -> bool:
    header = slots.read(path)
    return header is not None and header.step == step


def _who(current: session.Session) -> str:
    return f"rank {current.rank} on {current.node}"


def _say(text: str) -> None:
    print(f"evertrain: {text}", file=sys.stderr, flush=True)
