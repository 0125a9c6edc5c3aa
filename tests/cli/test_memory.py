"""Too little shared memory is said before the first step, with the numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evertrain.cli import memory
from evertrain.model.errors import TroubleError
from evertrain.worker import page


def test_a_page_fits_the_estimate() -> None:
    assert page.SIZE <= memory.PAGE_BYTES


def test_the_need_grows_with_ranks_and_nodes() -> None:
    one = memory.need_bytes(1, 1)
    assert memory.need_bytes(2, 1) == 2 * one
    assert one < memory.need_bytes(1, 8) < 1 << 20


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def cgroup_room(root: Path) -> list[int]:
    return [room.free_bytes for room in memory.rooms(root=root) if "cgroup" in room.where]


def test_cgroup_version_2_all_the_way_up(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/slice/job\n")
    write(tmp_path / "sys/fs/cgroup/slice/job/memory.max", "max\n")
    write(tmp_path / "sys/fs/cgroup/slice/job/memory.current", "100\n")
    write(tmp_path / "sys/fs/cgroup/slice/memory.max", "1000\n")
    write(tmp_path / "sys/fs/cgroup/slice/memory.current", "400\n")
    assert cgroup_room(tmp_path) == [600]


def test_cgroup_version_1_where_no_limit_is_a_large_number(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "4:cpu:/\n3:hugetlb,memory:/job\n0::/\n")
    write(tmp_path / "sys/fs/cgroup/memory/job/memory.limit_in_bytes", "5000\n")
    write(tmp_path / "sys/fs/cgroup/memory/job/memory.usage_in_bytes", "6000\n")
    write(tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path / "sys/fs/cgroup/memory/memory.usage_in_bytes", "6000\n")
    assert cgroup_room(tmp_path) == [0]


def test_the_line_names_need_and_room() -> None:
    with pytest.raises(TroubleError, match=r"need 1048576\.0 GiB of shared memory, but .* has .* free"):
        memory.check(1 << 50)


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_tmpfs_is_refused_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    inside = (
        "mount -t tmpfs -o size=64m tmpfs /dev/shm && dd if=/dev/zero of=/dev/shm/fill bs=1M count=64 2>/dev/null; "
        f"exec {sys.executable} -m evertrain run --nproc-per-node 4 train.py"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", inside], cwd=tmp_path, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "the ranks' pages need 304.0 KiB of shared memory, but /dev/shm has 0 bytes free" in done.stderr
