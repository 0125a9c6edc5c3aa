"""Whatever the instant of a kill, some step is complete on all ranks: with three slots, and not with two."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from evertrain.checkpoint.slots import SlotInfo
from evertrain.decide import resume
from evertrain.worker import slots
from evertrain.worker.slots import COMPLETE, EMPTY, WRITING, SlotHeader, slot_to_overwrite


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
    """One rank as the kill may find it: slots, the step it has finished, and whether a save is under way."""

    def __init__(self, rank: int, count: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.slots: list[SlotHeader | None] = [None] * count
        self.saved = 0
        self.saving: int | None = None

    def move(self, attempt: int) -> None:
        """Begin the next save, or finish the one under way."""
        if self.saving is None:
            self.saving = slot_to_overwrite(self.slots, count=len(self.slots))
            assert self.saving is not None
            self.slots[self.saving] = header(self.saved + 1, attempt, WRITING, self.rank, self.world_size)
        else:
            self.slots[self.saving] = header(self.saved + 1, attempt, COMPLETE, self.rank, self.world_size)
            self.saved += 1
            self.saving = None

    def restart(self, step: int) -> None:
        """As `Checkpointer.load` does: later steps did not happen."""
        self.slots = [None if slot is None or slot.step > step else slot for slot in self.slots]
        self.saved, self.saving = step, None

    def copies(self) -> list[SlotInfo]:
        return [
            SlotInfo(
                rank=slot.rank, step=slot.step, attempt=slot.attempt, term=1, time=0.0, world_size=slot.world_size,
                bytes=0, path="", tier="memory",
            )
            for slot in self.slots
            if slot is not None and slot.state == COMPLETE
        ]  # fmt: skip


def kill_at_any_instant(world_size: int, count: int, moves: list[int], kills: set[int]) -> None:
    """Ranks save, at most one save apart; after each kill, all have a step in common and go on from it."""
    ranks = [Rank(rank, count, world_size) for rank in range(world_size)]
    attempt = 1
    for at, choice in enumerate(moves):
        slowest = min(rank.saved for rank in ranks)
        # a rank is inside step n+1 once it has saved n; it gets no further before all have begun step n+1
        able = [rank for rank in ranks if rank.saved == slowest or (rank.saved == slowest + 1 and rank.saving is None)]
        rank = able[choice % len(able)]
        rank.move(attempt)
        if at in kills and min(rank.saved for rank in ranks) > 0:
            copies = [copy for rank in ranks for copy in rank.copies()]
            common = resume.choose({"node": copies}, dict.fromkeys(range(world_size), "node"))
            assert common is not None, [rank.slots for rank in ranks]
            assert common.step >= min(rank.saved for rank in ranks), "no finished common step is lost"
            attempt += 1
            for one in ranks:
                one.restart(common.step)


schedules = st.tuples(
    st.integers(2, 8), st.lists(st.integers(0, 1000), max_size=120), st.sets(st.integers(0, 119), max_size=20)
)


@given(schedules)
@settings(max_examples=300, deadline=None)
def test_with_three_slots_a_common_step_exists_at_any_instant(schedule: tuple[int, list[int], set[int]]) -> None:
    world_size, moves, kills = schedule
    kill_at_any_instant(world_size, slots.SLOTS, moves, kills)


def test_with_two_slots_it_does_not() -> None:
    @given(schedules)
    @settings(max_examples=2000, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    def two(schedule: tuple[int, list[int], set[int]]) -> None:
        world_size, moves, kills = schedule
        kill_at_any_instant(world_size, 2, moves, kills)

    with pytest.raises(AssertionError):
        two()
