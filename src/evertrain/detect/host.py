"""Is something odd with this machine? Its disks, mounts, memory, descriptors and clock.

    disk_full             less than 2 % are free where the job writes
    mount_dead            a mount point has not answered for ten seconds
    disk_errors           ten failed commands or more within a minute
    memory_low            less than 2 % are available
    descriptors_low       less than 2 % of those that the machine allows are left
    clock_offset          the clock is off by more than a second
    clock_unsynchronised  it was kept right before, and is not any more

None of it proves that the machine is broken: `disk_errors` is a reading, the others are conditions. What holds for one
look only is none, and what holds is over when there is twice as much room as the limit asks for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from evertrain.model.sensing import HostReading, Sign

LEAST_FREE = 0.02
DEAD_S = 10.0
LOOKS = 2
UNSYNCHRONISED_LOOKS = 12
"""A time service that is started again has its time."""
MOST_OFFSET_S = 1.0
LEAST_ERRORS = 10
"""Disks that are asked what they do not know, by whoever watches their health, count a few errors, too."""
WINDOW_S = 60.0
SAME_S = 600.0
"""What comes back so soon, or is seen again by an agent that was started again, is the same event."""


class _Condition(msgspec.Struct, frozen=True):
    """Something that would be odd."""

    kind: str
    device: str
    holds: bool
    words: str
    is_near: bool = False
    """Not clearly better yet."""
    looks: int = LOOKS
    """In a row."""


class Host:
    """What has been seen of one machine."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, float, str]] = {}
        """By what it is: looks in which it held, when it began, and how it was put when it became a sign."""
        self._errors: dict[str, deque[tuple[float, int]]] = {}
        """By disk: when it was looked at, and its count."""
        self._was_synchronised = False

    def judge(self, reading: HostReading, now: float) -> tuple[Sign, ...]:
        """All that holds now."""
        signs: list[Sign] = []
        before, self._held = self._held, {}
        for one in self._conditions(reading, now):
            name = f"{one.kind}:{one.device}"
            count, first, said = before.get(name, (0, now, ""))
            if not one.holds and not (one.is_near and count >= one.looks):
                continue
            count += 1
            said = said or (one.words if count >= one.looks else "")
            self._held[name] = (count, first, said)
            if said:
                key = f"host:{name}:{first // SAME_S:.0f}"
                signs.append(Sign(key=key, kind=one.kind, device=one.device, evidence=said, time=first))
        return tuple(signs)

    def _conditions(self, reading: HostReading, now: float) -> Iterator[_Condition]:
        folders = dict(reading.disk_free_fraction)
        if reading.shared_memory_free_fraction is not None:
            folders.setdefault("shared memory", reading.shared_memory_free_fraction)
        for folder, free in folders.items():
            yield _scarce("disk_full", folder, free, f"{folder} is full: {{}} are free; remove what is not needed")
        for mount, for_s in reading.mounts_dead.items():
            words = f"{mount} has not answered for {for_s:.0f} s; the limit is {DEAD_S:.0f} s"
            yield _Condition("mount_dead", mount, for_s > DEAD_S, words, looks=1)
        for disk, count in reading.disk_errors.items():
            more = self._more_errors(disk, count, now)
            words = f"{disk}: {more} commands have failed within {WINDOW_S:.0f} s; look at the kernel's log"
            yield _Condition("disk_errors", disk, more >= LEAST_ERRORS, words, is_near=more > 0, looks=1)
        if (free_memory := reading.memory_free_fraction) is not None:
            yield _scarce("memory_low", "", free_memory, "{} of memory are available; the kernel may kill a rank")
        if (used := reading.descriptors_fraction) is not None:
            yield _scarce("descriptors_low", "", 1.0 - used, "{} of the machine's file descriptors are left")
        if (offset := reading.clock_offset_s) is not None:
            words = f"the clock is off by {offset:+.1f} s; the limit is {MOST_OFFSET_S:g} s"
            is_near = abs(offset) > MOST_OFFSET_S / 2
            yield _Condition("clock_offset", "", abs(offset) > MOST_OFFSET_S, words, is_near=is_near)
        if reading.clock_is_synchronised is not None:
            # a machine whose clock nobody has ever kept right is as its owner wants it
            self._was_synchronised = self._was_synchronised or reading.clock_is_synchronised
            lost = self._was_synchronised and not reading.clock_is_synchronised
            words = "the clock is no longer synchronised; look at the machine's time service"
            yield _Condition("clock_unsynchronised", "", lost, words, looks=UNSYNCHRONISED_LOOKS)

    def _more_errors(self, disk: str, count: int, now: float) -> int:
        """By how much the count has grown within the window; one that has become smaller begins anew."""
        seen = self._errors.setdefault(disk, deque())
        if seen and count < seen[-1][1]:
            seen.clear()
        seen.append((now, count))
        while seen[0][0] < now - WINDOW_S:
            seen.popleft()
        return count - seen[0][1]


def _scarce(kind: str, device: str, free: float, words: str) -> _Condition:
    said = words.format(f"{free:.1%} (the limit is {LEAST_FREE:.0%})")
    return _Condition(kind, device, free < LEAST_FREE, said, is_near=free < 2 * LEAST_FREE)
