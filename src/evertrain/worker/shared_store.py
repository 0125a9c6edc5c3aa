"""What does a rank itself do with the shared store?

Inside `evertrain run` it only says where the store is: its node writes to it, and the controller commits. It reads
from it where it is told to, and where nobody knows of any step: on new machines there is no event log, but the store
has the steps of the job, and all ranks see the same newest one.

Outside (torchrun, plain Python) each rank writes its own part in `save`, and whoever completes a step commits it. There
are no collectives: ranks tell by an id of the run, found without waiting, which parts belong together.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from evertrain.worker import directory, session, slots, snapshot, store_division, store_files
from evertrain.worker.snapshot import Snapshot
from evertrain.worker.store_files import Folder, Manifest, StoreError
from evertrain.worker.store_reader import StoredStep

KEPT = 3
"""Steps that are kept outside `evertrain run`; inside it the config says."""


class SharedStore:
    """One job's part of the store, as one of its ranks uses it."""

    def __init__(
        self,
        url: str | os.PathLike[str],
        every_s: float,
        every_steps: int | None,
        current: session.Session | None,
    ) -> None:
        if every_s <= 0 or (every_steps is not None and every_steps < 1):
            raise ValueError("store_every_s and store_every_steps are positive")
        self._session = current
        self._every_s = every_s
        self._every_steps = every_steps
        self._base = store_files.root_of(url)
        self._root_url = store_files.root_of(url, current.job if current is not None else "")
        self._root: Folder | None = None
        if current is not None:
            self._rank, self._world_size = current.rank, current.world_size
        else:
            self._rank = int(os.environ.get("RANK", "0"))
            self._world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._attempt: int | None = None
        self._run_id = ""

    @property
    def settings(self) -> dict[str, Any]:
        """For the directory of each slot, from which the node's agent learns it."""
        return {"url": self._base, "every_s": self._every_s, "every_steps": self._every_steps}

    @property
    def root(self) -> Folder:
        if self._root is None:
            self._root = Folder(self._root_url)
        return self._root

    # -- reading -------------------------------------------------------------------------------------------------------

    def newest(self, since: float = 0.0) -> StoredStep | None:
        """The newest step of the lives that began at `since` or later."""
        found = store_files.committed(self.root, since)
        self._count_attempts(found)
        return StoredStep(store_files.step_folder(self.root, found[-1].attempt, found[-1].step)) if found else None

    def chosen(self, folder: str) -> StoredStep:
        """The step that the controller has chosen."""
        return StoredStep(Folder(folder))

    def exact(self, step: StoredStep, live: Mapping[str, Any]) -> tuple[dict[str, bytes], list[Any]] | None:
        """What this rank saved; None: the state has to be divided anew."""
        return step.of_rank(self._rank) if step.fits(self._rank, self._world_size, live.values()) else None

    def spread(self, step: StoredStep, live: Mapping[str, Any], *, aside: str) -> Any:
        """Divide the state anew; returns the entry `aside`."""
        then, now = step.manifest.world_size, self._world_size
        if self._rank == 0:
            followed = "of its own number" if now <= then else f"of its own number modulo {then}"
            print(
                f"evertrain: step {step.manifest.step} was saved by {then} ranks, now there are {now}: model and "
                f"optimizer are divided anew; each rank takes random numbers, loaders and the like from the one "
                f"{followed}",
                file=sys.stderr,
                flush=True,
            )
        return store_division.spread(step, live, self._rank, aside=aside)

    # -- writing, outside `evertrain run` ------------------------------------------------------------------------------

    def save(self, step: int, taken: Snapshot, known: Mapping[int, str]) -> None:
        """Write this rank's part of the step, and commit it if that was the last one; `known` are names of tensors."""
        if self._every_steps is not None and step % self._every_steps:
            return
        from evertrain.worker import store_writer

        if self._attempt is None:
            self._count_attempts(store_files.committed(self.root))
        assert self._attempt is not None
        folder = store_files.step_folder(self.root, self._attempt, step)
        self._run_id = self._run_id or _run_id(self._world_size)
        state = store_writer.RankState(
            self._rank, self._world_size, taken.entries, taken.tensors, _described(taken, known)
        )
        store_writer.write(folder, self._run_id, [state])
        if store_writer.is_written(folder, self._run_id, self._world_size):
            self._commit(folder, step)

    def _commit(self, folder: Folder, step: int) -> None:
        """Several ranks may each believe to be the last one: they do the same, and the first one's work counts."""
        from evertrain.worker import store_writer

        assert self._attempt is not None
        manifest = Manifest("", self._attempt, step, self._world_size, store_files.now(), 0.0, {})
        try:
            store_writer.finish(folder, self._run_id, self._world_size)
            store_files.commit(self.root, manifest, keep=KEPT)
        except StoreError:
            if store_files.read_manifest(folder) is None:
                raise

    def _count_attempts(self, found: Sequence[Manifest]) -> None:
        """The attempt after the newest that has come to anything; before a rank writes, all of them see the same."""
        if self._attempt is None:
            self._attempt = found[-1].attempt + 1 if found else 1


def _described(taken: Snapshot, known: Mapping[int, str]) -> dict[str, Any]:
    places, parts = snapshot.lay_out(taken, slots.HEADER_BYTES)
    described: dict[str, Any] = json.loads(directory.of_snapshot(taken, places, parts, known))
    return described


def _run_id(world_size: int) -> str:
    """The same for all ranks of this start, and no other start's."""
    if world_size == 1:
        return secrets.token_hex(4)
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None and c10d.is_initialized():
        shared = c10d._get_default_store()
        return bytes(shared.compare_set("evertrain/run", "", secrets.token_hex(4))).decode()
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return hashlib.sha256(repr([os.environ.get(name) for name in names]).encode()).hexdigest()[:8]
