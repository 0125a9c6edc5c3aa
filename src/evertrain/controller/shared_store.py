"""Who looks after the shared store? The controller: it has steps brought there, commits them, and knows which it has.

Stores are slow and may not answer at all, so everything here happens in threads; the conductor only hears of results.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from evertrain.agent.aside import aside
from evertrain.checkpoint import store
from evertrain.decide import storing
from evertrain.decide.applying import fold
from evertrain.decide.picture import Picture, Stored
from evertrain.decide.state import JobState
from evertrain.decide.storing import Storing, Upload
from evertrain.model.copies import StoreSettings, UploadOrder
from evertrain.model.records import AnyRecord, StoreCommitted
from evertrain.model.spec import ControllerSpec

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class SharedStore:
    """One job's store, as the conductor sees it."""

    def __init__(self, spec: ControllerSpec, wake: Callable[[], None]) -> None:
        self._spec = spec
        self._wake = wake
        self._memory = Storing()
        self._listing: asyncio.Future[tuple[Stored, ...]] | None = None
        self._commit: tuple[Upload, asyncio.Future[tuple[store.Manifest, tuple[str, ...]]]] | None = None
        self.stored: tuple[Stored, ...] | None = None
        self._trouble = ""

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(filter(None, (self._trouble, self._memory.problem)))

    def order(self, node: str) -> UploadOrder | None:
        """A node's part in the upload that is under way."""
        return storing.order(self._memory, node)

    def look(self, state: JobState, picture: Picture, now: float) -> list[AnyRecord]:
        """Take the next step of whatever is under way; returns what has come of it."""
        wanted = storing.settings(state, picture)
        if wanted is None:
            return []
        self._list(wanted, state)
        records = self._committed(wanted, state, now)
        # what is in the store since a moment ago is not due once more
        state = fold(records, state)
        root = store.root(wanted.url, self._spec.job)
        self._memory = storing.advance(self._memory, state, picture, self._spec.config.checkpoint, root, now)
        upload = self._memory.upload
        if upload is not None and upload.phase == "commit" and self._commit is None:
            self._commit = upload, self._in_thread(self._do_commit, wanted, upload, state.life, now)
        return records

    def _list(self, wanted: StoreSettings, state: JobState) -> None:
        if self.stored is not None:
            return
        if self._listing is None:
            self._listing = self._in_thread(self._do_list, wanted, storing.since(state))
        elif self._listing.done():
            task, self._listing = self._listing, None
            try:
                self.stored = task.result()
                self._trouble = ""
            except store.StoreError as error:
                # it is tried again with the next look, for as long as anybody waits for it
                if not self._trouble:
                    _log.warning("%s", error)
                self._trouble = str(error)

    def _committed(self, wanted: StoreSettings, state: JobState, now: float) -> list[AnyRecord]:
        if self._commit is None or not self._commit[1].done():
            return []
        (upload, task), self._commit = self._commit, None
        config = self._spec.config.checkpoint
        try:
            manifest, problems = task.result()
        except store.StoreError as error:
            if self._memory.upload == upload:
                self._memory = storing.failed(self._memory, str(error), config, now)
            return []
        for problem in problems:
            _log.warning("after the commit of step %d: %s", upload.step, problem)
        self._memory = storing.succeeded(self._memory)
        if problems:
            self._memory = replace(self._memory, problem=problems[0])
        made = Stored(
            folder=upload.folder,
            attempt=upload.attempt,
            step=upload.step,
            world_size=upload.world_size,
            life=state.life,
        )
        self.stored = (*(one for one in self.stored or () if one.folder != upload.folder), made)
        return [
            StoreCommitted(
                time=now,
                url=wanted.url,
                folder=upload.folder,
                attempt=upload.attempt,
                step=upload.step,
                world_size=upload.world_size,
                bytes=manifest.bytes,
                seconds=now - upload.began,
            )
        ]

    def _in_thread(self, work: Callable[..., _Result], *given: object) -> asyncio.Future[_Result]:
        """A store that does not answer cannot keep this process from ending."""
        result = aside("shared-store", work, *given)
        result.add_done_callback(lambda _: self._wake())
        return result

    def _do_list(self, wanted: StoreSettings, since: float) -> tuple[Stored, ...]:
        return tuple(
            Stored(
                folder=folder,
                attempt=found.attempt,
                step=found.step,
                world_size=found.world_size,
                life=found.life,
            )
            for folder, found in store.list(wanted.url, self._spec.job, since)
        )

    def _do_commit(
        self, wanted: StoreSettings, upload: Upload, life: float, now: float
    ) -> tuple[store.Manifest, tuple[str, ...]]:
        config = self._spec.config.checkpoint
        manifest = store.Manifest(self._spec.job, upload.attempt, upload.step, upload.world_size, now, life, {})
        return store.commit(wanted.url, manifest, keep=config.store_keep, one_a_day=config.store_one_a_day)
