"""Whatever the instant of a kill, some step is complete on all ranks: with three slots, and not with two."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from evertrain.checkpoint.slots import SlotInfo
from evertrain.decide import resume
from evertrain.worker import pins, slots
from evertrain.worker.slots import COMPLETE, EMPTY, WRITING, SlotHeader, slot_to_overwrite
from support.effort import examples


def header(step: int = 1, attempt: int = 1, state: int = COMPLETE, rank: int = 0, world_size: int = 1) -> SlotHeader:
    return SlotHeader(state, "job", 1, attempt, rank, world_size, step, 0.0)


def test_empty_slots_are_taken_first() -> None:
    assert slot_to_overwrite([header(5), None, header(6)]) == 1
    assert slot_to_overwrite([header(5), header(7, state=WRITING), header(6)]) == 1


def test_then_the_oldest() -> None:
    assert slot_to_overwrite([header(7), header(5), header(6)]) == 1


def test_a_later_attempt_is_newer_whatever_its_step() -> None:
    assert slot_to_overwrite([header(7, attempt=1), header(2, attempt=2), header(3, attempt=2)]) == 0


@given(
    st.builds(
        SlotHeader,
        state=st.sampled_from([EMPTY, WRITING, COMPLETE]),
        job=st.text("abc-", max_size=20),
        term=st.integers(0, 2**40),
        attempt=st.integers(0, 2**40),
        rank=st.integers(0, 2**20),
        world_size=st.integers(1, 2**20),
        step=st.integers(0, 2**62),
        time=st.floats(0, 1e10),
        data_bytes=st.integers(0, 2**50),
        metadata_bytes=st.integers(0, 2**40),
        metadata_crc=st.integers(0, 2**32 - 1),
        directory_bytes=st.integers(0, 2**40),
        directory_crc=st.integers(0, 2**32 - 1),
        sums_bytes=st.integers(0, 2**40),
        sums_crc=st.none() | st.integers(0, 2**32 - 1),
        code=st.text("0123456789abcdef", max_size=40),
    ),
    st.data(),
)
def test_headers_come_back_and_damaged_ones_do_not(one: SlotHeader, data: st.DataObject) -> None:
    raw = bytearray(slots.pack(one))
    assert slots.parse(bytes(raw)) == one
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert slots.parse(bytes(raw)) is None


class Rank:
    """One rank as the kill may find it: slots, the last optimizer step and save, and a copy that goes on beside."""

    def __init__(self, rank: int, count: int, world_size: int, *, beside: bool, room: bool) -> None:
        self.rank = rank
        self.world_size = world_size
        self.count = count
        self.slots: list[SlotHeader | None] = [None] * count
        self.beside = beside
        self.room = room
        """Whether there is memory for pinned saves beside the slots that turn."""
        self.stepped = 0
        self.saved = 0
        """The last step whose save has returned: the rank computes the gradients of the next one."""
        self.copying: int | None = None

    def move(self, attempt: int, pinned: pins.Pins, slowest: int, *, copy: bool) -> bool:
        """Do what comes next; False: it has to wait for others."""
        if self.copying is not None and (copy or not self.beside or self.stepped == self.saved):
            self.finish(attempt)  # the copier, or whoever waits for it: a synchronous save, an optimizer step
        elif self.stepped == self.saved:
            if self.saved > slowest:
                return False  # gradients are summed up over all ranks: none gets further before all are so far
            self.stepped += 1
        else:
            assert self.copying is None
            self.begin(attempt, pinned)
        return True

    def begin(self, attempt: int, pinned: pins.Pins) -> None:
        """`save` has been called, and returns at once where the copy goes on beside."""
        saves = [save for save in map(slots.save_in, self.slots) if save is not None]
        index = slot_to_overwrite(self.slots, None, pinned.of(saves) if self.room else (), self.count)
        if index is None and len(self.slots) < self.count + 2:
            index = len(self.slots)
            self.slots.append(None)
        if index is None:
            index = slot_to_overwrite(self.slots, count=self.count)
        assert index is not None
        self.slots[index] = header(self.stepped, attempt, WRITING, self.rank, self.world_size)
        self.copying = index
        if self.beside:
            self.saved = self.stepped

    def finish(self, attempt: int) -> None:
        assert self.copying is not None
        self.slots[self.copying] = header(self.stepped, attempt, COMPLETE, self.rank, self.world_size)
        self.saved, self.copying = self.stepped, None

    def restart(self, step: int) -> None:
        """As `Checkpointer.load` does: later steps did not happen."""
        self.slots = [None if slot is None or slot.step > step else slot for slot in self.slots]
        self.saved = self.stepped = step
        self.copying = None

    def whole(self) -> list[slots.Save]:
        return [save for save in map(slots.save_in, self.slots) if save is not None]

    def copies(self) -> list[SlotInfo]:
        return [
            SlotInfo(
                rank=slot.rank, step=slot.step, attempt=slot.attempt, term=1, time=0.0, world_size=slot.world_size,
                bytes=0, path="", tier="memory",
            )
            for slot in self.slots
            if slot is not None and slot.state == COMPLETE
        ]  # fmt: skip


class Rounds:
    """The agents: now and then all ranks are to keep a step that lies ahead; when they have it, it stays a while."""

    def __init__(self) -> None:
        self.pins = pins.NOTHING

    def move(self, ranks: list[Rank], attempt: int, ahead: int) -> None:
        if len(self.pins.kept) > 1:
            self.pins = pins.Pins(kept=self.pins.kept[-1:])  # the copy elsewhere is complete
        elif self.pins.wanted is None:
            newest = max(rank.saved for rank in ranks)
            self.pins = self.pins._replace(wanted=(attempt, newest + ahead))
        elif all(self._later(rank) for rank in ranks):
            found = {min(self._later(rank)) for rank in ranks}
            # the last one that has been backed up stays until this one is
            self.pins = pins.Pins(kept=(*self.pins.kept, *found) if len(found) == 1 else self.pins.kept)

    def _later(self, rank: Rank) -> list[slots.Save]:
        assert self.pins.wanted is not None
        attempt, step = self.pins.wanted
        return [save for save in rank.whole() if save[0] == attempt and save[1] >= step]

    def restart(self, step: int) -> None:
        self.pins = pins.Pins(kept=tuple(save for save in self.pins.kept if save[1] <= step))

    def check(self, ranks: list[Rank]) -> None:
        for rank in ranks:
            if rank.room:
                assert set(self.pins.kept) <= set(rank.whole()), "what is pinned stays"


class Schedule(NamedTuple):
    world_size: int
    seed: int
    """Of the order in which ranks, their copiers and the agents get on."""
    kill_after: int
    """Moves, on average."""
    pinning: bool


def kill_at_any_instant(schedule: Schedule, count: int) -> None:
    """Ranks train; after each kill, all have a step in common, the newest that all had, and go on from it."""
    chance = random.Random(schedule.seed)
    beside = chance.random()
    ranks = [
        Rank(rank, count, schedule.world_size, beside=chance.random() < beside, room=chance.random() < 0.8)
        for rank in range(schedule.world_size)
    ]
    rounds = Rounds()
    attempt = 1
    for _ in range(40 * schedule.world_size):
        slowest = min(rank.saved for rank in ranks)
        rank = chance.choice(ranks)
        # a few moves of one rank in a row, so that it gets as far ahead of the others as it can
        for _ in range(chance.choice((1, 1, 4))):
            if not rank.move(attempt, rounds.pins, slowest, copy=chance.random() < 0.3):
                break
        if schedule.pinning and chance.random() < 2 / schedule.world_size:
            rounds.move(ranks, attempt, chance.randint(0, 4))
        rounds.check(ranks)
        if chance.random() < 1 / schedule.kill_after and all(rank.whole() for rank in ranks):
            copies = [copy for rank in ranks for copy in rank.copies()]
            common = resume.choose({"node": copies}, dict.fromkeys(range(schedule.world_size), "node"))
            assert common is not None, [rank.slots for rank in ranks]
            assert common.step >= min(max(rank.whole())[1] for rank in ranks), "no common step is lost"
            attempt += 1
            rounds.restart(common.step)
            for one in ranks:
                one.restart(common.step)


schedules = st.builds(
    Schedule,
    world_size=st.sampled_from([2, 2, 3, 4, 5, 8, 64]),
    seed=st.integers(0, 2**32),
    kill_after=st.sampled_from([10, 50, 300]),
    pinning=st.booleans(),
)


@given(schedules)
@settings(max_examples=examples(100), deadline=None)
def test_with_three_slots_a_common_step_exists_at_any_instant(schedule: Schedule) -> None:
    kill_at_any_instant(schedule, slots.SLOTS)


def test_with_two_slots_it_does_not() -> None:
    @given(schedules)
    @settings(max_examples=200, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    def two(schedule: Schedule) -> None:
        kill_at_any_instant(schedule._replace(pinning=False), 2)

    with pytest.raises(AssertionError):
        two()
