"""What is the same place, what is detail, and what comes of it over many nodes."""

from __future__ import annotations

import time

import msgspec

from evertrain.locate import culprit, grouping, stacks
from evertrain.locate.grouping import Seen
from evertrain.model.recording import Group, Operation, Recording
from evertrain.model.stacks import Dump, Frame, Member, NodeCapture, Position, Thread
from support import stuck
from support.stuck import Job


def seen(rank: int, *frames: Frame, pid: int = 0, **more: object) -> Seen:
    dump = Dump((Thread(frames, "MainThread", True, "idle"),), pid or 100 + rank)
    told = {"rank": rank, "pid": pid or 100 + rank, "kind": "trainer", "dump": dump} | more
    return Seen(**told)  # type: ignore[arg-type]


def test_lines_addresses_arguments_and_where_python_lives_are_detail() -> None:
    first = seen(
        0, Frame("step (x=1)", "/venv/lib/python3.11/site-packages/torch/optim/adam.py", 3), Frame("main", "a.py", 9)
    )
    second = seen(1, Frame("step (x=2)", "torch/optim/adam.py", 4), Frame("main", "a.py", 8))
    (found,) = grouping.group([first, second])
    assert found.members == (Member(0, 100), Member(1, 101))
    assert found.frames == (Frame("step", "torch/optim/adam.py", 3), Frame("main", "a.py", 9))


def test_native_frames_do_not_part_those_of_whom_they_were_taken() -> None:
    native = seen(1, Frame("at::native::mm", "libtorch.so"), Frame("0x7f01", "libtorch.so"), Frame("main", "a.py", 9))
    assert len(grouping.group([seen(0, Frame("main", "a.py", 9)), native])) == 1


def test_files_of_one_name_in_different_folders_are_different() -> None:
    looks = [seen(0, Frame("run", "/home/x/one/util.py", 1)), seen(1, Frame("run", "/home/x/two/util.py", 1))]
    assert len(grouping.group(looks)) == 2


def test_how_a_process_waits_parts_what_its_frames_do_not() -> None:
    frame = Frame("main", "a.py", 9)
    looks = [
        seen(0, frame, waits_in="futex_wait_queue"), seen(1, frame, waits_in="futex_do_wait"),
        seen(2, frame, waits_in="hrtimer_nanosleep"), seen(3, frame, state="stopped"), seen(4, frame, kind="loader"),
    ]  # fmt: skip
    assert [[one.rank for one in found.members] for found in grouping.group(looks)] == [[0, 1], [2], [3], [4]]


def test_several_looks_count_for_each_place() -> None:
    looks = [seen(0, Frame("a", "a.py")), seen(0, Frame("b", "a.py")), seen(0, Frame("a", "a.py"))]
    assert [found.members for found in grouping.group(looks)] == [(Member(0, 100, 2),), (Member(0, 100, 1),)]


def test_a_thread_of_autograd_inside_a_collective_decides() -> None:
    text = stuck.text(stuck.BACKWARD) + f"Thread 12 (active)\n    all_reduce ({stuck.C10D}:2501)\n    hook (m.py:1)\n"
    (dump,) = stacks.read(text)
    (found,) = grouping.group([Seen(rank=0, pid=9, kind="trainer", dump=dump)])
    assert found.place == "collective" and found.frames[0].function == "all_reduce"


def test_the_wait_of_the_hook_is_one_for_a_collective() -> None:
    frames = (Frame("wait", "/x/site-packages/evertrain/worker/collectives.py", 110), Frame("main", "a.py", 9))
    assert grouping.group([seen(0, *frames)])[0].place == "collective"


def test_who_keeps_the_interpreter_decides_and_is_told() -> None:
    holder = Thread((Frame("decode", "codec.py", 3),), "Thread-1", False, "idle", holds_gil=True)
    main = Thread((Frame("main", "a.py", 9),), "MainThread", True, "active")
    looks = [Seen(rank=0, pid=9, kind="trainer", dump=Dump((main, holder)))]
    (found,) = grouping.group(looks)
    assert found.is_held and found.frames[0].function == "decode"
    # Python that computes has the interpreter and gives it away when asked
    runs = Thread((Frame("main", "a.py", 9),), "MainThread", True, "active", holds_gil=True)
    assert not grouping.group([Seen(rank=0, pid=9, kind="trainer", dump=Dump((runs,)))])[0].is_held


def test_endless_recursion_is_cut() -> None:
    (found,) = grouping.group([seen(0, *[Frame("again", "a.py", 1)] * 5000)])
    assert len(found.frames) < 100


