"""Which lines of a kernel accuse a machine, once each, and which never do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.detect.catalogue import Catalogue, build
from evertrain.detect.kernel import MAX_KEPT, KernelRules
from evertrain.detect.readings import grade
from evertrain.model.sensing import KernelMessage, Sign
from evertrain.observe import rules

CATALOGUE = build(rules.contents())
XID_79 = "NVRM: Xid (PCI:0000:19:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
XID_74 = "NVRM: Xid (PCI:0000:19:00): 74, pid=1, NVLink: fatal error detected on link 3(0x0, 0x0)"
LOST = "mlx5_core 0000:1a:00.0 ens1f0: Link down"


def messages(*texts: str, at: float = 0.0, every: float = 0.0, first: int = 1, **more: bool) -> list[KernelMessage]:
    return [
        KernelMessage(key=f"kernel:b:{first + number}", time=at + every * number, text=text, **more)
        for number, text in enumerate(texts)
    ]


def told(given: Sequence[KernelMessage], catalogue: Catalogue = CATALOGUE) -> list[Sign]:
    return list(KernelRules(catalogue)(given))


def kinds(*texts: str, every: float = 0.0) -> list[tuple[str, str]]:
    return [(sign.kind, sign.device) for sign in told(messages(*texts, every=every))]


@pytest.mark.parametrize(
    ("text", "kind", "device", "proves"),
    [
        (XID_79, "xid_79", "0000:19:00", "fault"),
        ("NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.", "xid_79", "0000:3b:00", "fault"),
        ("nvidia: the device has fallen off the bus", "xid_79", "", "fault"),
        ("NVRM: Xid (PCI:0000:19:00): 48, pid=7, An uncorrectable double bit error", "xid_48", "0000:19:00", "fault"),
        ("NVRM: Xid (PCI:0000:19:00): 64, Row Remapper: Failed to remap row", "xid_64", "0000:19:00", "fault"),
        ("NVRM: Xid (PCI:0000:19:00): 119, pid=7, Timeout after 6s of waiting", "xid_119", "0000:19:00", "fault"),
        ("NVRM: Xid (PCI:0000:19:00): 109, pid=7, errorString CTX SWITCH TIMEOUT", "xid_109", "0000:19:00", "reading"),
        (
            "NVRM: Xid (PCI:0000:19:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
            "gpu_unavailable",
            "0000:19:00",
            "fault",
        ),
        (
            "NVRM: Xid (PCI:0000:19:00): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)",
            "xid_154",
            "0000:19:00",
            "reading",
        ),
        (
            "nvidia-nvswitch2: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
            "sxid_20034",
            "0000:c1:00.0",
            "reading",
        ),
        ("I/O error, dev nvme2n1, sector 123 op 0x1:(WRITE) flags 0x0", "disk_fault", "nvme2n1", "fault"),
        ("Buffer I/O error on dev nvme2n1p1, logical block 0, async page read", "disk_fault", "nvme2n1p1", "fault"),
        ("blk_update_request: critical medium error, dev sdb, sector 1", "disk_fault", "sdb", "fault"),
        ("I/O error, dev sdb, sector 2048 op 0x0:(READ) flags 0x80700", "disk_warning", "sdb", "condition"),
        ("Buffer I/O error on dev sdb1, logical block 0, async page read", "disk_warning", "sdb1", "condition"),
        ("I/O error, dev nvme2n1, sector 0 op 0x3:(DISCARD) flags 0x800", "disk_warning", "nvme2n1", "condition"),
        ("nvme nvme2: controller is down; will reset: CSTS=0xffffffff", "disk_fault", "nvme2", "fault"),
        ("nvme nvme0: I/O 13 QID 4 timeout, aborting", "disk_warning", "nvme0", "condition"),
        ("EXT4-fs error (device nvme0n1p1): ext4_find_entry:1455", "disk_warning", "nvme0n1p1", "condition"),
        ("BUG: unable to handle page fault for address: ffff8f", "kernel_panic", "", "fault"),
        ("Kernel panic - not syncing: Fatal exception", "kernel_panic", "", "fault"),
        ("watchdog: BUG: soft lockup - CPU#12 stuck for 23s! [python:1231]", "kernel_stall", "", "condition"),
        ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0", "host_memory_error", "", "reading"),
        ("pcieport 0000:40:01.1: pciehp: Slot(4): Link Down", "pcie_error", "0000:40:01.1", "reading"),
        (
            "mlx5_core 0000:1a:00.0: device's health compromised - reached miss count",
            "nic_down",
            "0000:1a:00.0",
            "network",
        ),
    ],
)
def test_a_line_that_accuses(text: str, kind: str, device: str, proves: str) -> None:
    [sign] = told(messages(f"[  123.456789] {text}"))
    assert (sign.kind, sign.device, grade(sign.kind)) == (kind, device, proves)
    assert text in sign.evidence
    assert sign.key == "kernel:b:1"


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: Xid (PCI:0000:19:00): 13, pid=1, Graphics SM Warp Exception on (GPC 1, TPC 2, SM 0): Out Of Range",
        "NVRM: Xid (PCI:0000:19:00): 31, pid=1, name=python, Ch 8, intr 0. MMU Fault: ENGINE GRAPHICS faulted",
        "NVRM: Xid (PCI:0000:19:00): 43, pid=1, name=python, Ch 00000008",
        "NVRM: Xid (PCI:0000:19:00): 45, pid=1, name=python, Ch 00000008",
        "NVRM: Xid (PCI:0000:19:00): 63, Row Remapper: New row marked for remapping, reset gpu to activate",
        XID_74,
        "NVRM: Xid (PCI:0000:19:00): 149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 02 (0x1 0x2 0x3 0x4)",
        "nvidia-nvswitch2: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 3 egress non-posted PRIV error (First)",
        "Out of memory: Killed process 9121 (python) total-vm:231231kB",
        "python[31178]: segfault at ffffffffffffffff ip 00007f059bfaf854 error 5 in libpython3.11.so",
        "traps: python[77] general protection fault ip:7f00 sp:7ffc error:0 in libtorch_cpu.so[7f+1000]",
        "mce: CPU12: Package temperature above threshold, cpu clock throttled (total events = 1)",
        "EDAC MC0: 3 CE memory read error on CPU_SrcID#0",
        "pcieport 0000:e0:06.0: AER: Corrected error received: 0000:e1:00.0",
        "nvme 0000:81:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer",
        "Buffer I/O error on dev fd0, logical block 0, async page read",
        "INFO: task python:280058 blocked for more than 120 seconds.",
        "EXT4-fs (vda): mounted filesystem r/w without journal. Quota mode: none.",
        LOST,
        "mlx5_core 0000:1a:00.0: mlx5_cmd_out_err: ACCESS_REG(0x805) op_mod(0x1) failed, status bad parameter",
        "NVRM: API mismatch: the client has the version 535.129.03, but this kernel module has 550.54.15",
    ],
)
def test_a_line_that_accuses_nobody(text: str) -> None:
    assert kinds(text) == []


def test_a_lost_gpu_in_three_lines_without_a_code_even_in_three_looks() -> None:
    rules_ = KernelRules(CATALOGUE)
    texts = (
        "NVRM: The NVIDIA GPU 0000:65:00.0",
        "NVRM: (PCI ID: 10de:2330) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    )
    signs = [sign for number, text in enumerate(texts, 1) for sign in rules_(messages(text, first=number))]
    assert [(sign.kind, sign.device) for sign in signs] == [("xid_79", "0000:65:00")]


def test_many_lines_of_one_event_are_one_sign_and_a_later_one_is_another() -> None:
    once = messages(*[XID_79] * 5, at=100.0, every=10.0)
    again = messages(XID_79, at=300.0, first=50)
    signs = told(once + again)
    assert [(sign.key, sign.time) for sign in signs] == [("kernel:b:1", 100.0), ("kernel:b:50", 300.0)]


def test_eight_gpus_at_once_are_eight_signs() -> None:
    texts = [XID_79.replace("0000:19", f"0000:{bus:02x}") for bus in range(0x10, 0x90, 0x10)]
    assert len(kinds(*(text for text in texts for _ in range(3)))) == 8


def test_what_only_repetition_makes_certain() -> None:
    assert kinds(XID_74, XID_74, every=30.0) == []
    assert kinds(XID_74, XID_74, every=90.0) == [("xid_74", "0000:19:00")]
    assert kinds(*[LOST] * 5, every=90.0) == []
    assert kinds(*[LOST] * 6, every=90.0) == [("link_flap", "0000:1a:00.0")]
    assert kinds(*[LOST] * 6, every=1000.0) == [], "not within an hour"


def test_a_broken_kernel_is_told_once_though_it_says_so_in_many_lines() -> None:
    assert kinds("BUG: unable to handle page fault for address: ffff", "Oops: 0002 [#1] PREEMPT SMP") == [
        ("kernel_panic", "")
    ]


def test_what_was_told_before_the_restart_is_no_news_but_gives_later_lines_their_meaning() -> None:
    before = messages(XID_79, XID_74, at=0.0, is_told=True)
    after = messages(XID_79, at=30.0, first=7) + messages(XID_74, at=90.0, first=8)
    assert [(sign.kind, sign.key) for sign in told(before + after)] == [("xid_74", "kernel:b:8")]


def test_of_what_programs_write_into_the_log_only_the_drivers_own_form_counts() -> None:
    assert told(messages("Kernel panic - not syncing", "I/O error, dev sda, sector 1", LOST, is_own=False)) == []
    assert [sign.kind for sign in told(messages(XID_79, is_own=False))] == ["xid_79"]


def test_rules_of_users_go_by_their_names() -> None:
    own = {"rule": "fan-stopped", "pattern": "fan stopped", "category": "host_os", "action": "evict",
           "culprit": "host", "confidence": 0.9}  # fmt: skip
    signs = told(messages("ourdev: fan stopped"), build([([own], "ours.yaml")]))
    assert [(sign.kind, grade(sign.kind)) for sign in signs] == [("fan_stopped", "reading")]


def test_a_flood_is_bounded() -> None:
    rules_ = KernelRules(CATALOGUE)
    flood = messages(*(f"{LOST} {number}" for number in range(3000)), every=0.001)
    assert [sign.kind for sign in rules_(flood)] == ["link_flap"]
    assert len(rules_._nic_lines) <= MAX_KEPT + 1


@given(st.lists(st.text(max_size=80), max_size=5))
def test_any_text_may_come(texts: list[str]) -> None:
    assert all(sign.kind for sign in told(messages(*texts)))
