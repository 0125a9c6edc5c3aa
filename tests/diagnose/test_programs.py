"""Compute, memory, transfer and storage: what healthy nodes say, and what faulty ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evertrain.diagnose import bench, compute, memory
from support.fleet import Fleet

FAST = {"size": 48, "dtypes": ["float32", "bfloat16", "float16"]}


def test_a_healthy_device_multiplies_exactly(fleet: Fleet) -> None:
    done = fleet.node("a", ranks=2).test("compute", **FAST)
    assert done.outcome == "passed" and len(done.readings) == 12
    for one in done.readings:
        assert one["ok"] and one["value"] > 0 and one["unit"] == "GFLOP/s" and len(one["detail"]["digests"]) == 1
    # the ranks compute the same
    assert len({tuple(one["detail"]["digests"]) for one in done.named("matmul bfloat16 fraction")}) == 1


@pytest.mark.parametrize("bit", [0, 2])
def test_a_flipped_bit_is_seen_in_every_type(fleet: Fleet, bit: int) -> None:
    done = fleet.node("a", ranks=2, fault=f"flip:node=a,rank=1,bit={bit}").test("compute", **FAST)
    assert done.outcome == "failed" and done.because.startswith("rank 1: matmul")
    assert {(one["rank"], one["ok"]) for one in done.readings} == {(0, True), (1, False)}
    assert all(one["detail"]["wrong"] == 3 for one in done.readings if one["rank"] == 1)


def test_a_low_bit_is_seen_by_exact_results_and_now_and_then_by_repeats(fleet: Fleet) -> None:
    done = fleet.node("a", fault="flip:node=a,bit=20").test("compute", size=48, dtypes=["float32"])
    (whole,), (fraction,) = done.named("matmul float32 whole"), done.named("matmul float32 fraction")
    assert not whole["ok"] and fraction["ok"]
    done = fleet.node("a", fault="flip:node=a,bit=20,p=0.5,seed=1").test(
        "compute", size=48, dtypes=["float32"], rounds=20
    )
    assert "20 runs gave 2 results" in done.named("matmul float32 fraction")[0]["detail"]["because"]


def test_not_a_number_is_wrong() -> None:
    a = torch.ones(4, 4)
    result = a @ a
    result[1, 2] = float("nan")
    assert compute._compare([result], a, a, "fraction")[0] == 1
    assert compute._compare([a @ a], a, a, "whole") == (0, 0.0)


def test_numbers_are_the_same_on_every_machine() -> None:
    # as PyTorch's Mersenne Twister gives them, which does not depend on the processor
    assert bench.digest(bench.fractions((100, 7), 0.5, "weights")) == "6d6a82ac45eca263"
    assert float(bench.fractions((1000,), 0.25, "y").abs().max()) <= 0.25


def test_memory_keeps_its_patterns(fleet: Fleet) -> None:
    done = fleet.node("a").test("memory", size_bytes=1 << 20)
    assert done.outcome == "passed" and [one["name"] for one in done.readings] == [
        f"pattern {one}" for one in memory.PATTERNS
    ]


@pytest.mark.parametrize("name", list(memory.PATTERNS))
def test_one_changed_word_is_counted_and_found(name: str) -> None:
    chunks = [torch.empty(100, dtype=torch.int64), torch.empty(50, dtype=torch.int64)]
    memory.write(chunks, memory.PATTERNS[name])
    assert memory.check(chunks, memory.PATTERNS[name]) == (0, -1)
    chunks[1][7] ^= 1 << 40
    chunks[1][9] ^= 1
    assert memory.check(chunks, memory.PATTERNS[name]) == (2, 107)


def test_transfer(fleet: Fleet) -> None:
    done = fleet.node("a", ranks=2).test("transfer", size_bytes=3_000_001, rounds=2)
    assert done.outcome == "passed" and len(done.named("to device")) == len(done.named("from device")) == 2


def test_storage_leaves_nothing_behind(fleet: Fleet, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    done = fleet.node("a", ranks=2).test("storage", folder=str(folder), size_bytes=3_000_001)
    assert done.outcome == "passed" and [one["name"] for one in done.readings] == ["write", "read"]
    assert all(one["value"] > 0 for one in done.readings) and list(folder.iterdir()) == []


def test_storage_that_is_missing_or_takes_nothing(fleet: Fleet) -> None:
    node = fleet.node("a")
    assert node.test("storage", folder="/nowhere").outcome == "absent"
    done = node.test("storage", folder="/proc")
    assert done.outcome == "failed" and "/proc" in done.because