# --- over the nodes


def test_places_of_many_nodes_become_one() -> None:
    job = Job({"dp": 4, "tp": 2})
    merged = job.merged(3, missing=["node-3"])
    assert [[one.rank for one in found.members] for found in merged.positions] == [[0, 1, 2, 3, 4, 5]]
    assert (merged.number, merged.attempt, merged.missing) == (3, 1, ("node-3",))
    assert merged.nodes == job.nodes and sorted(merged.activities) == list(range(6))


def test_an_older_capture_that_comes_late_is_left_out() -> None:
    job = Job({"dp": 4})
    late, *_ = job.captures(1)
    merged = grouping.merge([*job.captures(2)[1:], late], job.nodes)
    assert (merged.number, merged.missing) == (2, ("node-0",))


def test_members_of_groups_are_sent_by_two_nodes_and_those_of_all_ranks_by_none() -> None:
    job = Job({"dp": 8})
    sent = [capture.groups for capture in job.captures()]
    assert all(group.members == () for groups in sent for group in groups)  # all of them are the world
    group = Group("7", "mesh_dp", (0, 3, 5))
    assert grouping.slim([group], [3], 8) == (Group("7", "mesh_dp"),)
    assert grouping.slim([group], [0], 8) == grouping.slim([group], [5, 6], 8) == (group,)


def test_two_groups_of_one_name_are_better_unknown() -> None:
    one, other = (
        NodeCapture(number=1, attempt=1, node=f"node-{at}", time=1.0, groups=(Group("3", "tp", (2 * at, 2 * at + 1)),))
        for at in range(2)
    )
    assert grouping.merge([one, other], {}).groups["3"].members == ()


def test_usual_places_and_unusual_ones() -> None:
    """Stages of a pipeline may rightly stand in different places, if their share is large enough."""

    def positions(**counts: int) -> list[Position]:
        first, found = 0, []
        for name, count in counts.items():
            members = tuple(Member(rank, rank) for rank in range(first, first + count))
            found.append(Position(kind="trainer", place="collective", frames=(Frame(name, "a.py"),), members=members))
            first += count
        return found

    def usual(stages: int, **counts: int) -> tuple[list[str], list[str]]:
        both = grouping.dominant(positions(**counts), "trainer", stages)
        return tuple([one.first.frames[0].function for one in some] for some in both)  # type: ignore[return-value]

    assert usual(4, reduce=24, irecv=4, isend=2, gather=2) == (["reduce"], ["irecv", "isend", "gather"])
    assert usual(4, reduce=23, irecv=5, isend=2, gather=2) == (["reduce", "irecv"], ["isend", "gather"])
    assert usual(1, reduce=3, irecv=3) == (["reduce"], ["irecv"])


def test_who_has_moved() -> None:
    job = Job({"dp": 4})
    before = job.merged(1)
    job.outside(2, stuck.FETCH)
    job.see(3, stuck.ALL_REDUCE, "active")  # the same place, though it does not wait at this moment
    assert grouping.moved(before, job.merged(2)) == {(2, 1020)}


def test_a_capture_goes_over_the_wire() -> None:
    (capture, *_) = Job({"dp": 4}).captures()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(capture), type=NodeCapture) == capture


def test_sizes_in_recordings_can_be_compared_after_the_wire() -> None:
    job = Job({"dp": 2})
    pending = Operation("0", "all_reduce", 41, False, True, ((((4, 2),), ("Float",))))
    job.recordings = {rank: Recording(rank, 9, (pending,), missed=pending) for rank in range(2)}
    sent = [msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=NodeCapture) for one in job.captures()]
    assert grouping.merge(sent, job.nodes).recordings == job.recordings


def test_two_thousand_ranks_are_judged_in_a_fifth_of_the_time_that_ten_thousand_may_take() -> None:
    job = Job({"pp": 10, "dp": 25, "tp": 8}, per_node=8)
    for rank in range(job.size):
        for worker in range(5):
            job.see(rank, stuck.IDLE_WORKER, kind="loader", pid=10**6 + 10 * rank + worker, waits_in="do_poll")
    job.outside(1234, stuck.WORKERS, waits_in="do_poll")
    captures, earlier = job.captures(2), job.merged(1)
    began = time.process_time()
    found = culprit.locate(grouping.merge(captures, job.nodes), earlier, mesh=job.mesh)
    assert (found.kind, found.ranks) == ("loader", (1234,))
    # a machine under load is three times slower than one that is not
    assert time.process_time() - began < 0.4 * 3
