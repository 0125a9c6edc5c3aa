"""How much a signal proves by its kind; what nobody knows never proves a fault."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.cli.drills import REPORTED
from evertrain.detect.readings import FAULTS, METRICS, NETWORK, grade
from evertrain.model.metrics import MetricKind


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("gpu_lost", "fault"),
        ("xid_79", "fault"),
        ("xid_63", "reading"),
        ("network_alert", "network"),
        ("switch_down", "network"),
        ("hardware_reading", "reading"),
        ("gpu_temperature", "reading"),
        ("loss_not_finite", "metric"),
        ("hot_and_slow", "metric"),
        ("blind", "blind"),
        ("blind_nvml", "blind"),
    ],
)
def test_kinds(kind: str, expected: str) -> None:
    assert grade(kind) == expected


@given(st.text())
def test_what_nobody_knows_is_no_fault(kind: str) -> None:
    if kind not in FAULTS:
        assert grade(kind) != "fault"


def test_what_training_reports_proves_nothing_about_a_machine() -> None:
    assert set(get_args(MetricKind)) == METRICS


def test_drills_are_what_they_are_called() -> None:
    assert {name: grade(kind) for name, kind in REPORTED.items()} == {
        "gpu-lost": "fault",
        "network-alert": "network",
        "reading": "reading",
    }


def test_every_kind_that_proves_something_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "signals.md").read_text()
    assert [kind for kind in sorted(FAULTS | NETWORK) if f"`{kind}`" not in text] == []
