"""A node's part of an upload is one process, which ends with its order and says what went wrong."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from evertrain.agent.uploads import Uploads
from evertrain.checkpoint import content, disk
from evertrain.model.copies import UploadOrder
from evertrain.model.spec import AgentSpec
from support.slots import slot

PYTHON = """#!/bin/sh
cp "$3" {folder}/order-$(ls {folder} | grep -c order-).json
echo $$ > {folder}/pid
if [ -e {folder}/hang ]; then exec sleep 60; fi
if [ -e {folder}/fail ]; then echo Traceback >&2; echo no such bucket >&2; exit 1; fi
"""
ORDER = UploadOrder(name="u1", attempt=1, step=4, folder="s3://b/x", world_size=2, writers=1)


class Node:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for rank in (0, 1):
            slot(folder / "slots", rank, 4)
        assert disk.flush(sorted((folder / "slots").glob("r*/*")), folder / "disk") == ()
        python = folder / "python"
        python.write_text(PYTHON.format(folder=folder))
        python.chmod(0o700)
        spec = AgentSpec(
            job="job", run_id="r", node="node-0", node_dir=str(folder), disk_dir=str(folder / "disk"),
            log_root=str(folder / "logs"), controller_url="", token_file="", fired_dir="", python=str(python),
        )  # fmt: skip
        self.uploads = Uploads(spec, lambda: None)

    @property
    def state(self) -> str | None:
        return self.uploads.report.state if self.uploads.report is not None else None

    def orders(self) -> list[dict[str, object]]:
        return [json.loads(file.read_bytes()) for file in sorted(self.folder.glob("order-*.json"))]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0.01)


async def test_writes_then_finishes(node: Node) -> None:
    node.uploads.obey(ORDER, (0, 1))
    node.uploads.obey(ORDER, (0, 1))
    assert node.state == "running"
    await until(lambda: node.state == "written")
    node.uploads.obey(replace(ORDER, finish=True), (0, 1))
    await until(lambda: node.state == "finished")
    wrote, finished = node.orders()
    assert len(wrote["paths"]) == 2  # type: ignore[arg-type]
    assert (wrote["finish"], finished["finish"], finished["paths"]) == (False, True, [])
    assert wrote["parent"] == os.getpid() and wrote["folder"] == "s3://b/x"
    node.uploads.obey(None, ())
    assert node.state is None


async def test_a_step_that_the_disk_gives_up_meanwhile_is_still_there_for_its_upload(node: Node) -> None:
    (node.folder / "hang").touch()
    node.uploads.obey(ORDER, (0, 1))
    await until(lambda: (node.folder / "pid").exists())
    shutil.rmtree(node.folder / "disk" / "step-000000000004")
    (order,) = node.orders()
    assert [content.check(path) for path in order["paths"]] == ["", ""]  # type: ignore[attr-defined]
    node.uploads.obey(None, ())
    await until(lambda: not list((node.folder / "disk").iterdir()))


async def test_a_failure_is_told_in_its_last_line(node: Node) -> None:
    (node.folder / "fail").touch()
    node.uploads.obey(ORDER, (0, 1))
    await until(lambda: node.state == "failed")
    assert node.uploads.report is not None and node.uploads.report.because == "no such bucket"
    assert "Traceback" in (node.folder / "logs" / "upload-node-0.log").read_text()


async def test_a_step_that_has_gone_is_told(node: Node) -> None:
    node.uploads.obey(UploadOrder(name="u2", attempt=1, step=5, folder="", world_size=2, writers=1), (0, 1))
    await until(lambda: node.state == "failed")
    assert node.uploads.report is not None
    assert node.uploads.report.because == "step 5 is no longer on this node's disk"


async def test_what_is_given_up_is_killed(node: Node) -> None:
    (node.folder / "hang").touch()
    node.uploads.obey(ORDER, (0, 1))
    await until(lambda: (node.folder / "pid").exists() and (node.folder / "pid").read_text())
    pid = int((node.folder / "pid").read_text())
    node.uploads.obey(None, ())
    await until(lambda: not _lives(pid))
    assert node.state is None
    (node.folder / "hang").unlink()
    # the next one is not disturbed by the end of the one before
    node.uploads.obey(UploadOrder(name="u3", attempt=1, step=4, folder="", world_size=2, writers=1), (0, 1))
    await until(lambda: node.state == "written")


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
