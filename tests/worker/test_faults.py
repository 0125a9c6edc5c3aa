"""What a drill may ask for, and that it happens once, where it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from evertrain.worker import faults
from evertrain.worker.faults import Fault, FaultError, parse

from .gang import Gang


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:rank=2@step=20", Fault(text="", kind="kill", rank=2, point="step", at=20)),
        ("kill", Fault(text="", kind="kill")),
        ("exit:code=3@init", Fault(text="", kind="exit", code=3, point="init")),
        ("raise:rank=1@phase=evaluate", Fault(text="", kind="raise", rank=1, point="evaluate")),
        ("raise:@start", Fault(text="", kind="raise", point="start")),
        ("kill:stage=copied@save=9", Fault(text="", kind="kill", point="save", at=9, stage="copied")),
        ("stop:@save=12", Fault(text="", kind="stop", point="save", at=12)),
        ("slow:factor=2.5,steps=4@step=5", Fault(text="", kind="slow", factor=2.5, steps=4, at=5)),
        ("wipe:node=node-1@step=40", Fault(text="", kind="wipe", node="node-1", at=40)),
        ("gpu-lost:node=1@step=3", Fault(text="", kind="gpu-lost", node="1", at=3)),
        ("network-alert:node=1@step=5", Fault(text="", kind="network-alert", node="1", at=5)),
        ("reading:node=node-1@step=5", Fault(text="", kind="reading", node="node-1", at=5)),
        ("node-loss:node=1@step=6", Fault(text="", kind="node-loss", node="1", at=6)),
        ("node-loss:node=1,for=2.5@step=6", Fault(text="", kind="node-loss", node="1", at=6, for_s=2.5)),
    ],
)
def test_what_is_understood(text: str, fault: Fault) -> None:
    understood = parse(text)
    assert understood.text == text
    assert {**vars(understood), "text": ""} == vars(fault)
    assert understood.on_node == (fault.kind in faults.NODE_KINDS)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "unknown fault ''"),
        ("kil@step=3", "unknown fault 'kil'"),
        ("kill:code=3@step=3", "kill takes rank and stage, not 'code'"),
        ("kill:rank=two@step=3", "rank='two' is not a number"),
        ("kill:rank=-1", "rank=-1 must be a number from 0 on"),
        ("kill@stpe=3", "unknown point 'stpe'"),
        ("kill@step=", "step='' is not a number"),
        ("kill@init=3", "only step and save take a number"),
        ("wipe@step=3", "wipe needs node="),
        ("wipe:node=1,for=3@step=3", "wipe takes node, not 'for'"),
        ("node-loss:node=1,for=ever@step=3", "for='ever' is not a number"),
        ("node-loss:node=1,for=inf@step=3", "for=inf must be a number from 0 on"),
        ("reading@step=3", "reading needs node="),
        ("network-alert:node=1@save=3", "network-alert can only happen at a step"),
        ("wipe:node=1@save=3", "can only happen at a step"),
        ("nan@save=3", "nan can only happen in a step"),
        ("kill:stage=copied@step=3", "stage is one of copying, copied, committed of a save"),
        ("kill:stage=half@save=3", "stage is one of copying, copied, committed of a save"),
        ("raise:stage=copied@save=3", "raise takes rank, not 'stage'"),
        ("slow:factor=1", "factor must be greater than 1"),
    ],
)
def test_what_is_not_understood_is_one_clear_line(text: str, complaint: str) -> None:
    with pytest.raises(FaultError, match=complaint) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_parsing_needs_no_torch() -> None:
    code = "import sys; import evertrain.worker.faults; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_only_this_ranks_own_faults_are_armed(tmp_path: Path) -> None:
    texts = ["kill:rank=1@step=3", "wipe:node=0@step=3"]
    assert not faults.arm(texts, str(tmp_path), rank=0)
    assert faults.arm(texts, str(tmp_path), rank=1)


TRAIN = """
from evertrain.worker import session
join()
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
c = evertrain.Checkpointer({"net": net, "optimizer": optimizer})
start = c.load() or 0
times = []
for step in range(start + 1, 9):
    begun = time.perf_counter()
    time.sleep(0.01)
    optimizer.zero_grad(); net(torch.ones(4)).sum().backward(); optimizer.step()
    times.append(time.perf_counter() - begun)
    evertrain.report(step=step)
    c.save(step)
    say({"step": step, "finite": bool(net.weight.isfinite().all()), "times": times})
    if step == 4:
        with evertrain.phase("evaluate"):
            pass
"""


@pytest.mark.parametrize(
    ("fault", "status", "steps", "phase"),
    [
        ("kill@step=3", -9, 2, "train"),
        ("exit:code=3@step=3", 3, 2, "exit"),
        ("raise@save=3", 1, 2, "exit"),
        ("kill@save=3", -9, 2, "save"),
        ("exit:code=4@init", 4, None, "exit"),
        ("kill@init", -9, None, "init"),
        ("kill@start", -9, None, "start"),
        ("kill@evaluate", -9, 4, "evaluate"),
        ("exit:code=5@exit", 5, 8, "exit"),
        ("raise@exit", 1, 8, "exit"),
    ],
)
def test_a_fault_fires_where_it_should_and_once(
    gang: Gang, fault: str, status: int, steps: int | None, phase: str
) -> None:
    (first,) = gang.run(TRAIN, world=1, faults=[fault])
    assert first.status == status, first.err
    assert (first.said and first.said["step"]) == steps
    assert first.page is not None and first.page.phase == phase
    assert f"evertrain: injected fault {fault}" in first.err
    (second,) = gang.run(TRAIN, world=1, attempt=2, faults=[fault])
    assert second.status == 0 and second.said["step"] == 8, second.err


def test_steps_are_absolute_after_a_restart(gang: Gang) -> None:
    gang.run(TRAIN, world=1)
    (result,) = gang.run(TRAIN, world=1, attempt=2, resume=6, faults=["exit:code=3@step=8"])
    assert result.status == 3 and result.said["step"] == 7


def test_nan(gang: Gang) -> None:
    (result,) = gang.run(TRAIN, world=1, faults=["nan@step=8"])
    assert result.said == {**result.said, "step": 8, "finite": False}


def test_slow_lasts_for_its_steps(gang: Gang) -> None:
    (result,) = gang.run(TRAIN, world=1, faults=["slow:factor=5,steps=2@step=6"])
    times = result.said["times"]
    assert min(times[5:7]) > 0.045 and times[7] < 0.04, times


def test_memory_runs_out_in_this_process_only(gang: Gang) -> None:
    (result,) = gang.run(TRAIN, world=1, faults=["oom@step=3"])
    assert result.status == 1 and "MemoryError" in result.err


@pytest.mark.parametrize("kind", ["stop", "hang"])
def test_stop_and_hang_stay_where_they_are(gang: Gang, kind: str) -> None:
    (result,) = gang.run(TRAIN, world=1, faults=[f"{kind}@step=3"], timeout_s=1.0)
    assert result.status == -9 and result.said["step"] == 2
