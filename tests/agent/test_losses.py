"""The same steps done again: which losses are compared, when, and what is said of those that differ."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from evertrain.agent import losses
from evertrain.model.report import Compare, Comparison, Difference
from evertrain.worker import page

ORDER = Compare(earlier=1, later=2, after=3, last=6)


def write(path: Path, reported: dict[int, float], *, step: int | None = None) -> Path:
    """A page of a rank that reported these losses and finished `step` last."""
    page.create(str(path), job="job", term=1, attempt=1, rank=0)
    writer = page.PageWriter(str(path))
    for at, loss in reported.items():
        writer.remember_loss(at, loss)
    writer.abs_step = step if step is not None else max(reported, default=-1)
    writer.write()
    return path


def compare(
    folder: Path, before: dict[int, float], again: dict[int, float], *, step: int | None = None, is_over: bool = False
) -> Comparison | None:
    earlier, later = write(folder / "earlier", before), write(folder / "later", again, step=step)
    return losses.compare(ORDER, 0, "node-0", earlier, later, is_over=is_over)


def steps(first: int, last: int) -> dict[int, float]:
    return {step: step / 7 for step in range(first, last + 1)}


def test_the_steps_that_were_done_twice_and_no_others(tmp_path: Path) -> None:
    before = {**steps(1, 6), 2: 99.0}
    again = {**steps(4, 9), 7: 99.0}
    assert compare(tmp_path, before, again) == Comparison(rank=0, later=2, first_step=4, last_step=6)


def test_not_before_the_old_step_is_reached(tmp_path: Path) -> None:
    assert compare(tmp_path, steps(1, 6), steps(4, 5)) is None
    assert compare(tmp_path, steps(1, 6), {}, step=3) is None
    missing = losses.compare(ORDER, 0, "n", write(tmp_path / "e", steps(1, 6)), tmp_path / "none", is_over=False)
    assert missing is None


def test_a_step_that_is_named_before_its_loss_is_waited_for(tmp_path: Path) -> None:
    assert compare(tmp_path, steps(1, 6), steps(4, 5), step=6) is None
    found = compare(tmp_path, steps(1, 6), steps(4, 5), step=7)
    assert found is not None and (found.first_step, found.last_step) == (4, 5)


def test_a_rank_that_had_come_less_far_than_others(tmp_path: Path) -> None:
    found = compare(tmp_path, steps(1, 5), steps(4, 6))
    assert found is not None and (found.first_step, found.last_step) == (4, 5)


def test_a_rank_that_has_ended_is_compared_as_far_as_it_came(tmp_path: Path) -> None:
    found = compare(tmp_path, steps(1, 6), steps(4, 5), is_over=True)
    assert found is not None and (found.first_step, found.last_step, found.difference) == (4, 5, None)


def test_no_losses_are_nothing_to_compare(tmp_path: Path) -> None:
    assert compare(tmp_path, {}, {}, step=6) == Comparison(rank=0, later=2)
    assert compare(tmp_path, steps(1, 6), {}, step=8) == Comparison(rank=0, later=2)


def test_the_first_difference_in_full_precision(tmp_path: Path) -> None:
    again = {**steps(4, 6), 5: 5 / 7 + 2**-53, 6: 0.0}
    found = compare(tmp_path, steps(1, 6), again)
    assert found is not None
    assert found.difference == Difference(
        step=5, rank=0, node="node-0", before="0.7142857142857143", again="0.7142857142857144"
    )


@pytest.mark.parametrize(("loss", "same"), [(float("nan"), True), (float("inf"), True), (-0.0, False)])
def test_bits_count_not_values(tmp_path: Path, loss: float, same: bool) -> None:
    found = compare(tmp_path, {4: 0.0 if loss == 0 else loss, 6: 1.0}, {4: loss, 6: 1.0})
    assert found is not None and (found.difference is None) == same


def test_two_kinds_of_nan_are_told_apart(tmp_path: Path) -> None:
    (other,) = struct.unpack("@d", struct.pack("@Q", 0x7FF8000000000001))
    found = compare(tmp_path, {4: float("nan"), 6: 1.0}, {4: other, 6: 1.0})
    assert found is not None and found.difference is not None
    assert (found.difference.before, found.difference.again) == (
        "nan (bits 7ff8000000000000)", "nan (bits 7ff8000000000001)",
    )  # fmt: skip
