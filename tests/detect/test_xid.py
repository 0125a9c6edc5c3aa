"""Xid lines by rule: decodes, repeats, and several codes on one GPU."""

from __future__ import annotations

import pytest

from evertrain.detect.xid import Event, Kernel, judge
from evertrain.model.findings import Finding
from evertrain.model.signals import Line


def read(*texts: str, host: str | None = "node-3", step_s: float = 1.0) -> list[Event]:
    kernel = Kernel()
    for number, text in enumerate(texts):
        kernel.read(Line(text=text, raw=text, order=number + 1, host=host, clock=number * step_s))
    return kernel.events


def judged(*texts: str, died: bool = False, step_s: float = 1.0) -> dict[str, Finding]:
    return {one.rule: one for one in judge(read(*texts, step_s=step_s), job_died=died, host=None)}


def xid(code: int, text: str = "", gpu: str = "0000:19:00", pid: int = 7) -> str:
    return f"NVRM: Xid (PCI:{gpu}): {code}, pid={pid}, name=python, {text}"


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:0000:19:00): 62, pid='<unknown>', name=<unknown>, 2023b230 20238a3a",
        "NVRM: Xid (PCI:0000:19:00): 62, pid=12, 2023b230",
        "NVRM: Xid (0000:19:00): 62, Channel 00000001",
        "NVRM: Xid (PCI:0000:19:00.0): 62",
    ],
)
def test_every_layout_of_a_line(line: str) -> None:
    (event,) = read(line)
    assert (event.code, event.gpu) == (62, "0000:19:00")


def test_a_lost_gpu_without_a_code_is_spread_over_three_lines() -> None:
    (event,) = read(
        "NVRM: The NVIDIA GPU 0000:b3:00.0",
        "               NVRM: (PCI ID: 10de:26b5) installed in this system has",
        "               NVRM: fallen off the bus and is not responding to commands.",
    )
    assert (event.code, event.gpu) == (79, "0000:b3:00")


def test_the_lines_of_another_host_are_not_joined() -> None:
    kernel = Kernel()
    kernel.read(Line(text="", raw="NVRM: The NVIDIA GPU 0000:b3:00.0", order=1, host="node-1"))
    kernel.read(Line(text="", raw="NVRM: fallen off the bus and is not responding.", order=2, host="node-2"))
    assert kernel.events == []


def test_followers_convict_nobody() -> None:
    found = judged(xid(31, "MMU Fault"), xid(43, "Ch 00000008"), xid(45, "Ch 00000008"))
    assert found["xid-31"].action == "user_code"
    assert found["xid-43"].is_benign and found["xid-45"].is_benign


@pytest.mark.parametrize(("gap_s", "action"), [(1.0, "user_code"), (4000.0, "evict")])
def test_one_processor_at_different_times_is_hardware(gap_s: float, action: str) -> None:
    line = xid(13, "Graphics SM Warp Exception on (GPC 3, TPC 1, SM 0): Illegal Instruction Encoding")
    assert judged(line, line, line, step_s=gap_s)["xid-13"].action == action


def test_different_processors_are_the_program() -> None:
    lines = [xid(13, f"Graphics SM Warp Exception on (GPC {n}, TPC 1, SM 0): Out Of Range Address") for n in range(3)]
    assert judged(*lines, step_s=4000.0)["xid-13"].action == "user_code"


def test_faults_of_one_gpu_in_several_runs_are_hardware_and_of_two_gpus_are_not() -> None:
    again = [xid(31, "MMU Fault", pid=n) for n in range(3)]
    assert judged(*again, step_s=4000.0)["xid-31"].action == "evict"
    other = xid(31, "MMU Fault", gpu="0000:5d:00")
    findings = judge(read(*again, other, step_s=4000.0), job_died=True, host=None)
    assert {one.action for one in findings} == {"user_code"}


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("NETIR_LINK_DOWN Fatal XC0 i0 Link 14 (0x0001c5c6 0x00000000 0x0 0x0 0x0 0x0 0x0)", "evict"),
        ("NETIR_LINK_EVT  Fatal XC0 i0 Link -1 (0x028001c6 0x00000000 0x0 0x0)", "none"),  # reason 101000: ignore
        ("NETIR_LINK_EVT  Fatal XC0 i0 Link 03 (0x022001c6 0x00000000 0x0 0x0)", "human"),  # the peer went down
        ("NETIR_LINK_EVT  Fatal XC0 i0 Link 03 (0x00a00011 0x00000000 0x0 0x0)", "evict"),  # signal integrity
        ("NETIR_BER_EVENT Fatal XC0 i0 Link 03 (0x00000013 0x00000000 0x0 0x0)", "none"),
    ],
)
def test_the_word_fatal_does_not_decide_alone(text: str, action: str) -> None:
    assert judged(xid(149, text))["xid-149"].action == action


def test_a_nonfatal_error_counts_when_the_driver_ended_what_used_it() -> None:
    line = xid(145, "RLW_REMAP Nonfatal XC0 i0 Link 00 (0x00000004 0x00000004 0x0 0x0 0x0 0x0)")
    assert judged(line)["xid-145"].is_benign
    assert judged(line, xid(45, "Ch 00000001 caused by previous Xid 145"))["xid-145"].action == "evict"


def test_the_drivers_own_conclusion() -> None:
    ordered = xid(154, "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)")
    taken_back = xid(154, "GPU recovery action changed from 0x4 (Drain and Reset) to 0x0 (None)")
    assert judged(ordered)["xid-154"].action == "evict"
    assert judged(taken_back)["xid-154"].is_benign


def test_a_code_without_a_rule_is_evidence_only() -> None:
    assert judged(xid(113))["xid-113"].action == "human"
