"""DCGM's diagnostics of both generations, by a fake `dcgmi`, and settings that they change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evertrain.diagnose import vendor
from support.fleet import Fleet

DCGM_3 = {
    "DCGM GPU Diagnostic": {
        "test_categories": [
            {"category": "Deployment", "tests": [{"name": "Denylist", "results": [{"status": "Pass"}]}]},
            {
                "category": "Hardware",
                "tests": [
                    {
                        "name": "GPU Memory",
                        "results": [
                            {"gpu_id": "0", "status": "Pass", "info": "Allocated"},
                            {"gpu_id": "1", "status": "Fail", "warnings": "GPU 1: memory mismatch"},
                        ],
                    },
                    {"name": "Pulse Test", "results": [{"gpu_id": "0,1", "status": "Skip"}]},
                ],
            },
        ]
    }
}
DCGM_4 = {
    "DCGM Diagnostic": {
        "test_categories": [
            {
                "category": "Stress",
                "tests": [
                    {
                        "name": "targeted_power",
                        "results": [
                            {"entity_group": "GPU", "entity_id": 0, "status": "Pass"},
                            {
                                "entity_group": "GPU", "entity_id": 3, "status": "Fail",
                                "warnings": [{"error_id": 41, "warning": "power too low"}, {"warning": "and hot"}],
                            },
                        ],
                        "test_summary": {"status": "Fail"},
                    }
                ],
            }
        ]
    }
}  # fmt: skip
SETTINGS = "GPU-a, Enabled, Default, 700.00 W, {clock} MHz, 2619 MHz, Enabled, Disabled"


def program(folder: Path, name: str, script: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


def tools(folder: Path, report: dict[str, Any], *, clocks: tuple[int, int] = (1980, 1980)) -> dict[str, str]:
    (folder / "report").write_text("warming up\n" + json.dumps(report))
    flag = folder / "has-run"
    before, after = (SETTINGS.format(clock=clock) for clock in clocks)
    return {
        "dcgmi": program(
            folder, "dcgmi", f'[ "$*" = "diag -r 2 -j" ] || exit 9; touch {flag}; cat {folder}/report; exit 226'
        ),
        "nvidia_smi": program(folder, "nvidia-smi", f'if [ -e {flag} ]; then echo "{after}"; else echo "{before}"; fi'),
    }


def test_the_older_generation(fleet: Fleet, tmp_path: Path) -> None:
    done = fleet.node("a", ranks=2).test("vendor", level=2, **tools(tmp_path, DCGM_3))
    assert done.outcome == "failed" and done.because == "rank 0: dcgm GPU Memory: GPU 1: GPU 1: memory mismatch"
    told = [(one["name"], one["detail"].get("device"), one["ok"]) for one in done.readings]
    assert told == [
        ("dcgm Denylist", "node", True), ("dcgm GPU Memory", "GPU 0", True), ("dcgm GPU Memory", "GPU 1", False),
        ("dcgm Pulse Test", "GPU 0,1", None), ("settings", None, True),
    ]  # fmt: skip


def test_the_newer_generation(fleet: Fleet, tmp_path: Path) -> None:
    done = fleet.node("a").test("vendor", level=2, **tools(tmp_path, DCGM_4))
    assert done.because == "rank 0: dcgm targeted_power: GPU 3: power too low; and hot"


def test_a_diagnostic_that_changes_settings_is_told_of(fleet: Fleet, tmp_path: Path) -> None:
    good = {"DCGM Diagnostic": {"test_categories": []}}
    good["DCGM Diagnostic"]["test_categories"] = [{"tests": [{"name": "software", "results": [{"status": "Pass"}]}]}]
    done = fleet.node("a").test("vendor", level=2, **tools(tmp_path, good, clocks=(1500, 1980)))
    assert done.outcome == "failed"
    assert "GPU-a clocks.applications.graphics: 1500 MHz before, 1980 MHz after" in done.because


def test_no_dcgm_and_one_that_does_not_work(fleet: Fleet, tmp_path: Path) -> None:
    node = fleet.node("a")
    assert node.test("vendor", dcgmi="no-such-dcgmi").outcome == "absent"
    broken = program(tmp_path, "dcgmi", "echo 'Error: unable to connect to host engine' >&2; exit 1")
    done = node.test("vendor", dcgmi=broken)
    assert done.outcome == "absent" and "unable to connect to host engine" in done.because
    slow = program(tmp_path, "slow-dcgmi", "exec sleep 100")
    assert node.test("vendor", dcgmi=slow, budget_s=1.2).outcome in ("crashed", "late")


def test_reports_that_make_no_sense() -> None:
    for text in ("", "{", "[]", '{"a": 1}', '{"a": {"test_categories": []}}', "no json {"):
        assert list(vendor.parse(text)) == []
