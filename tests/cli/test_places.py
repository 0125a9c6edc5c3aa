"""Where things lie, also when the run dir is on a network file system or cannot be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cli.plans import plan
from evertrain.cli import mounts, places
from evertrain.model.errors import TroubleError

TABLE = """\
/dev/vda / ext4 rw 0 0
server:/home /home nfs4 rw,vers=4.2 0 0
/dev/vdb /home/local ext4 rw 0 0
scratch /mnt/with\\040space lustre rw 0 0
sshfs /mnt/ssh fuse.sshfs rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
C:\\134 /mnt/c 9p rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "network"),
    [
        ("/data/runs", False),
        ("/home/me/runs", True),
        ("/homestead", False),
        ("/home/local/runs", False),
        ("/mnt/with space/runs", True),
        ("/mnt/ssh", True),
        ("/dev/shm/runs", False),
        ("/mnt/c/Users", True),
    ],
)
def test_the_longest_mount_point_decides(folder: str, network: bool) -> None:
    assert mounts.is_network(Path(folder), TABLE) is network


def test_on_nfs_lock_and_database_go_to_a_node_local_folder() -> None:
    here = places.of(plan(Path("/home/me/runs")), "job-123abc", TABLE)
    local = Path(f"/var/tmp/evertrain-{os.getuid()}")
    assert here.database.is_relative_to(local) and here.lock.is_relative_to(local)
    assert here.run_dir == Path("/home/me/runs/job")
    assert here.token.is_relative_to(here.run_dir) and here.log_root.is_relative_to(here.run_dir)
    assert here.node_dir("node-0") == Path(f"/dev/shm/evertrain-{os.getuid()}/job-123abc/node-0")
    # jobs of one name in two folders are two jobs
    assert places.of(plan(Path("/home/you")), "job-123abc", TABLE).database != here.database


def test_elsewhere_everything_is_in_the_run_dir(tmp_path: Path) -> None:
    here = places.of(plan(tmp_path), "job-123abc")
    assert {here.database.parent, here.lock.parent, here.result.parent} == {tmp_path / "job"}


def test_a_log_dir_has_a_folder_for_each_run(tmp_path: Path) -> None:
    assert places.of(plan(tmp_path, log_dir=Path("/logs")), "job-123abc").log_root == Path("/logs/job-123abc")


def test_the_default_root_ignores_itself_for_git(tmp_path: Path) -> None:
    places.make_run_dir(places.of(plan(tmp_path / ".evertrain"), "job-1"))
    assert (tmp_path / ".evertrain" / ".gitignore").read_text() == "*\n"
    places.make_run_dir(places.of(plan(tmp_path / "runs"), "job-1"))
    assert not (tmp_path / "runs" / ".gitignore").exists()


def test_a_root_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TroubleError, match="--run-dir names another place"):
        places.make_run_dir(places.of(plan(tmp_path / "file"), "job-1"))


def test_a_folder_that_somebody_else_could_write_is_refused(tmp_path: Path) -> None:
    places.private(tmp_path / "mine")
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(TroubleError, match="open to others"):
        places.private(tmp_path / "open")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(TroubleError):
        places.private(tmp_path / "link")
