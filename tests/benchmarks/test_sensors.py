"""What the benchmark of the sensors reads out of a controller's log, and makes of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import sensors
from sensors import Job, NotSeen

LOG = """\
2026-11-30 13:09:54 INFO evertrain.controller.conductor: NodeChanged(time=100.0, node='node', state='active')
2026-11-30 13:09:54 INFO evertrain.controller.conductor: SignalRaised(time=101.5, node='node', signal='xid_79')
2026-11-30 13:09:54 INFO evertrain.controller.conductor: SignalRaised(time=107.25, node='node', signal='xid_48')
"""


def test_the_first_signal_after_the_fault_that_has_all_the_words_counts(tmp_path: Path) -> None:
    job = Job(tmp_path, None, "", on_network=False)
    job._log.parent.mkdir(parents=True)
    job._log.write_text(LOG)

    def begin() -> float:
        with job._log.open("a") as log:
            log.write("SignalRaised(time=110.0, signal='xid_13', evidence='GPU 1')\n")
            log.write("SignalRaised(time=112.5, signal='xid_79', evidence='GPU 1')\n")
        return 110.25

    assert job.seconds_to_signal(begin, "xid_79", "GPU 1") == pytest.approx(2.25)


def test_what_leads_to_nothing_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensors, "SIGNAL_LIMIT_S", 0.05)
    job = Job(tmp_path, None, "", on_network=False)
    job._log.parent.mkdir(parents=True)
    job._log.write_text(LOG)
    with pytest.raises(NotSeen, match="xid_79"):
        job.seconds_to_signal(lambda: 99.0, "xid_79")


def test_figures() -> None:
    figures, samples = sensors.figures_of({"kernel": [0.5, 0.1, 0.3], "remap": []}, {"kernel": 0.04, "gpu": 0.2})
    assert figures == pytest.approx(
        {
            "kernel_p50_s": 0.3,
            "kernel_max_s": 0.5,
            "cost_percent_kernel": 0.04,
            "cost_percent_gpu": 0.2,
            "cost_percent_all": 0.24,
        }
    )
    assert samples["kernel_max_s"] == 3 and samples["cost_percent_all"] == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may have namespaces")
def test_without_root_it_says_why_the_network_is_left_out() -> None:
    assert "root" in sensors.why_no_namespaces()
