"""Who is outside while the others wait: the rules of reading many stacks at once."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.locate import places, stacks, waits
from evertrain.model.findings import Culprit, Finding

C10D = "torch/distributed/distributed_c10d.py"
LOADER = "torch/utils/data/dataloader.py"


def dump(*frames: str, state: str = "active", others: str = "") -> str:
    body = "\n".join(f"    {frame}" for frame in frames)
    head = "Process 9: python train.py\nPython v3.11.7 (/usr/bin/python3.11)\n"
    return f'{head}\nThread 9 ({state}): "MainThread"\n{body}\n{others}'


ALL_REDUCE = dump(f"all_reduce ({C10D}:2501)", "wrapper (torch/distributed/c10d_logger.py:83)", "step (train.py:40)")
BARRIER = dump(f"barrier ({C10D}:3700)", "save (train.py:70)")
COMPUTE = dump("forward (model.py:12)", "step (train.py:38)")
PIN = dump(
    "wait (threading.py:306)", "get (queue.py:179)", f"_try_get_data ({LOADER}:1011)", f"__next__ ({LOADER}:530)",
    "main (train.py:20)", state="idle",
)  # fmt: skip
WORKERS = dump(
    "_poll (multiprocessing/connection.py:947)", "get (multiprocessing/queues.py:113)",
    f"_try_get_data ({LOADER}:1132)",
    "main (train.py:20)", state="idle",
)  # fmt: skip
DENIED = "Process 9: ...\nError: Failed to suspend process\nReason: EPERM: Operation not permitted\n"


def judge(dumps: dict[str, str], **facts: Any) -> Finding:
    (found,) = waits.judge(dumps, facts)
    return found


def ranks(count: int, text: str = ALL_REDUCE, **other: str) -> dict[str, str]:
    return {f"rank{rank}": text for rank in range(count)} | other


def test_the_one_outside_is_accused() -> None:
    found = judge(ranks(8, rank5=COMPUTE))
    assert (found.culprit, found.rank, found.action) == (Culprit("rank", 5), 5, "retry")
    assert any("forward (model.py:12)" in line for line in found.evidence)


def test_several_outside_are_a_set() -> None:
    assert judge(ranks(8, rank5=COMPUTE, rank2=COMPUTE)).culprit == Culprit("rank", (2, 5))


def test_groups_in_different_collectives_are_all_victims() -> None:
    dumps = ranks(6) | {f"rank{rank}": BARRIER for rank in range(6, 11)} | {"rank11": COMPUTE}
    assert judge(dumps).culprit == Culprit("rank", 11)


def test_who_waits_in_the_system_outranks_who_computes() -> None:
    assert judge(ranks(8, rank3=COMPUTE, rank4=WORKERS)).culprit == Culprit("rank", 4)


def test_a_loader_that_never_delivers() -> None:
    found = judge(ranks(8, rank4=WORKERS))
    assert (found.category, found.action, found.culprit) == ("hang_dataloader", "retry", Culprit("rank", 4))


def test_a_batch_that_stays_inside_the_process_is_the_librarys_fault() -> None:
    dumps = {f"node-03/local{at}": ALL_REDUCE for at in range(8)} | {"node-52/local0": PIN}
    found = judge(dumps)
    assert (found.category, found.action) == ("framework_bug", "human")
    assert found.culprit == Culprit("rank", "node-52/local0") and found.host == "node-52"


def test_but_not_if_the_pinning_thread_waits_for_workers() -> None:
    thread = (
        'Thread 12 (idle): "Thread-2 (_pin_memory_loop)"\n    _poll (multiprocessing/connection.py:947)\n'
        "    do_one_step (torch/utils/data/_utils/pin_memory.py:32)\n"
        "    _pin_memory_loop (torch/utils/data/_utils/pin_memory.py:55)\n"
    )
    assert judge(ranks(8, rank4=PIN + thread)).category == "hang_dataloader"


def test_workers_that_read_files_lead_to_storage() -> None:
    worker = "Process 77: python\n[<0>] rpc_wait_bit_killable+0x1e/0xa0\n[<0>] nfs_readdir+0x1/0x2\n"
    found = judge(ranks(8, rank4=WORKERS, **{"rank4 loader worker 1": worker}))
    assert (found.category, found.action) == ("storage", "storage")


def test_workers_among_the_processes_of_a_rank_are_no_ranks() -> None:
    worker = dump("read (user_data.py:3)", "_worker_loop (torch/utils/data/_utils/worker.py:349)").replace("9", "10")
    assert judge(ranks(4, rank2=ALL_REDUCE + worker)).rule == "stack-all-inside"


def test_who_stands_elsewhere_in_a_second_dump_moves_and_is_no_suspect() -> None:
    later = {f"rank{rank} at 12:01:30": ALL_REDUCE for rank in range(8)}
    elsewhere = dump("backward (model.py:90)", "step (train.py:39)")
    stuck = judge(ranks(8, rank5=COMPUTE) | later | {"rank5 at 12:01:30": COMPUTE})
    assert stuck.culprit == Culprit("rank", 5)
    moving = judge(ranks(8, rank5=COMPUTE) | later | {"rank5 at 12:01:30": elsewhere})
    assert moving.culprit == Culprit()
    both = judge({"rank0": ALL_REDUCE, "rank1": COMPUTE, "rank0 again": COMPUTE, "rank1 again": ALL_REDUCE})
    assert both.is_benign and both.action == "none"


def test_the_only_one_that_cannot_be_read_is_stuck_in_the_kernel() -> None:
    found = judge(ranks(8, rank0=DENIED), ps_stat={"9": "Dl"})
    assert (found.category, found.action, found.culprit.type) == ("storage", "storage", "storage")
    assert "Dl" in found.note


def test_the_kernel_function_says_as_much_as_the_state() -> None:
    assert judge(ranks(8, rank0=DENIED), wchan={"9": "rpc_wait_bit_killable"}).confidence > 0.7
    assert judge(ranks(8, rank0=DENIED), wchan={"9": "futex_wait_queue"}).confidence == 0.5


def test_one_that_is_stopped_is_no_matter_of_storage() -> None:
    found = judge(ranks(8, rank0=DENIED), ps_stat={"9": "Tl", "10..16": "Rl"})
    assert (found.action, found.culprit) == ("retry", Culprit("rank", 0)) and "stopped" in found.note


def test_one_that_is_gone_is_called_so() -> None:
    assert "gone" in judge(ranks(8, rank0="Error: No such process (os error 3)")).note


def test_one_without_any_dump_is_the_suspect() -> None:
    assert judge(ranks(8, rank6="")).culprit == Culprit("rank", 6)


def test_nobody_readable_is_a_missing_privilege() -> None:
    found = judge(ranks(4, DENIED))
    assert found.is_symptom and found.culprit == Culprit() and "privilege" in found.note


def test_all_inside_accuses_nobody() -> None:
    found = judge(ranks(8))
    assert (found.action, found.culprit) == ("human", Culprit()) and found.is_symptom


def test_the_collective_may_run_on_the_autograd_thread() -> None:
    thread = "Thread 80 (active)\n    all_gather_into_tensor (deepspeed/comm/torch.py:219)\n"
    backward = dump("backward (torch/autograd/__init__.py:266)", "main (train.py:5)", state="idle", others=thread)
    assert judge(ranks(4, backward)).rule == "stack-all-inside"
    assert judge(ranks(4, backward, rank2=COMPUTE)).culprit == Culprit("rank", 2)


def test_a_helpers_thread_says_nothing_about_its_rank() -> None:
    thread = f'Thread 80 (idle): "heartbeat"\n    barrier ({C10D}:3700)\n'
    assert judge(ranks(4, rank1=dump("forward (model.py:12)", others=thread))).culprit == Culprit("rank", 1)


def test_too_many_outside_or_the_same_on_every_host_is_software() -> None:
    many = judge(ranks(8, COMPUTE, rank6=ALL_REDUCE, rank7=ALL_REDUCE))
    assert (many.action, many.culprit) == ("human", Culprit())
    everywhere = judge(ranks(8, rank6=COMPUTE), same_on_every_host=True)
    assert (everywhere.category, everywhere.action) == ("framework_bug", "human")


def test_rank_0_alone_in_a_barrier_is_a_branch_in_the_code() -> None:
    found = judge(ranks(8, rank0=BARRIER))
    assert (found.category, found.action) == ("user_code", "user_code")


def test_one_stack_that_waits_for_nobody_says_nothing() -> None:
    assert waits.judge({"sampled ranks": COMPUTE}) == ()


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        ("ncclGroupEnd (libnccl.so.2)", "collective"),
        ("wait_tensor (torch/distributed/_functional_collectives.py:150)", "collective"),
        ("reduce_scatter_tensor_coalesced (deepspeed/comm/comm.py:300)", "collective"),
        ("send (deepspeed/runtime/pipe/p2p.py:51)", "transfer"),
        ("_batched_p2p_ops (megatron/core/pipeline_parallel/p2p_communication.py:163)", "transfer"),
        ("_store_based_barrier (torch/distributed/distributed_c10d.py:480)", "rendezvous"),
        ("synchronize (torch/cuda/__init__.py:792)", "device"),
        ("item (torch/_tensor.py:5)", "device"),
        ("_save (torch/serialization.py:850)", "checkpoint"),
        ("emit (logging/__init__.py:1100)", "storage"),
        ("compile_file (torch/_inductor/codecache.py:2000)", "compiling"),
        ("destroy_process_group (torch/distributed/distributed_c10d.py:2146)", "exiting"),
        ("acquire (threading.py:180)", "lock"),
        ("reduce (my_metrics.py:10)", "elsewhere"),
        ("send (mail/client.py:10)", "elsewhere"),
    ],
)
def test_places(frame: str, kind: str) -> None:
    (one,) = stacks.read(dump(frame, "main (train.py:1)"))
    assert places.place(one).kind == kind


def test_sinks_of_a_chain_a_circle_and_a_victim() -> None:
    assert waits.sinks({1: [2], 2: [3], 4: [2]}) == [frozenset({3})]
    assert waits.sinks({1: [2], 2: [3], 3: [2]}) == [frozenset({2, 3})]
    assert set(waits.sinks({1: [2, 5], 3: [4]})) == {frozenset({2}), frozenset({5}), frozenset({4})}
    assert waits.sinks({1: [], 2: [2]}) == []


def test_sinks_of_ten_thousand_in_a_row() -> None:
    assert waits.sinks({at: [at + 1] for at in range(10_000)}) == [frozenset({10_000})]


@given(st.dictionaries(st.integers(0, 12), st.lists(st.integers(0, 12), max_size=4), max_size=12))
def test_every_waiter_leads_to_a_sink(graph: dict[int, list[int]]) -> None:
    ends = waits.sinks(graph)
    for start, edges in graph.items():
        if set(edges) - {start}:
            seen, todo = set(), [start]
            while todo:
                if (one := todo.pop()) not in seen:
                    seen.add(one)
                    todo += graph.get(one, [])
            assert any(end <= seen for end in ends)


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=60), max_size=5))
def test_any_dumps_are_judged(dumps: dict[str, str]) -> None:
    for found in waits.judge(dumps):
        assert found.action != "evict"
