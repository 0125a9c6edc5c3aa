"""How does a rank keep its state, so that losing the process costs no step?

Inside `evertrain run`, `save` copies this rank's state into one of three slots in the node's shared memory, most of it
while the next step computes its gradients (`worker.copier`). The slots outlive the process; the controller picks the
newest step that all ranks have complete and `load` of the next attempt obeys it. When a job is stopped, its node writes
the newest common step to disk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from evertrain.worker import copier, directory, restore, rng, session, snapshot
from evertrain.worker.copier import Copier, Copy
from evertrain.worker.faults import InjectedFault
from evertrain.worker.rank_slots import AnotherState, NotNew, RankSlots, say, who
from evertrain.worker.shared_store import SharedStore
from evertrain.worker.slot_file import SlotDamaged
from evertrain.worker.slots import Part
from evertrain.worker.snapshot import SnapshotError, TensorPlace
from evertrain.worker.store_files import StoreDamaged, StoreError
from evertrain.worker.store_reader import StoredStep


class Stateful(Protocol):
    """Anything that gives its state and takes it back: modules, optimizers, schedulers, samplers."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class CheckpointError(RuntimeError):
    """A checkpoint that should be restored and cannot be."""


class CheckpointDamaged(CheckpointError):
    """No copy of the chosen step is whole on this node. Nothing that the script could have done better."""


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
        self._session = current = session.joined("makes a Checkpointer")
        self._failures = 0
        """Saves in a row that came to nothing."""
        self._beside = True
        """Whether optimizers' tensors are copied while training goes on."""
        self._repeats = 0
        self._replays = current is not None and current.replay is not None
        """Nothing is restored, and nothing is kept."""
        if self._replays:
            store = None
        self._store = SharedStore(store, store_every_s, store_every_steps, current) if store is not None else None
        if current is not None and current.copier is None and not self._replays:
            current.copier, current.slots = Copier(), RankSlots(current)

    def save(self, step: int) -> None:
        """Keep the state after `step` finished steps. When this returns, training may go on.

        Parameters and states of the optimizers in `state` are copied while the next step computes its gradients; the
        optimizers wait for that. All else is copied before this returns. Whoever changes parameters in another way
        first calls `wait()` or enters `evertrain.phase(...)`.

        A step whose reported loss is not finite is not kept. A save that fails never ends training: it says so on
        stderr, older checkpoints stay, and the next save tries again.
        """
        if self._session is None:
            if self._store is not None:
                self._save_outside(step, self._store)
            return
        current = self._session
        if current is not session.current:
            return  # a child that the rank has forked: the slots and the page are its parent's
        current.finished(step, time.monotonic())
        if current.replay is not None:
            current.replay.goes_on()
            return
        current.enter("save")
        try:
            self._copier.make_way()
            if current.loss_is_finite:
                self._save(step, current)
            else:
                self._tell(f"{who(current)}: the loss reported at step {step} is not finite; its state is not kept")
        except InjectedFault:
            raise
        except Exception as error:
            self._ended(step, error)
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
        if self._replays:
            self._session.restored(None)
            return None
        try:
            self._slots.claim(self._state)
        except AnotherState as error:
            raise CheckpointError(f"{who(self._session)}: {error}") from None
        self._copier.finish()
        step = self._load(self._session)
        self._slots.drop_newer_than(-1 if step is None else step)
        self._session.restored(step)
        return step

    def _load(self, current: session.Session) -> int | None:
        """From where the controller has said; where nobody knows of any step, as on new machines, the store may."""
        step = current.resume
        if step is not None and current.resume_tier == "store":
            if self._store is None:
                raise CheckpointError(
                    f"{who(current)}: training should go on from step {step} in {current.resume_folder}, but the "
                    f"Checkpointer was given no store"
                )
            self._put_back_stored(self._chosen_in(self._store, current.resume_folder))
        elif step is not None:
            self._restore(step, current, self._slots)
        elif self._store is not None and current.store_since is not None:
            stored = self._newest_in(self._store, current.store_since)
            if stored is not None:
                if current.rank == 0:
                    say(f"going on from step {stored.manifest.step}, the newest one in {stored.folder.url}")
                self._put_back_stored(stored)
                step = stored.manifest.step
        return step

    def wait(self) -> None:
        """Return when everything saved is complete, and has its checksums."""
        if self._session is not None and self._session is session.current and not self._replays:
            self._copier.finish()

    @property
    def _copier(self) -> Copier:
        assert self._session is not None and self._session.copier is not None
        return self._session.copier

    @property
    def _slots(self) -> RankSlots:
        assert self._session is not None and self._session.slots is not None
        return self._session.slots

    def _tell_repeated(self, step: int, current: session.Session, repeated: NotNew) -> None:
        """Said ever more rarely. What stays is as good, so nothing has failed."""
        self._repeats += 1
        if self._repeats.bit_count() == 1:
            times = f" ({self._repeats} times)" if self._repeats > 1 else ""
            say(f"{who(current)}: step {step} is not kept: {repeated}{times}")

    def _tell(self, line: str) -> None:
        """What holds for every step from now on is said ever more rarely."""
        self._failures += 1
        if self._failures.bit_count() == 1:
            say(line if self._failures == 1 else f"{line} ({self._failures} in a row)")

    def _ended(self, step: int, problem: Exception | None) -> None:
        """A save has come to its end, in whichever thread."""
        current = self._session
        assert current is not None
        if problem is None:
            self._failures = 0
            current.page.saves_failed = 0
            return
        current.page.saves_failed += 1
        current.page.write()
        if isinstance(problem, copier.Changed):
            self._beside = False
            self._tell(
                f"{who(current)}: step {step} is not kept, because {problem} was changed after save() and before the "
                f"next optimizer step; call wait() before you change it, or do it inside evertrain.phase(...). From "
                f"now on save() copies all state before it returns, which takes longer"
            )
        else:
            self._tell(f"{who(current)} could not save step {step}: {problem}; the next save tries again")

    # -- the shared store ----------------------------------------------------------------------------------------------

    def _save_outside(self, step: int, store: SharedStore) -> None:
        try:
            states = self._states()
            store.save(step, snapshot.take(states), directory.names(states, self._state))
            self._failures = 0
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
            raise self._refused(error) from error

    def _refused(self, error: StoreError) -> CheckpointError:
        """A damaged step is replaced by who has chosen it: the controller, else the user."""
        chosen = self._session is not None and self._session.resume_tier == "store"
        damaged = isinstance(error, StoreDamaged) or isinstance(error.__cause__, FileNotFoundError)
        return CheckpointDamaged(str(error)) if chosen and damaged else CheckpointError(str(error))

    def _put_back_stored(self, stored: StoredStep) -> None:
        """From the store: what this rank saved, or its part of what others did."""
        assert self._store is not None
        step = stored.manifest.step
        try:
            exact = self._store.exact(stored, self._state)
            if exact is None:
                rng.restore(self._store.spread(stored, self._state, aside=restore.RNG))
                return
            entries, tensors = exact

            def copy_out(targets: Mapping[int, Tensor]) -> None:
                for number, target in targets.items():
                    target.copy_(tensors[number])

            self._put_back(step, entries, tensors, copy_out)
        except StoreError as error:
            raise self._refused(error) from error
        except (SnapshotError, RuntimeError, ValueError, KeyError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"the checkpoint of step {step} in {stored.folder.url} does not fit: {error}"
            ) from error

    # -- slots ---------------------------------------------------------------------------------------------------------

    def _states(self) -> dict[str, Any]:
        state = {name: snapshot.state_of(value) for name, value in self._state.items()}
        return {**state, restore.RNG: rng.capture()}

    def _save(self, step: int, current: session.Session) -> None:
        slots = self._slots
        slots.claim(self._state)
        try:
            slots.see_that_it_is_new(step)
        except NotNew as repeated:
            self._tell_repeated(step, current, repeated)
            return
        states = self._states()
        taken = snapshot.take(states)

        def describe(places: Sequence[TensorPlace], parts: Sequence[Part]) -> bytes:
            known = directory.names(states, self._state)
            store = self._store.settings if self._store is not None else None
            return directory.of_snapshot(taken, places, parts, known, store)

        def reach(stage: str) -> None:
            current.fire("save", step, stage)

        slot = slots.begin(step, taken, describe)
        current.fire("save", step)
        late = copier.hidden(taken, self._state.values()) if self._goes_beside(current) else []
        copy = Copy(
            slot, taken, late or range(len(taken.tensors)), lambda problem: self._ended(step, problem),
            reach if current.faults else None, beside=bool(late),
        )  # fmt: skip
        if late:
            self._copier.start(copy)
        else:
            self._copier.run(copy)

    def _goes_beside(self, current: session.Session) -> bool:
        unseen = [name for name, value in self._state.items() if _steps(value) and not copier.is_seen(value)]
        if self._beside and unseen:
            self._beside = False
            say(
                f"{who(current)}: the steps of {', '.join(map(repr, unseen))} cannot be seen, as it is no "
                f"torch.optim.Optimizer whose hooks are called; save() copies all state before it returns"
            )
        return self._beside

    def _restore(self, step: int, current: session.Session, kept: RankSlots) -> None:
        reasons: list[str] = []
        for saved in kept.copies(step, reasons):
            try:
                self._put_back(step, saved.entries, saved.tensors, saved.copy_out)
                return
            except SlotDamaged as damage:
                kept.condemn(saved.path, saved.header, damage, reasons)
        raise CheckpointDamaged(
            f"{who(current)}: training should go on from step {step}, but there is no whole copy of it in "
            f"{kept.where()}" + "".join(f"; {reason}" for reason in reasons)
        )

    def _put_back(
        self, step: int, entries: Mapping[str, bytes], tensors: Sequence[Tensor], copy_out: restore.CopyOut
    ) -> None:
        try:
            restore.put_back(self._state, entries, tensors, copy_out)
        except restore.Misfit as misfit:
            raise CheckpointError(f"the checkpoint of step {step} does not fit: {misfit}") from misfit


def _steps(value: Any) -> bool:
    """Is this an optimizer of any kind?"""
    return hasattr(value, "param_groups") and callable(getattr(value, "step", None))
