"""How many GPUs does a rank see? Counted without torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from evertrain.cli.sizes import count_gpus, ranks_per_node
from evertrain.model.errors import UsageError


@pytest.fixture
def four_gpus(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "seen"),
    [(None, 4), ("0,1", 2), ("", 0), ("-1", 0), ("2,-1,3", 1), ("0,9,1", 1), ("1,1", 0), ("GPU-a,GPU-b", 2)],
)
def test_cuda_visible_devices_counts_up_to_its_first_invalid_entry(
    four_gpus: Path, visible: str | None, seen: int
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(environ, four_gpus) == seen


def test_amd_devices_are_nodes_with_simd_units(tmp_path: Path) -> None:
    for number, simd in enumerate((0, 256, 256)):
        folder = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"cpu_cores_count 8\nsimd_count {simd}\nmem_banks_count 1\n")
    assert count_gpus({}, tmp_path) == 2
    assert count_gpus({"HIP_VISIBLE_DEVICES": "1"}, tmp_path) == 1


def test_no_device_no_gpu(tmp_path: Path) -> None:
    assert count_gpus({}, tmp_path) == 0


def test_cpu_is_what_the_process_may_use() -> None:
    assert ranks_per_node("cpu", sys.executable, {}) == len(os.sched_getaffinity(0))


@pytest.mark.skipif(count_gpus(os.environ) > 0, reason="this machine has GPUs")
def test_gpu_without_a_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match="no GPU is visible here"):
        ranks_per_node("gpu", sys.executable, {})
