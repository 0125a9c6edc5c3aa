"""A step is on disk whole or not at all, and a full disk costs that step only."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evertrain.checkpoint import disk, slots
from evertrain.worker import slots as layout
from support.effort import examples
from support.slots import slot


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "memory"


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def steps(there: Path) -> list[int]:
    return sorted({copy.step for copy in disk.list(there)})


def test_slots_are_listed_with_what_their_headers_say(memory: Path) -> None:
    path = slot(memory, 1, 7)
    slot(memory, 0, 8, state=layout.WRITING)
    (memory / "r0" / "0").write_bytes(b"garbage")
    (memory / "notes").mkdir()
    (found,) = slots.list(memory)
    assert (found.rank, found.step, found.attempt, found.world_size, found.tier) == (1, 7, 1, 2, "memory")
    assert found.path == str(path) and found.time == 107.0


def test_no_folder_has_no_slots(tmp_path: Path) -> None:
    assert slots.list(tmp_path / "none") == () and disk.list(tmp_path / "none") == ()


def test_a_truncated_slot_is_no_copy(memory: Path) -> None:
    path = slot(memory, 0, 7)
    path.write_bytes(path.read_bytes()[:-20])
    assert slots.list(memory) == ()


def test_a_flushed_step_is_listed_with_a_checksum(memory: Path, there: Path) -> None:
    assert disk.flush([slot(memory, 0, 7), slot(memory, 1, 7)], there) == ()
    assert [(copy.rank, copy.step, copy.tier) for copy in disk.list(there)] == [(0, 7, "disk"), (1, 7, "disk")]
    header = layout.read(str(there / "step-000000000007" / "r1"))
    assert header is not None and header.sums_crc is not None


def test_the_last_three_steps_are_kept_and_the_first_of_their_ten(memory: Path, there: Path) -> None:
    for step in range(1, 6):
        assert disk.flush([slot(memory, rank, step) for rank in (0, 1)], there) == ()
    assert steps(there) == [1, 3, 4, 5]


@settings(max_examples=examples(20), deadline=None)
@given(first=st.integers(0, 2000), gap=st.integers(1, 40))
def test_about_10_100_and_1000_steps_back_there_is_another_one(first: int, gap: int) -> None:
    held: set[tuple[int, int]] = set()
    for step in range(first, first + 2500, gap):
        held = disk.kept({*held, (1, step)})
        back = [step - one for _, one in held]
        assert {max(first, step - more * gap) for more in range(disk.KEPT)} <= {one for _, one in held}
        assert len(held) <= disk.KEPT + 2 * len(disk.DISTANCES)
        for distance in disk.DISTANCES:
            if step - first >= 2 * distance:
                assert any(distance - gap <= one <= 2 * distance + gap for one in back), (step, distance, back)


def test_what_a_later_attempt_went_back_behind_does_not_stand_for_its_distance() -> None:
    given_up = {(1, step) for step in (5, 11, 12, 13)}
    later = {(2, step) for step in (6, 16, 17, 18, 19)}
    assert disk.kept({*given_up, *later}) == {(1, 5), *later} - {(2, 6)}


def test_a_step_of_a_later_attempt_outlasts_higher_ones_of_a_way_that_was_given_up(memory: Path, there: Path) -> None:
    for step in (7, 8, 9):
        disk.flush([slot(memory, 0, step)], there)
    assert disk.flush([slot(memory, 0, 4, attempt=2)], there) == ()
    assert steps(there) == [4, 8, 9], "the new way's first, and the last three"
    for step in (5, 6):
        disk.flush([slot(memory, 0, step, attempt=2)], there)
    assert steps(there) == [4, 5, 6]


def test_flushing_again_replaces(memory: Path, there: Path) -> None:
    disk.flush([slot(memory, 0, 7), slot(memory, 1, 7)], there)
    assert disk.flush([slot(memory, 0, 7, b"other"), slot(memory, 1, 7, b"other")], there) == ()
    assert [copy.bytes < 9000 for copy in disk.list(there)] == [True, True]
    assert sorted(path.name for path in there.iterdir()) == ["step-000000000007"]


def test_a_full_disk_leaves_older_steps_intact(memory: Path, there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.flush([slot(memory, 0, 7)], there)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    (error,) = disk.flush([slot(memory, 0, 8)], there)
    assert str(there) in error and "no room for" in error and "older checkpoints are untouched" in error
    assert steps(there) == [7] and sorted(path.name for path in there.iterdir()) == ["step-000000000007"]


def test_what_cannot_be_flushed_is_named(memory: Path, there: Path) -> None:
    writing = slot(memory, 0, 8, state=layout.WRITING)
    assert disk.flush([writing], there) == (f"{writing} is damaged or incomplete",)
    assert "different steps: 7, 9" in disk.flush([slot(memory, 0, 7), slot(memory, 1, 9)], there)[0]
    assert disk.flush([], there) == ("nothing to flush",)
    assert disk.list(there) == ()


def test_damaged_metadata_are_not_flushed(memory: Path, there: Path) -> None:
    path = slot(memory, 0, 7)
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"metadata of")] ^= 1
    path.write_bytes(raw)
    assert "metadata do not match their checksum" in disk.flush([path], there)[0]


def test_slots_that_live_on_disk_are_listed(there: Path) -> None:
    slot(there / "slots", 0, 4)
    slot(there / "slots", 0, 5)
    assert steps(there) == [4, 5]


def test_a_new_life_does_not_inherit_the_steps_of_the_old_one(memory: Path, there: Path) -> None:
    assert disk.flush([slot(memory, rank, 9) for rank in (0, 1)], there) == ()
    disk.discard_before(1, there)
    assert steps(there) == [9], "the first life's own"
    disk.discard_before(2, there)
    assert steps(there) == [] and not (there / "step-000000000009").exists()


# --- all that memory holds


def copies(there: Path) -> set[tuple[int, int, int]]:
    """(rank, step, attempt) of each."""
    return {(copy.rank, copy.step, copy.attempt) for copy in disk.list(there)}


def test_every_step_of_memory_goes_to_disk(memory: Path, there: Path) -> None:
    for rank, held in ((0, (5, 6, 7)), (1, (5, 6))):
        for step in held:
            slot(memory, rank, step)
    slot(memory, 1, 7, state=layout.WRITING)
    assert disk.flush_all(memory, there) == ((5, 6, 7), ())
    assert copies(there) == {(0, 5, 1), (1, 5, 1), (0, 6, 1), (1, 6, 1), (0, 7, 1)}


def test_nothing_in_memory_is_nothing_to_do(memory: Path, there: Path) -> None:
    assert disk.flush_all(memory, there) == ((), ())
    assert not there.exists()


def test_of_two_runs_of_a_step_the_later_one_counts(memory: Path, there: Path) -> None:
    slot(memory, 0, 6, attempt=2, place=0)
    slot(memory, 0, 6, attempt=1, place=1)
    assert disk.flush_all(memory, there) == ((6,), ())
    assert copies(there) == {(0, 6, 2)}
    slot(memory, 0, 6, attempt=3, place=1)
    assert disk.flush_all(memory, there) == ((6,), ())
    assert copies(there) == {(0, 6, 3)}


def test_what_is_on_disk_already_is_not_written_again(memory: Path, there: Path) -> None:
    disk.flush([slot(memory, 0, 6)], there)
    before = os.stat(layout.flushed_path(str(there), 6, 0)).st_ino
    assert disk.flush_all(memory, there) == ((6,), ())
    assert os.stat(layout.flushed_path(str(there), 6, 0)).st_ino == before


def test_a_step_that_disk_has_for_more_ranks_is_left(memory: Path, there: Path) -> None:
    disk.flush([slot(memory, 0, 6), slot(memory, 1, 6)], there)
    (memory / "r1" / "0").unlink()
    slot(memory, 0, 6, attempt=2)
    assert disk.flush_all(memory, there) == ((6,), ())
    assert copies(there) == {(0, 6, 1), (1, 6, 1)}


def test_a_rank_whose_slots_are_on_disk_does_not_keep_another_ranks_step_in_memory(memory: Path, there: Path) -> None:
    slot(there / "slots", 0, 6)
    slot(memory, 1, 6)
    assert disk.flush_all(memory, there) == ((6,), ())
    assert copies(there) == {(0, 6, 1), (1, 6, 1)}


def test_only_steps_that_stayed_are_named(memory: Path, there: Path) -> None:
    for place, step in enumerate((5, 6, 7, 8)):
        slot(memory, 0, step, place=place)
    assert disk.flush_all(memory, there) == ((6, 7, 8), ())
    assert steps(there) == [6, 7, 8]


def test_a_damaged_step_is_named_and_costs_no_other(memory: Path, there: Path) -> None:
    path = slot(memory, 0, 6)
    slot(memory, 0, 7)
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"metadata of")] ^= 1
    path.write_bytes(raw)
    kept, (problem,) = disk.flush_all(memory, there)
    assert kept == (7,) and str(path) in problem
    assert steps(there) == [7]


def test_a_disk_in_the_way_is_one_line_for_all_steps(memory: Path, there: Path) -> None:
    there.write_text("not a folder")
    for step in (6, 7):
        slot(memory, 0, step)
    kept, problems = disk.flush_all(memory, there)
    assert kept == () and len(problems) == len(set(problems)) > 0
    assert all(str(there) in problem for problem in problems)


def test_steps_of_a_node_alone_do_not_push_out_what_all_nodes_have(memory: Path, there: Path) -> None:
    assert disk.flush([slot(memory, 0, 46)], there) == ()
    for newest in (142, 242):
        for step in range(newest - 2, newest + 1):
            slot(memory, 0, step)
        (memory / "r0" / "1").unlink(missing_ok=True)
        disk.flush_all(memory, there)
        for held in memory.rglob("*"):
            if held.is_file():
                held.unlink()
    assert 46 in steps(there) and len(steps(there)) <= 1 + disk.KEPT
    # three steps of the common kind end it
    for step in (300, 301, 302):
        assert disk.flush([slot(memory, 0, step)], there) == ()
    common = {step for step in steps(there) if not (there / f"step-{step:012d}" / "alone").exists()}
    assert common == {46, 300, 301, 302}, "46 is about 1,000 steps back as far as there is anything"
