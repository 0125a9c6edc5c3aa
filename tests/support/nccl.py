"""The driver that plays NCCL (tests/trace/nccl): how it and the plugin are built and run, and what it says is true."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from evertrain.trace import layout, plugin
from evertrain.trace.reading import Array, Reader

DRIVER = Path(__file__).parents[1] / "trace" / "nccl"
ROOT = Path(__file__).parents[2]
MISSING = next(
    (f"{tool} is missing" for tool in ("gcc",) if shutil.which(tool) is None),
    "" if os.uname().machine == "x86_64" else "NCCL's interface was checked on x86-64 only",
)
RANK, ATTEMPT = 3, 2

_OPS = dict(enumerate(layout.OPS))
_SIDES = {number: name for name, number in layout.SIDES.items()}
COUNTERS = {"send": ("ready", "transmitted", "done"), "receive": ("ready", "transmitted", "received", "consumed")}


class Built:
    """A plugin and a driver, built with the same flags."""

    def __init__(self, folder: Path, more: Sequence[str] = ()) -> None:
        self.library, self.driver = folder / plugin.NAME, folder / "driver"
        plugin.build(self.library, more=["-Wall", "-Wextra", "-Werror", *more])
        subprocess.run(
            ["gcc", "-std=c11", "-D_GNU_SOURCE", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-rdynamic", "-pthread",
             *more, f"-I{plugin.SOURCES}", "-o", self.driver, *sorted(map(str, DRIVER.glob("*.c"))), "-ldl", "-lm"],
            check=True,
        )  # fmt: skip

    def play(
        self, scene: str, version: int, folder: Path, *, before: Sequence[str] = (), more: Mapping[str, str] = {}
    ) -> Truth:
        """Play one scene; what it says was to be counted."""
        done = subprocess.run(
            [*before, str(self.driver), str(self.library), str(version), scene],
            env={**os.environ, **environment(folder), **more}, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return Truth(done.stdout, done.stderr)


_built: list[Built] = []


def shared(factory: pytest.TempPathFactory) -> Built:
    """Compiled once a session."""
    if not _built:
        _built.append(Built(factory.mktemp("nccl")))
    return _built[0]


def environment(folder: Path, rank: int = RANK) -> dict[str, str]:
    return {
        "EVERTRAIN_TRACE_RING": str(folder / f"a{ATTEMPT}-r{rank}"), "EVERTRAIN_TRACE_NODE": "node-1",
        "EVERTRAIN_TRACE_JOB": "driven", "EVERTRAIN_TRACE_TERM": "5", "EVERTRAIN_TRACE_ATTEMPT": str(ATTEMPT),
        "RANK": str(rank), "LOCAL_RANK": "1",
    }  # fmt: skip


class Truth:
    """What a scene has printed."""

    def __init__(self, text: str, stderr: str) -> None:
        self.stderr = stderr
        self.flows: Counter[tuple[object, ...]] = Counter()
        """(comm, channel, peer, side, name of counter) -> sum"""
        self.ops: list[tuple[int, str, int, int]] = []
        self.comms: list[tuple[int, int, int, int, str]] = []
        self.said: dict[str, int] = {}
        for line in text.splitlines():
            word, *rest = line.split()
            if word == "flow":
                comm, channel, peer, side, *numbers = rest
                names = ("times", "total", "ready", "transmitted", "done", "received", "consumed", "bytes")
                for name, number in zip(names, numbers, strict=True):
                    if name in ("times", "total", "bytes", *COUNTERS[side]):
                        self.flows[int(comm), int(channel), int(peer), side, name] += int(number)
            elif word == "op":
                self.ops.append((int(rest[0]), rest[1], int(rest[2]), int(rest[3])))
            elif word == "comm":
                self.comms.append((int(rest[0]), int(rest[1]), int(rest[2]), int(rest[3]), rest[4]))
            else:
                self.said[word] = int(rest[0])


def play_world(
    built: Built, folder: Path, fault: str, *, culprit: int, ranks: int = 4, transport: str = "ib", pace: int = 1,
    seconds: float = 3.0,
) -> None:  # fmt: skip
    """Some ranks train, and one of them has a fault (tests/trace/nccl/world.c); each leaves a ring."""
    subprocess.run(
        [built.driver, built.library, "6", "world"], check=True, capture_output=True, timeout=60,
        env={"WORLD_FAULT": fault, "WORLD_TRANSPORT": transport, "WORLD_PREFIX": str(folder / "w"),
             "WORLD_SECONDS": str(seconds), "WORLD_RANKS": str(ranks), "WORLD_CULPRIT": str(culprit),
             "WORLD_PACE": str(pace)},
    )  # fmt: skip


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.ring"))


def read(folder: Path) -> Reader:
    """The one file that the driver has left."""
    (file,) = files(folder)
    return Reader(file)


def counted_flows(done: Array) -> Counter[tuple[object, ...]]:
    """The same sums as the driver's, from the records of flows that have ended."""
    found: Counter[tuple[object, ...]] = Counter()
    for one in done[done["flow"] != layout.SIDES["whole"]]:
        side = _SIDES[int(one["flow"])]
        place = (int(one["comm"]), int(one["channel"]), int(one["peer"]), side)
        found[*place, "times"] += 1
        for name in ("total", "bytes", *COUNTERS[side]):
            found[*place, name] += int(one[name])
        unseen = {"ready", "transmitted", "done", "received", "consumed"} - set(COUNTERS[side])
        assert all(one[name] == layout.UNSEEN for name in unseen)
    return found


def ended_ops(done: Array) -> list[tuple[int, str, int, int]]:
    whole = done[done["flow"] == layout.SIDES["whole"]]
    return [(int(one["comm"]), _OPS[int(one["op"])], int(one["seq"]), int(one["bytes"])) for one in whole]


def of_kind(records: Array, kind: str) -> Array:
    found: Array = records[np.asarray(records["kind"]) == layout.KINDS[kind]]
    return found
