"""What readings of GPUs prove, and what healthy ones may show."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evertrain.detect.gpu import GpuRules
from evertrain.detect.readings import grade
from evertrain.model.sensing import GpuReading, Sign
from support.effort import examples

HEALTHY = GpuReading(
    index=3, uuid="GPU-3", bus="0000:13:00.0", temperature_c=60, slowdown_c=87, pcie_width=16, pcie_width_max=16,
    pcie_generation=5, pcie_generation_max=5, utilisation=99, sm_clock_mhz=1980, ecc_uncorrected=2,
    remapped_uncorrectable=0, remap_pending=False, remap_failed=False, nvlinks_down=(), processes=(4711,),
)  # fmt: skip


def looks(*changes: dict[str, Any], every: float = 3.0, rules: GpuRules | None = None) -> list[tuple[Sign, ...]]:
    """What each of several looks at one GPU gives."""
    rules = rules or GpuRules(boot_id="boot")
    return [
        rules([msgspec.structs.replace(HEALTHY, **change)], 100.0 + every * number)
        for number, change in enumerate(changes)
    ]


def kinds(*changes: dict[str, Any], every: float = 3.0) -> list[list[str]]:
    return [[sign.kind for sign in signs] for signs in looks(*changes, every=every)]


@pytest.mark.parametrize(
    ("change", "kind", "proves"),
    [
        ({"is_lost": True}, "gpu_lost", "fault"),
        ({"remap_failed": True}, "row_remap_failed", "fault"),
        ({"remap_pending": True}, "row_remap_pending", "reading"),
        ({"recovery_action": "GPU reset required"}, "gpu_unavailable", "fault"),
        ({"recovery_action": "node reboot required"}, "gpu_unavailable", "fault"),
        ({"recovery_action": "drain and reset"}, "gpu_recovery", "reading"),
        ({"recovery_action": "drain P2P"}, "gpu_recovery", "reading"),
        ({"xids": (79,)}, "xid_79", "fault"),
        ({"xids": (48, 45, 63)}, "xid_48", "fault"),
        ({"xids": (109,)}, "xid_109", "reading"),
    ],
)
def test_what_is_certain_at_the_first_look(change: dict[str, Any], kind: str, proves: str) -> None:
    [[sign]] = looks(change)
    assert (sign.kind, grade(sign.kind), sign.device, sign.time) == (kind, proves, "0000:13:00.0", 100.0)
    assert sign.evidence.startswith("GPU 3 (0000:13:00.0): ")


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"xids": (13,)},
        {"xids": (31, 43, 45)},
        {"xids": (63,)},
        {"xids": (74,)},
        {"throttle_reasons": ("sw_power_cap",)},
        {"temperature_c": 87},
        {"temperature_c": 86},
        {"slowdown_c": None, "temperature_c": 85},
        {"temperature_c": None},
        {"utilisation": 0, "pcie_generation": 1},
        {"utilisation": 50, "pcie_width": 8},
        {"utilisation": None, "pcie_width": 8},
        {"pcie_width_max": None, "pcie_generation": None, "pcie_width": 8},
        {"nvlinks_down": (4, 5)},
        {"nvlinks_down": None},
        {"ecc_uncorrected": 9},
        {"ecc_uncorrected": None},
        {"remap_failed": None, "remap_pending": None},
    ],
)
def test_a_healthy_gpu_may_look_like_this_for_ever(change: dict[str, Any]) -> None:
    assert kinds(*[change] * 5) == [[]] * 5


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"temperature_c": 88}, "gpu_hot", "88 C, above its slowdown threshold of 87 C"),
        ({"temperature_c": 86, "slowdown_c": None}, "gpu_hot", "86 C, above 85 C"),
        ({"throttle_reasons": ("hw_slowdown", "hw_thermal")}, "gpu_throttled", "hw_slowdown, hw_thermal"),
        ({"pcie_width": 8, "utilisation": 51}, "pcie_degraded", "PCIe at 51 % use: width 8 of 16"),
        ({"pcie_generation": 4}, "pcie_degraded", "generation 4 of 5"),
    ],
)
def test_what_must_last_for_three_looks(change: dict[str, Any], kind: str, says: str) -> None:
    assert kinds(change, change, {}, change, change) == [[]] * 5, "twice and twice again is not three times"
    seen = looks(*[change] * 4)
    assert [[sign.kind for sign in signs] for signs in seen] == [[], [], [kind], [kind]]
    assert says in seen[2][0].evidence
    assert grade(kind) == "reading"
    assert seen[2][0].key == seen[3][0].key
    assert seen[2][0].time == 100.0


def test_looks_that_are_far_apart_are_none_in_a_row() -> None:
    assert kinds(*[{"temperature_c": 95}] * 5, every=60.0) == [[]] * 5


def test_the_same_event_keeps_its_key_and_the_next_one_has_another() -> None:
    lost, back = {"is_lost": True}, dict[str, Any]()
    first, again, _, second = looks(lost, lost, back, lost)
    assert first[0].key == again[0].key == "gpu:GPU-3:gpu_lost:boot"
    assert second[0].key != first[0].key
    restarted = looks(lost)
    assert restarted[0][0].key == first[0].key, "also after the agent was started again"


def test_what_cannot_be_said_for_a_moment_is_not_over() -> None:
    broken, asks = {"remap_failed": True}, {"remap_failed": None, "recovery_action": "GPU reset required"}
    first, between, again, mended, anew = looks(broken, asks, broken, {}, broken)
    assert [sign.kind for sign in between] == ["gpu_unavailable"]
    assert first[0].key == again[0].key
    assert not mended and anew[0].key != first[0].key


def test_errors_accuse_by_growing_and_a_driver_that_was_reloaded_begins_anew() -> None:
    counts = (5, 5, 0, 0, None, 1, 1)
    assert kinds(*({"ecc_uncorrected": count} for count in counts)) == [[], [], [], [], [], ["ecc_uncorrected"], []]


def test_a_link_that_was_up_goes_down() -> None:
    """2 and 3 have no bridge; while the machine starts none is up."""
    downs = ((0, 1, 2, 3), (2, 3), (1, 2, 3), None, (1, 2, 3), (2, 3))
    seen = looks(*({"nvlinks_down": down} for down in downs))
    assert [[sign.kind for sign in signs] for signs in seen] == [[], [], ["nvlink_down"], [], ["nvlink_down"], []]
    assert "NVLink 1 went down" in seen[2][0].evidence
    assert seen[2][0].key == seen[4][0].key


def test_a_code_in_a_burst_is_told_once() -> None:
    burst = looks({"xids": (79, 79)}, {"xids": (79,)}, {}, rules=(rules := GpuRules()))
    assert [len(signs) for signs in burst] == [1, 0, 0]
    [later] = rules([msgspec.structs.replace(HEALTHY, xids=(79,))], 1000.0)
    assert later.key != burst[0][0].key


def test_each_gpu_by_itself() -> None:
    rules = GpuRules()
    cool = msgspec.structs.replace(HEALTHY, index=0, uuid="GPU-0")
    hot = msgspec.structs.replace(HEALTHY, temperature_c=99)
    signs = [rules([cool, hot], at) for at in (0.0, 3.0, 6.0)]
    assert [[sign.device for sign in one] for one in signs] == [[], [], ["0000:13:00.0"]]


some = st.one_of(st.none(), st.integers(0, 200))


@settings(max_examples=examples(30))
@given(
    st.lists(
        st.builds(
            GpuReading,
            index=st.just(0),
            uuid=st.just("u"),
            temperature_c=some,
            slowdown_c=some,
            pcie_width=some,
            pcie_width_max=some,
            utilisation=some,
            ecc_uncorrected=some,
            nvlinks_down=st.one_of(st.none(), st.lists(st.integers(0, 5)).map(tuple)),
        ),
        max_size=8,
    )
)
def test_numbers_alone_never_prove_a_fault(readings: list[GpuReading]) -> None:
    rules = GpuRules()
    signs = [sign for at, reading in enumerate(readings) for sign in rules([reading], 3.0 * at)]
    assert {grade(sign.kind) for sign in signs} <= {"reading"}
