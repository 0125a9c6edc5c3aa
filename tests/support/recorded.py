"""Real gloo jobs whose flight recorders a test reads, and what torch's own analyzer says of dumps."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from evertrain.locate import flight, recorder
from evertrain.model.recording import Group, Recordings
from evertrain.observe import recorder_dumps
from support.waiting import eventually

_SCRIPT = Path(__file__).with_name("scripts") / "recorded_job.py"


class Forge:
    """One process that has imported torch and forks ranks from there."""

    def __init__(self) -> None:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(_SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    @contextlib.contextmanager
    def job(self, kind: str, ranks: int = 4) -> Iterator[Job]:
        folder = Path(tempfile.mkdtemp(prefix="fr-"))  # a path that fits into a unix socket's address
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"kind": kind, "ranks": ranks, "folder": str(folder)}) + "\n")
        self._process.stdin.flush()
        pids = json.loads(self._process.stdout.readline())
        try:
            yield Job(folder, pids)
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


class Job:
    def __init__(self, folder: Path, pids: list[int]) -> None:
        self.folder = folder
        self.pids = pids
        eventually(lambda: all((folder / f"{rank}.groups").exists() for rank in range(len(pids))), "ranks with groups")

    def socket(self, rank: int) -> Path:
        return self.folder / f"{rank}.sock"

    @property
    def groups(self) -> dict[str, Group]:
        told = [
            one for rank in range(len(self.pids)) for one in json.loads((self.folder / f"{rank}.groups").read_text())
        ]
        return {one["name"]: Group(one["name"], one["desc"], tuple(one["ranks"])) for one in told}

    def recordings(self, leaving_out: frozenset[int] = frozenset()) -> Recordings:
        found = [
            recorder_dumps.fetch(self.socket(rank), rank, 10)
            for rank in range(len(self.pids))
            if rank not in leaving_out
        ]
        return recorder.together([Recordings({}, self.groups), *found])

    def standing(self) -> Recordings:
        """What they have recorded once nobody has come any further for a while."""
        seen: list[Recordings] = []

        def look() -> bool:
            seen.append(self.recordings())
            return len(seen) > 1 and all(
                one.operations == seen[-2].ranks[rank].operations for rank, one in seen[-1].ranks.items()
            )

        eventually(look, "a job that stands", every_s=flight.YOUNG_S + 0.2)
        return seen[-1]

    def raw(self) -> dict[int, bytes]:
        return {rank: recorder_dumps.fetch_raw(self.socket(rank), 10) for rank in range(len(self.pids))}


class Analysis:
    """What torch's own analyzer makes of dumps, as far as it can read them."""

    def __init__(self, dumps: Mapping[str, bytes], folder: Path, *flags: str) -> None:
        from torch.distributed.flight_recorder.components import builder, config_manager, loader

        folder.mkdir(parents=True, exist_ok=True)
        for name, content in dumps.items():
            (folder / name).write_bytes(content)
        arguments = config_manager.JobConfig().parse_args([str(folder), "-p", "rank_", *flags])
        try:
            details, version = loader.read_dir(arguments)
            found = builder.build_db(details, arguments, version).collectives
        finally:
            gc.enable()  # the loader turns it off
        # what follows the first fault of a group is a consequence of it
        self._faults = [one for one in found if one.missing_ranks or one.mismatch_collectives]

    @property
    def missing(self) -> list[tuple[str, int, set[int]]]:
        """Group, number and ranks of collectives that not all have joined."""
        return [
            (one.pg_desc, one.collective_seq_id, set(one.missing_ranks)) for one in self._faults if one.missing_ranks
        ]

    @property
    def different(self) -> list[tuple[str, int, set[int]]]:
        """Group, number and ranks of collectives that some have called unlike the first."""
        return [
            (one.pg_desc, one.collective_seq_id, set(one.mismatch_collectives))
            for one in self._faults
            if one.mismatch_collectives
        ]
