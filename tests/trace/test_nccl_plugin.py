"""Does the plugin count what NCCL does, whatever NCCL does? A driver in C plays NCCL (tests/trace/nccl)."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from evertrain.cli import trace_export
from evertrain.trace import layout, plugin, scene
from evertrain.trace.reading import COMMUNICATOR
from support import nccl

pytestmark = pytest.mark.skipif(bool(nccl.MISSING), reason=nccl.MISSING)

VERSIONS = (4, 5, 6)
QUICK = ("ring", "pipeline", "repeats", "odd", "fork")
PLAIN = ("ring", "tree", "channels", "threads", "pipeline", "repeats", "late", "odd", "p2p", "comms", "fork", "foreign")
"""Scenes whose whole truth is in what has ended."""


def _cell(scene: str, version: int) -> object:
    quick = scene in QUICK and version == 6
    return pytest.param(scene, version, marks=() if quick else pytest.mark.matrix, id=f"{scene}-{version}")


@pytest.mark.parametrize(("scene", "version"), [_cell(scene, version) for scene in PLAIN for version in VERSIONS])
def test_counters_are_the_drivers(built: nccl.Built, tmp_path: Path, scene: str, version: int) -> None:
    truth = built.play(scene, version, tmp_path)
    with nccl.read(tmp_path) as reader:
        records = reader.since(0)
        assert (records.missed, reader.lost()) == (0, 0)
        done = nccl.of_kind(records.operations, "done")
        assert nccl.counted_flows(done) == truth.flows
        assert sorted(nccl.ended_ops(done)) == sorted(truth.ops)
        places = reader.table()
        assert not len(places), "what has ended has left the table"
        own = done[(done["flags"] & layout.FOREIGN) == 0]
        assert set(own["rank"]) <= {nccl.RANK} and set(own["device"]) <= {1}


def test_the_file_says_whose_it_is(built: nccl.Built, tmp_path: Path) -> None:
    truth = built.play("ring", 6, tmp_path)
    with nccl.read(tmp_path) as reader:
        header = reader.header()
        assert (header.node, header.job, header.term, header.attempt) == ("node-1", "driven", 5, nccl.ATTEMPT)
        assert (header.writer, header.rank) == (layout.WRITERS["nccl"], nccl.RANK)
        opened, closed = reader.since(0).communicators
    assert [(int(opened["comm"]), int(opened["of_rank"]), int(opened["ranks"]), int(opened["nodes"]), opened["name"])] \
        == [(11, 1, 4, 2, b"group")]  # fmt: skip
    assert (opened["api"], opened["version"], opened["mask"]) == (6, 22907, truth.said["mask"])
    assert opened["t_end"] == 0 < closed["t_end"]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("version", "nccl_version", "asked", "kernels"),
    [(4, "22703", "", False), (5, "22803", "", True), (6, "23007", "", True), (6, "23102", "", False),
     (6, "23102", "1", True), (6, "22907", "0", False)],
)  # fmt: skip
def test_kernels_are_asked_for_where_that_is_sound(
    built: nccl.Built, tmp_path: Path, version: int, nccl_version: str, asked: str, kernels: bool
) -> None:
    truth = built.play(
        "fork", version, tmp_path, more={"EVERTRAIN_TEST_VERSION": nccl_version, "EVERTRAIN_NCCL_KERNELS": asked}
    )
    assert truth.said["mask"] == 0b11110 | (0x40 if kernels else 0)


@pytest.mark.matrix
def test_an_end_is_seen_by_kernels_by_flows_or_by_what_came_after(built: nccl.Built, tmp_path: Path) -> None:
    truth = built.play("kernels", 6, tmp_path)
    with nccl.read(tmp_path) as reader:
        done = nccl.of_kind(reader.since(0).operations, "done")
    assert sorted(nccl.ended_ops(done)) == sorted(truth.ops)
    seen = {int(one["seq"]): int(one["seen"]) for one in done}
    lost = seen.pop(2)
    assert lost == layout.SEEN["callback"]
    assert set(seen.values()) == {layout.SEEN["kernel"]}
    assert all(one["t_posted"] < one["t_wait"] <= one["t_done"] for one in done)


@pytest.mark.matrix
def test_flows_that_tell_nothing_never_end_and_hold_nothing_up(built: nccl.Built, tmp_path: Path) -> None:
    truth = built.play("collnet", 6, tmp_path)
    with nccl.read(tmp_path) as reader:
        records = reader.since(0).operations
        done = nccl.of_kind(records, "done")
        assert nccl.ended_ops(done) == truth.ops
        silent = records[records["flow"] == layout.SIDES["receive"]]
        assert len(silent) and set(silent["ready"]) == {layout.UNSEEN}
        assert not len(reader.table())


def test_a_flow_for_another_process_says_so(built: nccl.Built, tmp_path: Path) -> None:
    built.play("foreign", 5, tmp_path)
    with nccl.read(tmp_path) as reader:
        (done,) = nccl.of_kind(reader.since(0).operations, "done")
        assert done["flags"] & layout.FOREIGN and done["comm"] == 0
        assert done["order"] == reader.header().pid + 1


def test_what_was_open_when_a_communicator_was_aborted_is_written_down(built: nccl.Built, tmp_path: Path) -> None:
    truth = built.play("abort", 6, tmp_path)
    with nccl.read(tmp_path) as reader:
        records = reader.since(0).operations
        last = {int(one["flow"]): one for one in nccl.of_kind(records, "state") if one["comm"] == 17}
        send, receive, whole = (last[layout.SIDES[side]] for side in ("send", "receive", "whole"))
        assert (send["ready"], send["transmitted"], send["done"], send["head"]) == (2, 1, 1, layout.HEADS["send_peer"])
        assert (receive["ready"], receive["received"], receive["recv_head"]) == (1, 0, layout.HEADS["recv_wait"])
        assert (whole["total"], whole["ready"], whole["done"]) == (1, 1, 0)
        assert 300 <= send["stuck_ms"] < 5000
        done = nccl.of_kind(records, "done")
        assert nccl.counted_flows(done) == truth.flows and nccl.ended_ops(done) == truth.ops
        assert not len(reader.table())


def test_the_table_of_a_dead_process_shows_what_it_was_in(built: nccl.Built, tmp_path: Path) -> None:
    built.play("death", 6, tmp_path)
    with nccl.read(tmp_path) as reader:
        table = reader.table()
        (comm,) = nccl.of_kind(table, "communicator").view(COMMUNICATOR)
        assert (comm["comm"], comm["t_end"]) == (19, 0)
        send, whole = sorted(nccl.of_kind(table, "state"), key=lambda one: -int(one["flow"]))
        assert (whole["flow"], whole["order"]) == (layout.SIDES["whole"], 1)
        assert (send["channel"], send["peer"], send["head"]) == (0, 2, layout.HEADS["send_peer"])
        hosts = reader.since(0).hosts
        assert len(hosts) and set(hosts["state"]) <= {ord("S"), ord("R")}


def test_a_dead_ranks_file_is_read_beside_other_rings(built: nccl.Built, tmp_path: Path) -> None:
    began_ns = time.monotonic_ns()
    built.play("death", 6, tmp_path)
    seen = scene.of_folder(tmp_path)
    (track,) = seen.tracks
    assert (track.rank, track.node, track.writer) == (nccl.RANK, "node-1", "nccl") and not seen.problems
    assert began_ns < track.last_ns < time.monotonic_ns()
    assert {int(one["comm"]) for one in track.records.communicators} == {19}
    events = [one for one in trace_export.chrome(seen) if one["ph"] == "X"]
    assert [(one["name"], one["args"]["bytes"]) for one in events] == [("all_reduce (in flight)", 400)]


def test_a_forked_child_writes_to_a_file_of_its_own(built: nccl.Built, tmp_path: Path) -> None:
    built.play("fork", 6, tmp_path, more={"EVERTRAIN_TEST_CHILD": "1"})
    assert len(nccl.files(tmp_path)) == 2


@pytest.mark.matrix
def test_more_operations_than_there_is_room_for_are_counted_as_lost(built: nccl.Built, tmp_path: Path) -> None:
    truth = built.play("crowd", 6, tmp_path, more={"EVERTRAIN_TRACE_BYTES": str(16 << 20)})
    with nccl.read(tmp_path) as reader:
        done = nccl.of_kind(reader.since(0).operations, "done")
        assert truth.said["lost"] == 40000 - 32768 == reader.lost()
        assert len(nccl.ended_ops(done)) == 32768 + 1
        assert nccl.counted_flows(done) == truth.flows


@pytest.mark.parametrize("version", VERSIONS)
def test_without_room_there_is_no_trace_and_no_error(built: nccl.Built, tmp_path: Path, version: int) -> None:
    truth = built.play("full", version, tmp_path)
    assert truth.said["mask"] == 0
    assert "blind" in truth.stderr and "No space left" in truth.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_evertrain_nothing_is_asked_for(built: nccl.Built, tmp_path: Path) -> None:
    truth = built.play("ring", 6, tmp_path, more={"EVERTRAIN_TRACE_RING": ""})
    assert truth.said["mask"] == 0 and not nccl.files(tmp_path)


def test_the_library_exports_the_versions_that_were_checked_and_nothing_else(built: nccl.Built) -> None:
    said = subprocess.run(["readelf", "-W", "--dyn-syms", built.library], capture_output=True, text=True, check=True)
    rows = [line.split() for line in said.stdout.splitlines() if "GLOBAL" in line and " UND " not in line]
    assert {row[7]: (row[3], int(row[2]) >= 48, row[5]) for row in rows} == dict.fromkeys(
        plugin.SYMBOLS, ("OBJECT", True, "DEFAULT")
    )


def test_the_driver_refuses_a_library_with_an_unknown_version_only(built: nccl.Built, tmp_path: Path) -> None:
    source, library = tmp_path / "seven.c", tmp_path / "seven.so"
    source.write_text("void *ncclProfiler_v7[6] = {0};\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    assert subprocess.run([built.driver, library, "6", "ring"], capture_output=True).returncode == 3


VALGRIND = shutil.which("valgrind")
SANITIZED = (*PLAIN, "kernels", "collnet", "abort", "death", "crowd", "full")


@pytest.mark.matrix
@pytest.mark.skipif(VALGRIND is None, reason="valgrind is missing (apt-get install valgrind)")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("scene", [scene for scene in SANITIZED if scene != "crowd"])  # 40,000 take too long there
def test_valgrind_finds_nothing(built: nccl.Built, tmp_path: Path, scene: str, version: int) -> None:
    watch = ("valgrind", "-q", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=definite")
    built.play(scene, version, tmp_path, before=watch)


@pytest.fixture(scope="session")
def for_threads(tmp_path_factory: pytest.TempPathFactory) -> nccl.Built:
    try:
        return nccl.Built(tmp_path_factory.mktemp("tsan"), ("-fsanitize=thread",))
    except (plugin.Unavailable, subprocess.CalledProcessError):
        pytest.skip("gcc has no ThreadSanitizer here (libtsan)")


@pytest.mark.matrix
@pytest.mark.parametrize("scene", SANITIZED)
def test_the_thread_sanitizer_finds_nothing(for_threads: nccl.Built, tmp_path: Path, scene: str) -> None:
    for_threads.play(scene, 6, tmp_path, more={"TSAN_OPTIONS": "exitcode=66 halt_on_error=1"})
