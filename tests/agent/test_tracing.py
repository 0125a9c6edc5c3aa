"""What is in flight is written down on behalf of ranks, whatever these are doing, in rings that fit into the memory."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evertrain.agent import rings as node_rings
from evertrain.agent.rings import TABLE, Rings
from evertrain.agent.tracing import Tracing
from evertrain.model.config import TraceConfig
from evertrain.model.spec import AgentSpec
from evertrain.trace import flows, layout, rings
from evertrain.trace.reading import Reader, Records
from evertrain.worker import contact
from support.waiting import eventually

HOLDER = Path(__file__).parents[1] / "support" / "scripts" / "holds_gil.py"
RANK, ATTEMPT = 3, 2


def spec_of(folder: Path, **trace: Any) -> AgentSpec:
    return AgentSpec(
        job="job", run_id="job-1", node="gpu02", node_dir=str(folder), disk_dir="", log_root="",
        controller_url="", token_file="", fired_dir="", trace=TraceConfig(**{"hook_mib": 1, "writer_mib": 1, **trace}),
    )  # fmt: skip


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """So much memory is free, in MiB."""

    def set_free(mib: float) -> None:
        monkeypatch.setattr(node_rings.room, "free_bytes", lambda _: int(mib * (1 << 20)))

    return set_free


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted((folder / "trace").iterdir())}


def test_rings_are_there_before_their_ranks_and_stay_as_they_are(tmp_path: Path) -> None:
    made = Rings(spec_of(tmp_path))
    made.prepare(1, (0, 1), 5)
    assert list(sizes(tmp_path)) == ["a1-r0-agent.ring", "a1-r0-hook.ring", "a1-r1-agent.ring", "a1-r1-hook.ring"]
    assert all(0 <= (1 << 20) - size < 1024 for size in sizes(tmp_path).values())
    with Reader(made.path(1, 1, "hook")) as reader:
        header = reader.header()
    assert (header.rank, header.attempt, header.term, header.job, header.node) == (1, 1, 5, "job", "gpu02")
    assert header.table == TABLE
    before = made.path(1, 0, "hook").stat().st_ino
    made.prepare(1, (0, 1), 5)
    assert made.path(1, 0, "hook").stat().st_ino == before
    assert made.hook_path(1, 0) == str(made.path(1, 0, "hook")) and made.hook_path(1, 7) == ""


def test_two_attempts_stay_and_the_older_one_gives_way_when_room_is_short(
    tmp_path: Path, free: Callable[[float], None]
) -> None:
    made = Rings(spec_of(tmp_path))
    for attempt in (1, 2, 3):
        made.prepare(attempt, (0,), 1)
        made.forget(attempt)
    assert {name.split("-")[0] for name in sizes(tmp_path)} == {"a2", "a3"}
    free(4 * 4)  # two attempts have four MiB now, a third needs three more
    made.prepare(4, (0,), 1)
    assert {name.split("-")[0] for name in sizes(tmp_path)} == {"a3", "a4"}


def test_rings_take_a_quarter_of_what_is_free_at_most(tmp_path: Path, free: Callable[[float], None]) -> None:
    free(4 * 1.5)
    made = Rings(spec_of(tmp_path))
    made.prepare(1, (0,), 1)
    # half of what was wished for: what the plugin in NCCL would take is kept free
    assert all((1 << 19) - 1024 < size <= 1 << 19 for size in sizes(tmp_path).values())
    assert made.blind == ""


def test_no_room_is_said_and_ranks_are_told_of_no_ring(tmp_path: Path, free: Callable[[float], None]) -> None:
    free(0.5)
    made = Rings(spec_of(tmp_path))
    made.prepare(1, (0, 1), 1)
    assert sizes(tmp_path) == {} and made.hook_path(1, 0) == ""
    assert made.blind.startswith("collectives are not traced: ")
    off = Rings(spec_of(tmp_path, enabled=False))
    off.prepare(1, (0,), 1)
    assert (off.blind, sizes(tmp_path)) == ("", {})


# -- what is written down ----------------------------------------------------------------------------------------------


class World:
    """A rank whose interpreter can be held, followed by the agent's thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec = spec_of(folder)
        self.rank: subprocess.Popen[str] | None = None
        self.tracings: list[Tracing] = []
        self.rings = Rings(self.spec)
        self.rings.prepare(ATTEMPT, (RANK,), 1)

    def start(self, held_s: float) -> None:
        words = [sys.executable, str(HOLDER), self.rings.hook_path(ATTEMPT, RANK), str(held_s)]
        self.rank = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def says(self) -> str:
        assert self.rank is not None and self.rank.stdout is not None
        return self.rank.stdout.readline().strip()

    def state(self) -> dict[str, Any]:
        assert self.rank is not None
        ranks = {str(RANK): {"pid": self.rank.pid, "state": "running"}}
        return {"attempts": {str(ATTEMPT): {"phase": "running", "ranks": ranks}}}

    def page_path(self, attempt: int, rank: int) -> Path:
        return self.folder / f"a{attempt}-r{rank}"

    def agent(self) -> Tracing:
        self.tracings.append(Tracing(self.spec, self.page_path, self.state))
        return self.tracings[-1]

    def seen(self) -> Records:
        with Reader(self.rings.path(ATTEMPT, RANK, "agent")) as reader:
            return reader.since(0)

    def close(self) -> None:
        for tracing in self.tracings:
            tracing.stop(wait_s=10.0)
        if self.rank is not None:
            self.rank.kill()
            with self.rank:
                pass


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def test_state_records_go_on_while_native_code_holds_the_interpreter(world: World) -> None:
    world.start(3.0)
    assert world.says() == "inside"
    began_ns = time.monotonic_ns()
    world.agent().start()
    assert world.says() == "out"
    ended_ns = time.monotonic_ns()
    seen = world.seen().operations
    assert {(int(one["comm"]), int(one["seq"])) for one in seen} == {(77, 12)}
    assert {int(one["rank"]) for one in seen} == {RANK}
    for kind in ("state", "blocked"):
        times = [int(one["t"]) for one in seen if one["kind"] == layout.KINDS[kind]]
        # ten a second, on a machine that has other things to do as well
        assert len(times) >= 15
        gaps = [later - earlier for earlier, later in zip([began_ns, *times], [*times, ended_ns], strict=True)]
        assert max(gaps) < 1e9
    assert seen["stuck_ms"].max() > 1500
    hosts = world.seen().hosts
    assert len(hosts) >= 15 and {int(one["rank"]) for one in hosts} == {RANK}
    eventually(lambda: world.tracings[0].traced == 1, "the rank counts as traced")


