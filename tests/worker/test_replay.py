"""A script learns that it is a replay, trains a few steps, and leaves a digest that only a fault changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .gang import Gang, Result

CONFIG = {"layers": 2, "dp": 1, "steps": 3, "from_step": 7, "seed": 5}
TRAIN = """
config = evertrain.replay_config()
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(net.parameters(), 0.1)
for step in range(1, STEPS + 1):
    loss = net(torch.ones(2, 4)).square().sum()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    evertrain.report(step=step, loss=loss, grad_norm=2.0)
"""


def replay(gang: Gang, script: str, *, steps: int = 3, **options: Any) -> tuple[str, Result]:
    """The digest, empty where there is none, and how the rank ended."""
    file = gang.folder / "result"
    file.unlink(missing_ok=True)
    told = {"replay": {"config": CONFIG, "result": str(file)}}
    (result,) = gang.run(f"STEPS = {steps}\n{script}", world=1, attempt=-4, told=told, **options)
    return file.read_text() if file.exists() else "", result


def content(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_what_a_script_is_told(gang: Gang) -> None:
    told = {"replay": {"config": CONFIG, "result": str(gang.folder / "result")}}
    script = "import dataclasses; say(dataclasses.asdict(evertrain.replay_config()))"
    (result,) = gang.run(script, world=1, told=told)
    assert result.said == CONFIG
    assert result.page is not None and not result.page.takes_replays


def test_in_training_it_is_told_nothing_and_the_page_says_that_it_asked(gang: Gang) -> None:
    asked, other = gang.run("say(evertrain.replay_config() if RANK == 0 else None)")
    assert (asked.said, other.said) == (None, None)
    assert asked.page is not None and asked.page.takes_replays
    assert other.page is not None and not other.page.takes_replays
    (outside,) = gang.run("say(evertrain.replay_config())", world=1, inside=False)
    assert outside.status == 0 and outside.said is None


def test_the_same_bits_give_the_same_digest(gang: Gang) -> None:
    first, result = replay(gang, TRAIN)
    assert len(first) == 64 and result.status == 0, result.err
    assert replay(gang, TRAIN)[0] == first, "weights and all that is drawn begin with the seed"
    assert replay(gang, TRAIN, steps=9)[0] == first, "what comes after the last step does not count"
    for change in (
        ("loss=loss", "loss=loss * 1.0000001"),
        ("grad_norm=2.0", "grad_norm=2.0000000001"),
        ("0.1)", "0.2)"),
    ):
        assert replay(gang, TRAIN.replace(*change))[0] not in ("", first)


def test_a_bit_of_a_parameter_is_enough(gang: Gang) -> None:
    first, _ = replay(gang, TRAIN)
    last = "    if step == 3:\n        with torch.no_grad(): net.bias.view(torch.int32)[0] ^= 1\n"
    changed = TRAIN.replace("    evertrain.report", last + "    evertrain.report")
    assert replay(gang, changed)[0] not in ("", first)


def test_too_few_steps_or_an_exception_are_no_result(gang: Gang) -> None:
    assert replay(gang, TRAIN, steps=2)[0] == ""
    digest, result = replay(gang, TRAIN + "    if step == 2: raise ValueError('bad')\n")
    assert digest == "" and result.status == 1


@pytest.mark.parametrize(
    "after", ["evertrain.Checkpointer({'net': net}).save(3)", "with evertrain.phase('evaluate'): pass", "pass"]
)
def test_without_a_report_whatever_comes_next_ends_it(gang: Gang, after: str) -> None:
    script = TRAIN.replace("    evertrain.report", "    if False: evertrain.report") + after
    assert len(replay(gang, script)[0]) == 64


def test_without_an_optimizer_reports_count(gang: Gang) -> None:
    script = "for step in range(STEPS):\n    evertrain.report(step=step, loss=0.5)"
    assert len(replay(gang, script)[0]) == 64 and replay(gang, script, steps=2)[0] == ""


def test_nothing_is_restored_and_nothing_is_kept(gang: Gang) -> None:
    save = TRAIN + "keeper = evertrain.Checkpointer({'net': net})\nsay(keeper.load()); keeper.save(3); keeper.wait()"
    (kept,) = gang.run(f"STEPS = 3\n{save}", world=1)
    assert kept.status == 0 and any(gang.slots_dir.iterdir())
    before = content(gang.slots_dir)
    store = gang.folder / "store"
    _, result = replay(gang, save.replace("{'net': net})", f"{{'net': net}}, store={str(store)!r})"), resume=3)
    assert result.status == 0 and result.said is None, result.err
    assert content(gang.slots_dir) == before
    assert not store.exists()


def test_kernels_are_deterministic_as_far_as_there_are_any(gang: Gang) -> None:
    script = "import random; say([torch.are_deterministic_algorithms_enabled(), random.random(), torch.rand(1).item()])"
    (first,), (second,) = ([replay(gang, script)[1].said] for _ in range(2))
    assert first == second and first[0] is True


def test_a_drill_makes_one_node_compute_wrongly(gang: Gang) -> None:
    right, _ = replay(gang, TRAIN)
    for fault, differs in (
        ("flip:node=node-0,matmul=0", True),
        ("flip:node=node-0,matmul=0,p=0.0", False),
        ("flip:node=node-1,matmul=0", False),
        ("flip:node=node-0,rank=1", False),
    ):
        digest, result = replay(gang, TRAIN, env={"EVERTRAIN_REPLAY_FAULT": fault})
        assert len(digest) == 64 and (digest != right) is differs, result.err
    _, result = replay(gang, TRAIN, env={"EVERTRAIN_REPLAY_FAULT": "flop:node=node-0"})
    assert result.status == 1 and "EVERTRAIN_REPLAY_FAULT: unknown fault 'flop'" in result.err
    (trains,) = gang.run(f"STEPS = 3\n{TRAIN}say(loss.item())", world=1)
    env = {"EVERTRAIN_REPLAY_FAULT": "flip:node=node-0"}
    seeded = TRAIN.replace("net = ", "torch.manual_seed(3); net = ") + "say(loss.item())"
    well, ill = (gang.run(f"STEPS = 3\n{seeded}", world=1, env=more)[0].said for more in ({}, env))
    assert trains.status == 0 and json.dumps(well) != json.dumps(ill), "training itself, too"
