"""Each way in which a job can hang, and who is named for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evertrain.locate import culprit, grouping, stacks
from evertrain.locate.grouping import Seen
from evertrain.locate.parallel import coordinates
from evertrain.model import recording
from evertrain.model.activity import Operation
from evertrain.model.recording import Recording
from evertrain.model.stacks import Located, NodeCapture
from support import stuck
from support.effort import examples
from support.stuck import Job

MESH = {"pp": 2, "dp": 2, "tp": 2}


def locate(job: Job, idle: frozenset[int] = frozenset()) -> Located:
    """By two captures in which nothing moved."""
    return culprit.locate(job.merged(2), job.merged(1), mesh=job.mesh, idle=idle)


def three_dimensions(culprit_rank: int) -> Job:
    """pp=2, dp=2, tp=2; one rank is somewhere else at the beginning of a step, and the others go as far as they can."""
    job = Job(MESH)
    there = coordinates(MESH, culprit_rank)
    for rank in range(8):
        here = coordinates(MESH, rank)
        dim = next((dim for dim in ("tp", "dp", "pp") if here[dim] != there[dim]), "tp")
        mine = here["pp"]
        op = {"tp": "allreduce", "dp": "_allgather_base", "pp": f"{'recv' if mine else 'send'} {mine}->{1 - mine}"}[dim]
        job.waits(rank, dim, op, 12)
    return job


def test_a_page_that_has_just_changed_is_no_hang() -> None:
    """One look at a job in the middle of a step: some wait, one computes."""
    job = three_dimensions(5)
    job.outside(5, stuck.SLEEP)
    assert culprit.locate(job.merged(1), mesh=MESH).ranks == (5,)
    for still_s, step_s, is_moving in ((0.1, None, True), (0.5, None, False), (0.5, 1.2, True), (0.6, 1.2, False)):
        for rank, one in job.activities.items():
            job.activities[rank] = msgspec.structs.replace(one, still_s=still_s if rank == 2 else 6.0, step_s=step_s)
        found = culprit.locate(job.merged(1), mesh=MESH)
        assert (found.ranks == ()) is is_moving, (still_s, step_s, found)


# --- one rank, outside of all operations


@pytest.mark.parametrize("rank", range(8))
def test_a_stopped_rank_is_named_though_its_page_says_that_it_waits(rank: int) -> None:
    job = Job(MESH)
    job.see(rank, stuck.ALL_REDUCE, kernel="stopped", waits_in="do_signal_stop")
    found = locate(job)
    assert (found.kind, found.ranks, found.nodes) == ("stopped", (rank,), (f"node-{rank // 2}",))
    assert found.eviction == found.nodes and found.confidence > 0.9
    assert any("wait for it in all_reduce number 41 of group 0" in line for line in found.evidence)


@pytest.mark.parametrize("rank", range(8))
def test_a_loader_that_sleeps_in_its_own_process(rank: int) -> None:
    job = three_dimensions(rank)
    job.outside(rank, stuck.FETCH, waits_in="hrtimer_nanosleep", last=Operation(job.name("tp", rank), "allreduce", 11))
    found = locate(job)
    assert (found.kind, found.ranks, found.category, found.eviction) == ("loader", (rank,), "hang_dataloader", ())
    assert "its data loader delivers nothing" in found.evidence[0] and "data.py:12" in found.evidence[0]


def test_a_loader_whose_worker_sleeps() -> None:
    job = three_dimensions(5)
    job.outside(5, stuck.WORKERS, waits_in="do_poll", last=Operation("dp4", "_allgather_base", 29))
    job.see(5, stuck.WORKER, kind="loader", pid=77, waits_in="hrtimer_nanosleep")
    for rank in (0, 1, 2):
        job.see(rank, stuck.IDLE_WORKER, kind="loader", pid=70 + rank, waits_in="do_poll")
    found = locate(job)
    assert (found.kind, found.ranks) == ("loader", (5,))
    assert "its worker 77 in __getitem__ (data.py:12)" in found.evidence[0]


def test_a_loaders_worker_on_a_dead_mount() -> None:
    job = three_dimensions(5)
    job.outside(5, stuck.WORKERS, waits_in="do_poll")
    job.see(5, stuck.WORKER, kind="loader", pid=77, kernel="uninterruptible", waits_in="rpc_wait_bit_killable")
    found = locate(job)
    assert (found.kind, found.ranks, found.category) == ("uninterruptible", (5,), "storage")
    assert "process 77" in found.evidence[0]


def test_workers_that_read_without_end_accuse_the_storage() -> None:
    job = three_dimensions(5)
    job.outside(5, stuck.WORKERS, waits_in="do_poll")
    job.see(5, stuck.WORKER, kind="loader", pid=77, waits_in="folio_wait_bit_common")
    assert (locate(job).kind, locate(job).eviction) == ("storage", ())


@pytest.mark.parametrize("rank", [0, 3, 5, 7])
def test_a_dead_mount(rank: int) -> None:
    job = three_dimensions(rank)
    job.outside(rank, stuck.READ, kernel="uninterruptible", waits_in="nfs4_proc_getattr")
    found = locate(job)
    assert (found.kind, found.ranks, found.category) == ("uninterruptible", (rank,), "storage")
    assert "(nfs4_proc_getattr)" in found.evidence[0]


def test_one_that_reads_a_file_at_one_look_only_is_not_asleep() -> None:
    job = three_dimensions(5)
    job.outside(5, stuck.LOOP, "active", cpu=1.0)
    before = job.merged(1)
    job.outside(5, stuck.LOOP, "active", cpu=1.0, kernel="uninterruptible")
    found = culprit.locate(job.merged(2), before, mesh=MESH)
    assert (found.kind, found.ranks) == ("loop", (5,))


def test_the_same_sleep_on_several_nodes_is_the_storages() -> None:
    job = Job(MESH)
    for rank in (1, 4):
        job.outside(rank, stuck.READ, kernel="uninterruptible", waits_in="nfs_wait_bit_killable")
    found = locate(job)
    assert (found.kind, found.ranks, found.eviction) == ("storage", (1, 4), ())


@pytest.mark.parametrize("rank", range(8))
def test_a_writer_of_checkpoints_that_does_not_end(rank: int) -> None:
    job = three_dimensions(rank)
    job.outside(rank, stuck.SAVE, waits_in="do_wait")
    job.see(rank, stuck.WRITER, kind="checkpoint", pid=88, waits_in="fifo_open")
    found = locate(job)
    assert (found.kind, found.ranks, found.eviction) == ("checkpoint", (rank,), ())
    assert "its writer 88" in found.evidence[0]


def test_a_writer_thread_that_does_not_end() -> None:
    job = three_dimensions(2)
    frames = ("wait (threading.py:327)", "result (concurrent/futures/_base.py:451)", "wait_for_checkpoint (train.py:9)")
    job.outside(2, frames, waits_in="futex_wait_queue")
    assert (locate(job).kind, locate(job).ranks) == ("checkpoint", (2,))


@pytest.mark.parametrize("rank", range(8))
def test_an_interpreter_that_native_code_keeps(rank: int) -> None:
    job = three_dimensions(rank)
    job.outside(rank, ("decode_native (train.py:12)", "main (train.py:85)"), "idle+gil", waits_in="hrtimer_nanosleep")
    job.processes[rank, 1000 + 10 * rank] = held(job, rank)
    assert (locate(job).kind, locate(job).ranks) == ("held", (rank,))


def held(job: Job, rank: int) -> stuck.Seen:
    seen = job.processes[rank, 1000 + 10 * rank]
    (thread,) = seen.dump.threads
    dump = msgspec.structs.replace(seen.dump, threads=(msgspec.structs.replace(thread, holds_gil=True),))
    return msgspec.structs.replace(seen, dump=dump)


def test_an_interpreter_that_a_door_to_c_keeps_busy() -> None:
    job = three_dimensions(6)
    job.outside(6, ("match (re/__init__.py:166)", "match_record (train.py:14)"), "active", cpu=1.0)
    job.processes[6, 1060] = held(job, 6)
    assert (locate(job).kind, locate(job).ranks) == ("held", (6,))


def test_the_only_one_that_gives_no_stack() -> None:
    job = three_dimensions(6)
    job.see(6, (), waits_in="")
    job.page(6, Operation("tp6", "allreduce", 11), inside=False)
    found = locate(job)
    assert (found.kind, found.ranks) == ("held", (6,))


@pytest.mark.parametrize("rank", range(8))
def test_a_loop_without_end(rank: int) -> None:
    job = three_dimensions(rank)
    job.outside(rank, stuck.LOOP, "active", cpu=0.98)
    found = locate(job)
    assert (found.kind, found.ranks, found.eviction) == ("loop", (rank,), ())
    assert "98 % of a core" in found.evidence[0]


def test_a_loop_behind_an_operation_that_its_page_still_shows() -> None:
    """Launched and never waited for: the page says that it is inside."""
    job = three_dimensions(5)
    job.see(5, stuck.LOOP, "active")
    job.page(5, Operation("tp4", "allreduce", 11), inside=True, cpu=1.0)
    assert (locate(job).kind, locate(job).ranks) == ("loop", (5,))


@pytest.mark.parametrize("rank", range(8))
def test_a_sleep_outside(rank: int) -> None:
    job = three_dimensions(rank)
    job.outside(rank, stuck.SLEEP, waits_in="hrtimer_nanosleep")
    found = locate(job, idle=frozenset({rank}))
    assert (found.kind, found.ranks, found.nodes) == ("outside", (rank,), (f"node-{rank // 2}",))


def test_one_that_waits_for_its_device() -> None:
    job = three_dimensions(3)
    job.outside(3, ("synchronize (torch/cuda/__init__.py:900)", *stuck.TRAIN), "active", cpu=1.0)
    found = locate(job)
    assert (found.kind, found.ranks, found.eviction) == ("device", (3,), ("node-1",))


def test_ranks_that_wait_in_c_without_a_frame_are_victims() -> None:
    """DDP: the reducer waits below backward(), and the page shows its operation."""
    job = Job({"dp": 8})
    for rank in range(8):
        job.waits(rank, "world", "allreduce", 41, stuck.BACKWARD)
    job.outside(3, stuck.SLEEP, waits_in="hrtimer_nanosleep")
    assert (locate(job).kind, locate(job).ranks) == ("outside", (3,))


# --- in operations


def test_an_operation_that_one_has_left_out() -> None:
    """It is a step further, and waits there for one that waits for it."""
    job = Job(MESH)
    job.waits(5, "tp", "allreduce", 13, step=8)
    found = locate(job)
    assert (found.kind, found.ranks, found.category, found.eviction) == ("skipped", (5,), "user_code", ())
    assert any("went on without all_reduce number 41 of group 0" in line for line in found.evidence)


def test_left_out_within_a_step() -> None:
    job = Job(MESH)
    further = (f"all_reduce ({stuck.C10D}:2501)", "forward (model.py:7)", "main (train.py:90)")
    job.waits(5, "tp", "allreduce", 13, further)
    assert (locate(job).kind, locate(job).ranks) == ("skipped", (5,))


def test_another_order() -> None:
    job = Job(MESH)
    job.waits(5, "world", "allgather", 41, stuck.ALL_GATHER)
    found = locate(job)
    assert (found.kind, found.ranks, found.eviction) == ("order", (5,), ())
    assert any("ranks 0-4, 6-7: all_reduce number 41" in line for line in found.evidence)


def test_groups_that_wait_for_each_other_in_a_circle() -> None:
    """Two by two, in the first stage; the second waits for it."""
    job = Job(MESH)
    for rank in (0, 3):
        job.waits(rank, "tp", "allreduce", 12)
    for rank in (1, 2):
        job.waits(rank, "dp", "allreduce", 30)
    for rank in range(4, 8):
        job.waits(rank, "pp", "recv 1->0", 9)
    found = locate(job)
    assert (found.kind, found.ranks, found.eviction) == ("deadlock", (0, 1, 2, 3), ())


def test_all_there_and_nothing_moves() -> None:
    found = locate(Job(MESH))
    assert (found.kind, found.ranks, found.nodes, found.eviction) == ("network", (), (), ())
    assert "all have come" in found.evidence[0]


def test_all_there_in_one_group_that_the_others_wait_for() -> None:
    job = three_dimensions(5)
    job.waits(5, "tp", "allreduce", 12)
    found = locate(job)
    assert (found.kind, found.ranks) == ("network", (4, 5)) and found.confidence <= 0.5


def test_one_that_has_not_finished_what_its_peers_have_left_behind() -> None:
    job = Job({"dp": 8})
    job.waits(2, "world", "allreduce", 40)
    found = locate(job)
    assert (found.kind, found.ranks) == ("device", (2,))


# --- nobody is named


def test_a_job_that_moves_is_no_hang() -> None:
    job = three_dimensions(5)
    job.outside(5, stuck.SLEEP)
    before = job.merged(1)
    for rank in range(8):
        job.waits(rank, "world", "allreduce", 42)
    found = culprit.locate(job.merged(2), before, mesh=MESH)
    assert (found.kind, found.ranks) == ("unknown", ()) and "moves" in found.evidence[0]


def test_a_node_that_was_not_seen_neither_accuses_nor_is_accused() -> None:
    job = Job(MESH)
    job.outside(5, stuck.SLEEP)
    found = culprit.locate(job.merged(2, missing=["node-2"]), job.merged(1, missing=["node-2"]), mesh=MESH)
    assert (found.kind, found.ranks, found.eviction) == ("unknown", (), ())
    assert any("node-2 was not seen" in line for line in found.evidence)


def test_all_in_storage() -> None:
    job = Job(MESH)
    for rank in range(8):
        job.outside(rank, ("write (logging/__init__.py:5)", "emit (logging/__init__.py:1100)", "main (train.py:9)"))
    found = locate(job)
    assert (found.kind, found.ranks, found.category, found.eviction) == ("storage", (), "storage", ())


def test_too_many_to_single_out() -> None:
    job = Job(MESH)
    for rank in range(6):
        job.outside(rank, stuck.SLEEP)
    assert (locate(job).kind, locate(job).ranks) == ("unknown", ())


def test_nothing_seen_at_all() -> None:
    found = culprit.locate(Job(MESH).merged(1, missing=[f"node-{at}" for at in range(4)]))
    assert (found.kind, found.confidence) == ("unknown", 0.0)


def test_no_stack_could_be_read_and_pages_say_who_is_outside() -> None:
    job = Job(MESH)
    for rank in range(8):
        job.see(rank, ())
    job.page(5, Operation("0", "allreduce", 40), inside=False)
    assert locate(job).ranks == (5,)


@given(
    rank=st.integers(0, 7),
    frames=st.sampled_from([stuck.FETCH, stuck.SLEEP, stuck.SAVE, stuck.READ, stuck.WORKERS]),
    blind=st.sets(st.integers(0, 7), max_size=3),
)
@settings(max_examples=examples(40), deadline=None)
def test_who_waits_inside_is_never_named(rank: int, frames: tuple[str, ...], blind: set[int]) -> None:
    job = three_dimensions(rank)
    job.outside(rank, frames, waits_in="hrtimer_nanosleep")
    for one in blind - {rank}:
        del job.processes[one, 1000 + 10 * one], job.activities[one]
    assert set(locate(job).ranks) <= {rank}


operations = st.builds(
    Operation,
    group=st.sampled_from(["0", "tp0", "tp4", "dp0", "dp5", "pp2", "unheard of"]),
    op=st.sampled_from(
        ["allreduce", "_allgather_base", "broadcast", "send 0->1", "recv 1->0", "recv 3->9", "send", "recv_"]
    ),
    seq=st.integers(0, 3),
)
stands = st.tuples(
    st.sampled_from(
        [stuck.ALL_REDUCE, stuck.BACKWARD, stuck.RECV, stuck.SAVE, stuck.WORKERS, stuck.LOOP, stuck.READ, ()]
    ),
    st.sampled_from(["active", "idle"]),
    st.sampled_from(["", "", "", "stopped", "uninterruptible", "ended"]),
    st.sampled_from(["", "futex_wait_queue", "hrtimer_nanosleep", "do_wait"]),
)


@given(
    ranks=st.lists(st.tuples(st.none() | stands, st.none() | operations, st.booleans()), min_size=8, max_size=8),
    others=st.lists(st.none() | stands, min_size=8, max_size=8),
    has_mesh=st.booleans(),
)
@settings(max_examples=examples(150), deadline=None)
def test_whatever_is_seen_there_is_a_verdict_and_it_names_known_ranks_only(
    ranks: list[Any], others: list[Any], has_mesh: bool
) -> None:
    job = Job(MESH)
    job.processes.clear()
    job.activities.clear()
    before = job.merged(1)
    for rank, (where, last, inside) in enumerate(ranks):
        if where is not None:
            job.see(rank, where[0], where[1], kernel=where[2], waits_in=where[3])
        if last is not None:
            job.page(rank, last, inside=inside, cpu=None)
        if (below := others[rank]) is not None:
            job.see(rank, below[0], below[1], kernel=below[2], waits_in=below[3], kind="loader", pid=7)
    for earlier in (None, before, job.merged(1)):
        found = culprit.locate(job.merged(2), earlier, mesh=MESH if has_mesh else None)
        assert set(found.ranks) <= set(range(8)) and set(found.eviction) <= set(job.nodes.values())
        assert 0 <= found.confidence <= 1 and found.evidence
        assert not (found.is_software and found.eviction)
        assert len(set(found.eviction)) < 4  # never the whole job


# --- the worked example of the paper: TP=2, PP=4, DP=4 on 16 nodes


def worked_example() -> Job:
    job = Job({"dp": 4, "pp": 4, "tp": 2})
    for rank in range(32):
        node = rank // 2
        if node == 15:
            job.waits(rank, "tp", "_allgather_base", 9)
        elif node == 14:
            job.waits(rank, "pp", "send 2->3", 5)
        elif node in (12, 13):
            job.waits(rank, "pp", f"recv {node - 12}->{node - 11}", 5)
        else:
            job.waits(rank, "dp", "allreduce", 3)
    return job


def test_the_worked_example_is_narrowed_down_by_who_waits_for_whom() -> None:
    found = locate(worked_example())
    assert (found.ranks, found.nodes, found.eviction) == ((30, 31), ("node-15",), ("node-15",))
    assert (found.group, found.group_name) == (tuple(range(24, 32)), "pp")


def test_the_worked_example_by_stacks_alone_is_the_papers_group() -> None:
    job = worked_example()
    job.activities.clear()
    found = locate(job)
    assert (found.kind, found.ranks, found.group) == ("unknown", (), tuple(range(24, 32)))
    assert found.eviction == ("node-12", "node-13", "node-14", "node-15")


def test_and_without_a_mesh_by_the_groups_that_the_job_created() -> None:
    job = worked_example()
    found = culprit.locate(job.merged(2), job.merged(1))
    assert (found.ranks, found.group) == ((30, 31), tuple(range(24, 32)))


# --- recorders, where there are some


def recorded(rank: int, *operations: tuple[str, int, bool, tuple[object, ...]], group: str = "0") -> Recording:
    told = tuple(recording.Operation(group, *one[:2], False, one[2], one[3], on_host=True) for one in operations)
    return Recording(rank, 50, told)


def test_sizes_that_differ_are_seen_by_recorders_only() -> None:
    job = Job(MESH)
    for rank in range(8):
        job.recordings[rank] = recorded(rank, ("all_reduce", 41, True, (4 if rank != 5 else 2,)))
    found = locate(job)
    assert (found.kind, found.ranks, found.category, found.eviction) == ("mismatch", (5,), "user_code", ())


def test_a_stack_outside_of_all_operations_outranks_an_empty_recorder() -> None:
    job = Job(MESH)
    job.outside(5, stuck.FETCH, waits_in="hrtimer_nanosleep")
    for rank in range(8):
        job.recordings[rank] = recorded(rank, ("all_reduce", 41, True, ())) if rank != 2 else Recording(2, 0)
    assert (locate(job).kind, locate(job).ranks) == ("loader", (5,))


# --- what others have seen


CASES = Path(__file__).resolve().parents[1] / "data" / "cases" / "cases.jsonl"
PUBLIC = [case for line in CASES.read_text().splitlines() if (case := json.loads(line))["signals"]["stacks"]]
NAMED: dict[str, tuple[str, str]] = {
    "fs-freeze-rank0-D-state": ("uninterruptible", "node-06/rank0"),
    "stacks-bloom-eval-hang-384gpu": ("loader", "node-52/local0"),
}


@pytest.mark.parametrize("case", PUBLIC, ids=[case["id"] for case in PUBLIC])
def test_public_stack_cases(case: dict[str, Any]) -> None:
    """As an agent would have sent them; whoever is named nowhere in the truth is not named here."""
    signals = case["signals"]
    asleep = [pid for pid, state in signals["metrics"].get("ps_stat", {}).items() if state.startswith("D")]
    labels = [label for label in signals["stacks"] for _ in range(4 if label.startswith("sampled") else 1)]
    looks = []
    for rank, label in enumerate(labels):
        (dump,) = stacks.read(signals["stacks"][label])
        state = "uninterruptible" if str(dump.pid) in asleep else ""
        looks.append(Seen(rank=rank, pid=dump.pid or rank, kind="trainer", state=state, dump=dump))  # type: ignore[arg-type]
    nodes = {rank: label.partition("/")[0] if "/" in label else f"of {label}" for rank, label in enumerate(labels)}
    capture = NodeCapture(number=1, attempt=1, node="all", time=1.0, positions=grouping.group(looks))
    merged = grouping.merge([capture], nodes)
    found = culprit.locate(merged, merged)
    kind, named = NAMED.get(case["id"], ("unknown", ""))
    assert (found.kind, [labels[rank] for rank in found.ranks]) == (kind, [named] if named else [])