def test_what_is_in_no_operation_is_only_looked_at_once_a_second(world: World) -> None:
    world.start(0.0)
    assert [world.says(), world.says()] == ["inside", "out"]
    now = [time.monotonic_ns()]
    tracing = Tracing(world.spec, world.page_path, world.state, clock=lambda: now[0])
    for _ in range(50):
        tracing.tick()
        now[0] += 100_000_000
    seen = world.seen()
    assert len(seen.operations) == len(seen.flows) == 0 and 3 <= len(seen.hosts) <= 5


def test_an_agent_that_is_started_again_goes_on_in_the_same_rings(world: World) -> None:
    world.start(30.0)
    assert world.says() == "inside"
    first = world.agent()
    for _ in range(3):
        first.tick()
    before = world.seen().last
    assert before >= 6
    world.agent().tick()
    after = world.seen()
    assert after.last > before and after.missed == 0 and len(after) == after.last


def test_what_a_rank_says_of_its_trace_is_told(world: World) -> None:
    world.start(0.0)
    assert [world.says(), world.says()] == ["inside", "out"]
    lines = ["trace: collectives in a CUDA graph are not seen", "stacks by a signal: no signal is free"]
    groups = Path(contact.groups_path(str(world.page_path(ATTEMPT, RANK))))
    groups.write_text("".join(json.dumps({"blind": line}) + "\n" for line in lines))
    tracing = world.agent()
    tracing.tick()
    tracing.tick()
    assert tracing.blind == (f"rank {RANK}: collectives in a CUDA graph are not seen",)


def test_connections_carry_the_group_that_they_were_opened_for(world: World) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    script = (
        "import socket, sys\n"
        f"one = socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))\n"
        "print(__import__('os').fstat(one.fileno()).st_ino, flush=True)\n"
        "for line in sys.stdin: one.sendall(bytes(1000)); print('sent', flush=True)\n"
    )
    world.rank = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    accepted, _ = server.accept()
    inode = int(world.says())
    groups = Path(contact.groups_path(str(world.page_path(ATTEMPT, RANK))))
    said = {"name": "0", "desc": "default_pg", "ranks": [3], "id": "4d", "sockets": [inode]}
    groups.write_text(json.dumps(said) + '\n{"na')
    writer = rings.open_writer(world.rings.hook_path(ATTEMPT, RANK))
    now = time.monotonic_ns()
    rest = [layout.OPS.index("barrier"), 0, 0, -1, RANK, layout.NOBODY, 77, 1, 1, 0, now, now, 0, now, 0]
    writer.set_place(1, layout.OPERATION_STRUCT.pack(1, layout.KINDS["state"], 0, *rest, *[0] * 6, 0, 0, 0))
    tracing = world.agent()
    tracing.tick()
    assert world.rank.stdin is not None
    world.rank.stdin.write("\n")
    world.rank.stdin.flush()
    assert world.says() == "sent"
    time.sleep(0.06)  # connections that cost more than they may are left alone for a moment

    def told() -> bool:
        tracing.tick()
        return len(world.seen().flows) > 0

    eventually(told, "a record of the connection")
    (first, *_) = world.seen().flows
    assert (int(first["comm"]), int(first["sent"]), int(first["peer"])) == (0x4D, 1000, layout.NOBODY)
    assert int(first["inode"]) == inode
    (pair,) = flows.read_pairs(world.rings.addresses(ATTEMPT, RANK), RANK)
    assert (pair.inode, pair.peer) == (inode, f"127.0.0.1:{server.getsockname()[1]}")
    accepted.close()
    server.close()
