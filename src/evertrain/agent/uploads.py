"""How does this node's part of a step get into the shared store? By a process of the ranks' interpreter, with torch.

It reads the node's disk files of the step, is nice to everything else, writes its log beside the others, and dies with
the agent. What the order says is done once; an agent that was started again does it again, which changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from evertrain.checkpoint import disk
from evertrain.keeper.interpreter import PACKAGE_PARENT
from evertrain.model.copies import UploadOrder, UploadReport
from evertrain.model.spec import AgentSpec

_log = logging.getLogger(__name__)

_PROGRAM = """\
import sys
if not sys.flags.safe_path: del sys.path[0]
sys.path.insert(0, {parent!r})
import evertrain
del sys.path[0]
from evertrain.worker.store_writer import program
program()
"""
_HELD = "upload-"
"""Begins the names of folders, on the node's disk, with what an upload reads."""
_WAIT_S = 30.0
"""So long does a writer look out for what the other nodes have, so that nothing is written twice."""


class Uploads:
    """At most one upload at a time; `report` says how it stands."""

    def __init__(self, spec: AgentSpec, wake: Callable[[], None]) -> None:
        self._spec = spec
        self._wake = wake
        self._task: asyncio.Task[None] | None = None
        self._order: UploadOrder | None = None
        self.report: UploadReport | None = None
        for left in Path(spec.disk_dir).glob(f"{_HELD}*"):
            shutil.rmtree(left, ignore_errors=True)

    def obey(self, order: UploadOrder | None, ranks: Sequence[int]) -> None:
        """Bring the upload to where it should be."""
        if order == self._order:
            return
        if self._task is not None and not self._task.done() and (order is None or not self._is_same(order)):
            self._task.cancel()
        is_same = order is not None and self._is_same(order)
        self._order = order
        if order is None:
            self._task, self.report = None, None
            return
        if is_same and self.report is not None and self.report.state == "failed":
            return
        before = self._task if is_same else None
        if not is_same:
            self.report = UploadReport(name=order.name, state="running")
        self._task = asyncio.create_task(self._perform(order, tuple(ranks), before))

    def _is_same(self, order: UploadOrder) -> bool:
        return self._order is not None and self._order.name == order.name

    async def _perform(self, order: UploadOrder, ranks: Sequence[int], before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        because = await self._write(order, ranks)
        if order is self._order:
            state = "failed" if because else "finished" if order.finish else "written"
            self.report = UploadReport(name=order.name, state=state, because=because)  # type: ignore[arg-type]
            self._wake()

    async def _write(self, order: UploadOrder, ranks: Sequence[int]) -> str:
        """Run the program; why it failed."""
        paths: list[str] = []
        if not order.finish:
            found = {
                copy.rank: copy.path
                for copy in await asyncio.to_thread(disk.list, self._spec.disk_dir)
                if (copy.attempt, copy.step) == (order.attempt, order.step) and copy.rank in ranks
            }
            if len(found) < len(ranks):
                return f"step {order.step} is no longer on this node's disk"
            paths = [found[rank] for rank in sorted(found)]
        with _held(paths, Path(self._spec.disk_dir) / f"{_HELD}{order.name}") as held:
            return await self._start(order, held)

    async def _start(self, order: UploadOrder, paths: Sequence[str]) -> str:
        asked = {
            "folder": order.folder,
            "upload": order.name,
            "world_size": order.world_size,
            "writers": order.writers,
            "wait_s": _WAIT_S,
            "paths": list(paths),
            "finish": order.finish,
            "parent": os.getpid(),
        }
        log = Path(self._spec.log_root) / f"upload-{self._spec.node}.log"
        try:
            with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="upload-", dir=self._spec.node_dir) as spec:
                json.dump(asked, spec)
                spec.flush()
                log.parent.mkdir(parents=True, exist_ok=True)
                with log.open("ab") as output:
                    return await self._run(spec.name, output.fileno(), log)
        except OSError as error:
            return f"the upload cannot be started: {error}"

    async def _run(self, spec: str, output: int, log: Path) -> str:
        begin = os.fstat(output).st_size
        process = await asyncio.create_subprocess_exec(
            self._spec.python,
            "-c",
            _PROGRAM.format(parent=PACKAGE_PARENT),
            spec,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status = await process.wait()
        except asyncio.CancelledError:
            process.send_signal(signal.SIGKILL)
            await process.wait()
            raise
        if not status:
            return ""
        with log.open("rb") as said:
            said.seek(begin)
            last = said.read().decode(errors="replace").strip().splitlines()
        return last[-1] if last else f"the upload ended with status {status}"


@contextmanager
def _held(paths: Sequence[str], folder: Path) -> Iterator[list[str]]:
    """The same files by names of our own: the disk keeps few steps, and a process with torch begins in seconds."""
    try:
        folder.mkdir(mode=0o700)
        names = [str(folder / str(number)) for number in range(len(paths))]
        for path, name in zip(paths, names, strict=True):
            os.link(path, name)
    except OSError:
        names = list(paths)  # gone meanwhile, or a file system without links; whoever opens them will see
    try:
        yield names
    finally:
        shutil.rmtree(folder, ignore_errors=True)
