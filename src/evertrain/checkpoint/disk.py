"""How does a step get from a node's memory to its disk, and which ones are there?

    <disk_dir>/step-000000000040/r0, r1, …     written by `flush`, whole or absent
    <disk_dir>/step-000000000041/alone          ... by a node that could not know whether other nodes keep this step
    <disk_dir>/slots/r0/0, 1, 2                 slots of ranks for which memory was too small

A flushed file is the slot with a checksum over the data added to its header.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable
from zlib import crc32

from evertrain.checkpoint import slots
from evertrain.checkpoint.slots import SlotInfo
from evertrain.checkpoint.sums import of_chunk
from evertrain.model.copies import Save
from evertrain.worker import slots as layout

KEPT = 3
"""So many of the newest steps that all nodes keep, and as many of the others: these must not push those out."""
DISTANCES = (10, 100, 1000)
"""About so many steps back another one is kept each: a fault that is noticed late has spoilt the newest ones."""
_ALONE = "alone"
_STEP = re.compile(r"step-\d{12}")


class _Unusable(Exception):
    pass


def flush(
    paths: Iterable[str | os.PathLike[str]],
    disk_dir: str | os.PathLike[str],
    *,
    alone: bool = False,
    pinned: Save | None = None,
) -> tuple[str, ...]:
    """Write the slots of one step to disk, all or none, and drop older steps (`kept`) but for the `pinned` one.

    Returns what went wrong.

    Nothing that was there is touched before the new step is safe, so a full disk costs this step only. Flushing a
    step again replaces it.
    """
    sources = [os.fspath(path) for path in paths]
    headers = [layout.read(path) for path in sources]
    steps = {None if header is None else header.step for header in headers}
    if not sources:
        return ("nothing to flush",)
    bad = [
        path for path, header in zip(sources, headers, strict=True) if header is None or header.state != layout.COMPLETE
    ]
    if bad:
        return tuple(f"{path} is damaged or incomplete" for path in bad)
    if len(steps) != 1:
        return (f"the slots hold different steps: {', '.join(map(str, sorted(map(str, steps))))}",)

    folder = os.fspath(disk_dir)
    target = os.path.dirname(layout.flushed_path(folder, headers[0].step if headers[0] else 0, 0))
    partial = f"{target}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        os.makedirs(partial, mode=0o700)
        for path, header in zip(sources, headers, strict=True):
            assert header is not None
            _copy(path, header, os.path.join(partial, f"r{header.rank}"))
        if alone:
            os.close(_private(os.path.join(partial, _ALONE), os.O_WRONLY | os.O_CREAT))
        _sync(partial)
        if os.path.isdir(target):
            os.rename(target, f"{target}.old")
        os.rename(partial, target)
        _sync(folder)
    except _Unusable as error:
        shutil.rmtree(partial, ignore_errors=True)
        return (str(error),)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        return (f"{folder}: {_reason(error, sources)}",)
    _tidy(folder, pinned)
    return ()


def flush_all(
    slots_dir: str | os.PathLike[str], disk_dir: str | os.PathLike[str]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Write every step that memory holds to disk, for a node that cannot know which one all nodes share.

    Returns the steps that are on disk then, and what went wrong. Of two runs of one step the later one counts; a step
    that is there already for more ranks is left as it is.
    """
    folder = os.fspath(disk_dir)
    held: dict[int, dict[int, SlotInfo]] = {}
    for slot in sorted(slots.list(slots_dir), key=lambda slot: slot.attempt):
        held.setdefault(slot.step, {})[slot.rank] = slot
    there: dict[int, dict[int, int]] = {}
    for copy in list(folder):
        # ranks whose slots are on disk have nothing in memory that could be kept
        if copy.path == layout.flushed_path(folder, copy.step, copy.rank):
            there.setdefault(copy.step, {})[copy.rank] = copy.attempt
    failed: set[int] = set()
    problems: tuple[str, ...] = ()
    for step, ranks in sorted(held.items()):
        known = there.get(step, {})
        if known.keys() - ranks.keys() or all(known.get(rank) == slot.attempt for rank, slot in ranks.items()):
            continue
        if found := flush([slot.path for slot in ranks.values()], folder, alone=True):
            failed.add(step)
            problems += found
    kept = {copy.step for copy in list(folder)} & held.keys() - failed
    return tuple(sorted(kept)), tuple(dict.fromkeys(problems))


def discard_before(attempt: int, disk_dir: str | os.PathLike[str]) -> None:
    """Remove what an earlier life of the job has left: its higher steps would crowd out the new life's."""
    folder = os.fspath(disk_dir)
    for copy in list(folder):
        if copy.attempt < attempt:
            os.unlink(copy.path)
    for step in _steps(folder):
        if not set(_names(folder, step)) - {_ALONE}:
            shutil.rmtree(os.path.join(folder, step), ignore_errors=True)


