"""Saves that must stay, where there is room for them, and where there is none; saves that fail."""

from __future__ import annotations

from evertrain.checkpoint import slots
from evertrain.worker import pins

from .gang import Gang

SAVES = """
from evertrain.worker import mapping, pins, room, session
where = session.current.slots_dir
os.makedirs(where, exist_ok=True)
x = torch.zeros(4)
c = evertrain.Checkpointer({"x": x})
def save(*numbers):
    for number in numbers: c.save(number)
    c.wait()
"""


def steps(gang: Gang) -> list[int]:
    return sorted(copy.step for copy in slots.list(gang.slots_dir))


def test_pinned_saves_stay_beside_three_that_turn(gang: Gang) -> None:
    script = SAVES + (
        "pins.write(where, pins.Pins(wanted=(1, 3)))\n"
        "save(*range(1, 7))\n"
        "pins.write(where, pins.Pins(kept=((1, 3),), wanted=(1, 8)))\n"
        "save(*range(7, 14))\n"
    )
    (result,) = gang.run(script, world=1)
    assert result.err == ""
    assert steps(gang) == [3, 8, 11, 12, 13]
    pins.write(str(gang.slots_dir), pins.NOTHING)
    gang.run(SAVES + "c.load(); save(14, 15, 16, 17)", world=1, attempt=2, resume=13)
    assert steps(gang) == [13, 14, 15, 16, 17], "without pins all five turn"


def test_without_room_for_a_fourth_slot_pins_are_ignored_and_that_is_said_once(gang: Gang) -> None:
    script = SAVES + (
        "save(1, 2, 3)\n"
        "pins.write(where, pins.Pins(kept=((1, 2),)))\n"
        "room.free_bytes = lambda folder: 1000\n"
        "save(*range(4, 10))\n"
    )
    (result,) = gang.run(script, world=1)
    assert result.err.count("\n") == 1 and "rank 0 on node-0: no room to keep a step for a backup" in result.err
    assert steps(gang) == [7, 8, 9]


def test_failed_saves_in_a_row_are_counted_on_the_page(gang: Gang) -> None:
    script = SAVES + (
        "import errno\n"
        "real = mapping.allocate\n"
        "def full(path, size): raise OSError(errno.EIO, 'broken')\n"
        "mapping.allocate = full\n"
        "seen = []\n"
        "for number in range(1, 6):\n"
        "    if number == 5: mapping.allocate = real\n"
        "    c.save(number)\n"
        "    seen.append(session.current.page.saves_failed)\n"
        "say(seen)\n"
        "if RANK == 1: mapping.allocate = full; os.unlink(where + '/r1/0'); c.load(); c.save(6)\n"
    )
    first, second = gang.run(script)
    assert first.said == [1, 2, 3, 4, 0]
    assert [line.partition(" could not")[0] for line in first.err.splitlines()] == ["evertrain: rank 0 on node-0"] * 3
    assert first.page is not None and first.page.saves_failed == 0
    assert second.page is not None and second.page.saves_failed == 1, second.err


def test_a_second_save_of_one_step_is_left_out_and_that_is_said(gang: Gang) -> None:
    script = SAVES + (
        "for _ in range(6): save(1); x += 1\n"
        "save(2, 1, 3)\n"
        "say(session.current.page.saves_failed)\n"
    )  # fmt: skip
    (result,) = gang.run(script, world=1)
    assert result.said == 0, result.err
    lines = result.err.splitlines()
    assert len(lines) == 3, "said ever more rarely"
    assert lines[0].startswith("evertrain: rank 0 on node-0: step 1 is not kept: step 1 has been saved already")
    assert steps(gang) == [1, 2, 3]
    (again,) = gang.run(SAVES + "c.load(); say(x.tolist())", world=1, attempt=2, resume=1)
    assert again.said == [0.0] * 4, "what was saved first"


def test_the_save_of_the_chosen_attempt_is_loaded_and_no_other_one_of_its_step(gang: Gang) -> None:
    gang.run(SAVES + "x += 1; save(4, 5)", world=1)
    gang.run(SAVES + "x += 2; save(5)", world=1, attempt=2)
    for attempt in (1, 2):
        told = {"resume_attempt": attempt}
        (result,) = gang.run(SAVES + "c.load(); say(x[0].item())", world=1, attempt=3, resume=5, told=told)
        assert result.said == attempt, result.err
    (result,) = gang.run(SAVES + "c.load()", world=1, attempt=4, resume=5, told={"resume_attempt": 3})
    assert result.status == 1 and "there is no whole copy of it" in result.err


def test_two_checkpointers_of_different_state_are_refused(gang: Gang) -> None:
    script = SAVES + "c.load(); d = evertrain.Checkpointer({'y': torch.zeros(4)})\n"
    (result,) = gang.run(script + "d.save(1)\nsay(session.current.page.saves_failed)", world=1)
    assert result.said == 1 and "put all state into one Checkpointer" in result.err
    (result,) = gang.run(script + "d.load()", world=1)
    assert result.status == 1 and "CheckpointError" in result.err and "put all state into one" in result.err


def test_two_checkpointers_of_the_same_state_share_the_slots(gang: Gang) -> None:
    (result,) = gang.run(SAVES + "c.load(); save(1, 2)\nc = evertrain.Checkpointer({'x': x})\nsave(3, 4, 5)", world=1)
    assert result.err == ""
    assert steps(gang) == [3, 4, 5]


def test_slots_that_somebody_removes_or_cuts_off_are_made_anew(gang: Gang) -> None:
    script = SAVES + (
        "import shutil\n"
        "save(1, 2, 3)\n"
        "shutil.rmtree(where)\n"
        "save(4, 5, 6)\n"
        "for name in '012': os.truncate(f'{where}/r0/{name}', 0)\n"
        "save(7, 8, 9)\n"
    )
    (result,) = gang.run(script, world=1)
    assert result.err == "" and result.status == 0
    assert steps(gang) == [7, 8, 9]
