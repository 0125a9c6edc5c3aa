"""Which slots has this rank, and which of them does a save take or a restore begin with?

In the node's shared memory, or on its disk where memory is too small. What must be left alone for a backup is said by
the node's agent (`worker.pins`).
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

from evertrain.worker import pins, room, session, slots
from evertrain.worker.slot_file import Describe, SavedSlot, SlotDamaged, SlotFile, condemn, file_bytes
from evertrain.worker.snapshot import Snapshot

_FULL = (errno.ENOSPC, errno.EDQUOT)


class NotNew(Exception):
    """A save that is not newer than one that this attempt has; the text says what to do about it."""


class AnotherState(Exception):
    """State of other names than what this rank has saved or loaded; the text says what to do about it."""


class RankSlots:
    """This rank's slots."""

    def __init__(self, current: session.Session) -> None:
        self._session = current
        self._in_memory = os.path.join(current.slots_dir, f"r{current.rank}")
        self._on_disk = os.path.join(current.disk_dir, "slots", f"r{current.rank}")
        self._files: list[SlotFile] = []
        self._pins = pins.NOTHING
        self._room_for_pins = True
        self._names: frozenset[str] | None = None

    def claim(self, names: Iterable[str]) -> None:
        """There is one state of a rank: others than the first names that come here are AnotherState."""
        wanted = frozenset(names)
        if self._names is None:
            self._names = wanted
        if wanted != self._names:
            raise AnotherState(
                f"there is another Checkpointer, of {_listed(self._names)}; this one is of {_listed(wanted)}. A rank "
                f"has one checkpoint: put all state into one Checkpointer"
            )

    def see_that_it_is_new(self, step: int) -> None:
        """Of two saves with one number nobody could tell which one another rank has; and the last one is the newest."""
        saves = filter(None, (slots.save_in(file.header) for file in self._files))
        done = [saved for attempt, saved in saves if attempt == self._session.attempt]
        if done and step <= max(done):
            raise NotNew(
                f"step {max(done)} has been saved already, and a save needs a higher number than the one before"
            )

    def begin(self, step: int, taken: Snapshot, describe: Describe) -> SlotFile:
        """The slot whose turn it is, ready for the snapshot's tensors; the caller copies them and commits it."""
        if not self._files:
            size = sum(tensor.numel() * tensor.element_size() for tensor in taken.tensors)
            self._files = self._place(file_bytes(size + sum(map(len, taken.entries.values()))))
        current = self._session
        header = slots.SlotHeader(
            slots.WRITING, current.job, current.term, current.attempt, current.rank, current.world_size, step,
            time.time(),
        )  # fmt: skip
        own = [file.header for file in self._files]
        kept = slots.newest_in_common(own, current.slots_dir, current.rank)
        index = slots.slot_to_overwrite(own, kept, self._pinned(own))
        if index is None:
            if (slot := self._one_more(header, taken, describe)) is not None:
                return slot
            index = slots.slot_to_overwrite(own, kept)
            assert index is not None
        slot = self._files[index]
        try:
            slot.begin(header, taken, describe)
        except OSError as error:
            if error.errno not in _FULL or slot.path.startswith(self._on_disk):
                raise
            self._files = self._move_to_disk(str(error))
            return self.begin(step, taken, describe)
        return slot

    def _one_more(self, header: slots.SlotHeader, taken: Snapshot, describe: Describe) -> SlotFile | None:
        """A slot beside the three, so that a pinned save can stay; None: there is no room for it."""
        if len(self._files) >= slots.MOST_SLOTS or not self._room_for_pins:
            return None
        slot = SlotFile(os.path.join(os.path.dirname(self._files[0].path), str(len(self._files))))
        try:
            needed = self._files[0].size * _local_world_size()
            if slot.path.startswith(self._in_memory) and needed > room.FRACTION * room.free_bytes(
                self._session.slots_dir
            ):
                raise OSError(errno.ENOSPC, f"{needed:,} bytes more of shared memory are needed on this node")
            slot.begin(header, taken, describe)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._room_for_pins = False
            say(f"{who(self._session)}: no room to keep a step for a backup ({error.strerror}); it is overwritten")
            return None
        self._files.append(slot)
        return slot

    def _pinned(self, own: Sequence[slots.SlotHeader | None]) -> frozenset[slots.Save]:
        """What this node's agent wants kept; while that cannot be read, what it wanted before."""
        self._pins = pins.read(self._session.slots_dir) or self._pins
        return self._pins.of(save for save in map(slots.save_in, own) if save is not None)

    def copies(self, step: int, reasons: list[str]) -> Iterator[SavedSlot]:
        """The copies of a step on this node, from the tier that the controller saw it in, then from any.

        `reasons` says of each other one why it is none; what turns out to be damaged is marked so.
        """
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
                    yield SavedSlot(path, header)
                except SlotDamaged as damage:
                    self.condemn(path, header, damage, reasons)

    def condemn(self, path: str, header: slots.SlotHeader, damage: Exception, reasons: list[str]) -> None:
        """A copy is not what was saved: say so, and see that nobody takes it again."""
        reasons.append(f"{path}: {damage}")
        say(f"{who(self._session)}: the copy of step {header.step} in {path} is damaged: {damage}; it is not used")
        try:
            condemn(path, header)
        except OSError as error:
            say(f"{who(self._session)}: {path} cannot be marked as damaged: {error}")

    def where(self) -> str:
        return f"{self._in_memory} and {self._session.disk_dir}"

    def _copies_of(self, step: int) -> list[str]:
        attempt = self._session.resume_attempt
        memory = [path for path in _slot_paths(self._in_memory) if _holds(path, step, attempt)]
        disk = [path for path in _slot_paths(self._on_disk) if _holds(path, step, attempt)]
        flushed = slots.flushed_path(self._session.disk_dir, step, self._session.rank)
        header = slots.read(flushed)
        if os.path.exists(flushed) and (header is None or attempt in (None, header.attempt)):
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
        wanted = max(0, slots.SLOTS * each - present) * _local_world_size()
        os.makedirs(self._session.slots_dir, mode=0o700, exist_ok=True)
        free = room.free_bytes(self._session.slots_dir)
        if wanted <= room.FRACTION * free:
            return files
        return self._move_to_disk(f"{wanted:,} bytes more of shared memory are needed on this node, {free:,} are free")

    def _move_to_disk(self, reason: str) -> list[SlotFile]:
        say(f"{who(self._session)}: {reason}; checkpoints go to {self._on_disk} instead, which is slower")
        return [SlotFile(path) for path in _slot_paths(self._on_disk)]


def _slot_paths(folder: str) -> list[str]:
    """Those that every rank has, and those that pins have made necessary."""
    more = [str(index) for index in range(slots.SLOTS, slots.MOST_SLOTS)]
    extra = [name for name in more if os.path.exists(os.path.join(folder, name))]
    return [os.path.join(folder, name) for name in (*map(str, range(slots.SLOTS)), *extra)]


def _local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))


def _holds(path: str, step: int, attempt: int | None) -> bool:
    header = slots.read(path)
    return header is not None and header.step == step and attempt in (None, header.attempt)


def who(current: session.Session) -> str:
    return f"rank {current.rank} on {current.node}"


def say(text: str) -> None:
    print(f"evertrain: {text}", file=sys.stderr, flush=True)