def list(disk_dir: str | os.PathLike[str]) -> tuple[SlotInfo, ...]:
    """The complete copies on a node's disk, oldest step first."""
    folder = os.fspath(disk_dir)
    flushed = [os.path.join(folder, step, rank) for step in _steps(folder) for rank in _names(folder, step)]
    return (*slots.complete(flushed, "disk"), *list_in_place(folder))


def list_in_place(disk_dir: str | os.PathLike[str]) -> tuple[SlotInfo, ...]:
    """Slots of ranks for which memory was too small."""
    folder = os.fspath(disk_dir)
    in_place = [
        os.path.join(folder, "slots", rank, slot)
        for rank in _names(folder, "slots")
        for slot in _names(folder, "slots", rank)
    ]
    return slots.complete(in_place, "disk")


def found_damaged(disk_dir: str | os.PathLike[str]) -> tuple[layout.SlotHeader, ...]:
    """Copies on a node's disk that a rank has found damaged."""
    folder = os.fspath(disk_dir)
    return slots.damaged(os.path.join(folder, step, rank) for step in _steps(folder) for rank in _names(folder, step))


def _copy(source: str, header: layout.SlotHeader, target: str) -> None:
    """Copy a slot, checked; the header goes in last, with the checksums of what was copied."""
    with open(source, "rb") as read, open(target, "xb", opener=_private) as write:
        read.seek(header.metadata_at)
        metadata, directory, sums = (
            read.read(size) for size in (header.metadata_bytes, header.directory_bytes, header.sums_bytes)
        )
        if (crc32(metadata), crc32(directory)) != (header.metadata_crc, header.directory_crc):
            raise _Unusable(f"{source}: metadata do not match their checksum")
        if header.sums_crc is not None and crc32(sums) != header.sums_crc:
            raise _Unusable(f"{source}: checksums are damaged")
        read.seek(layout.HEADER_BYTES)
        write.seek(layout.HEADER_BYTES)
        found = []
        for _, length in layout.chunks(layout.parts_of(directory)):
            chunk = read.read(length)
            if len(chunk) != length:
                raise _Unusable(f"{source} ends too early")
            found.append(of_chunk(chunk))
            write.write(chunk)
        copied = layout.pack_sums(found)
        if header.sums_crc is not None and sums != copied:
            raise _Unusable(f"{source}: data do not match their checksums")
        write.write(metadata + directory + copied)
        now = layout.read(source)
        if now is None or now._replace(sums_crc=header.sums_crc) != header:
            raise _Unusable(f"{source} was overwritten while it was copied")
        assert write.tell() == header.size
        write.seek(0)
        write.write(layout.pack(header._replace(sums_crc=crc32(copied))).ljust(layout.HEADER_BYTES, b"\0"))
        write.flush()
        os.fsync(write.fileno())


def _tidy(folder: str, pinned: Save | None) -> None:
    """Remove the steps that are no longer kept, and what a flush that was killed has left."""
    unfinished = tuple(name for name in _names(folder) if name.endswith((".partial", ".old")))
    made = sorted((_attempt(folder, name), int(name.removeprefix("step-")), name) for name in _steps(folder))
    alone = [name for _, _, name in made if _ALONE in _names(folder, name)]
    common = [(attempt, step) for attempt, step, name in made if name not in alone]
    keep = {
        os.path.basename(os.path.dirname(layout.flushed_path("", step, 0)))
        for _, step in (*kept(common), *filter(None, [pinned]))
    }
    for name in (*(name for _, _, name in made if name not in {*keep, *alone}), *alone[:-KEPT], *unfinished):
        shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def kept(saves: Iterable[Save]) -> set[Save]:
    """Which saves stay on disk: the last three, and one each about 10, 100 and 1,000 steps back.

    For a distance d that is the first one of the newest block of d steps, and the first one of the block before: while
    training goes on it is between d and 2d steps back. The same saves lead to the same answer on every node. A later
    attempt may have gone back behind what an earlier one had reached: its saves are the last ones then, and what it
    went back behind is not kept for its distance.
    """
    made = sorted(saves)
    found = set(made[-KEPT:])
    ahead = {save for save in made if any(later[0] > save[0] and later[1] <= save[1] for later in made)}
    steps = {save[1]: save for save in made if save not in ahead}
    for distance in DISTANCES:
        first = {}
        for step in sorted(steps, reverse=True):
            first[step // distance] = step
        found |= {steps[first[block]] for block in sorted(first)[-2:]}
    return found


def _steps(folder: str) -> tuple[str, ...]:
    return tuple(name for name in _names(folder) if _STEP.fullmatch(name))


def _attempt(folder: str, step: str) -> int:
    """The last one that a rank's copy of the step is of."""
    headers = (layout.read(os.path.join(folder, step, rank)) for rank in _names(folder, step))
    return max((header.attempt for header in headers if header is not None), default=0)


def _names(*parts: str) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(os.path.join(*parts))))
    except OSError:
        return ()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: OSError, sources: Iterable[str]) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        needed = sum(os.stat(path).st_size for path in sources if os.path.exists(path))
        return f"no room for {needed:,} bytes of checkpoint; older checkpoints are untouched"
    return str(error)
