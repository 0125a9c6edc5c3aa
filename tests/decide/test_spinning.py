"""Who uses processor time and does not move: only who waits at one place, and touches nothing meanwhile."""

from __future__ import annotations

from msgspec.structs import replace

from evertrain.decide.spinning import standing
from evertrain.model.config import HangConfig
from support.stuck import LOOP, Job

SYNCHRONIZE = ("synchronize (torch/cuda/__init__.py:1000)", "step (train.py:40)", "main (train.py:90)")


def test_a_device_is_waited_for_at_full_cpu() -> None:
    job = Job({"dp": 4})
    job.outside(2, SYNCHRONIZE, "active", cpu=1.0)
    earlier, now = job.merged(1), job.merged(2)
    assert 2 in standing(now, earlier, HangConfig())
    assert standing(now, None, HangConfig()) == (), "one look does not tell"


def test_who_computes_reads_or_was_elsewhere_before_is_at_work() -> None:
    job = Job({"dp": 4})
    job.outside(1, LOOP, "active", cpu=1.0)
    job.outside(2, SYNCHRONIZE, "active", cpu=1.0)
    job.outside(3, SYNCHRONIZE, "active", cpu=1.0)
    job.activities[3] = replace(job.activities[3], io_bytes_per_s=1e6)
    earlier = job.merged(1)
    assert {1, 3}.isdisjoint(standing(job.merged(2), earlier, HangConfig()))
    job.outside(2, ("item (torch/_tensor.py:9)", "evaluate (train.py:50)", "main (train.py:91)"), "active", cpu=1.0)
    assert 2 not in standing(job.merged(2), earlier, HangConfig())
    assert standing(replace(job.merged(2), attempt=2), earlier, HangConfig()) == ()
