"""RAS reports: one look proves nothing, the same twice shows who is behind, whoever does not answer is missing."""

import json

from hypothesis import given
from hypothesis import strategies as st

from evertrain.locate import ras
from evertrain.model.findings import Culprit

TABLE = """\
Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  {errors}
"""
AHEAD = """
Warnings
========

#0-0 (fa93daea854b060b) MISMATCH
  Communicator ranks have different AllGather operation counts
  30 ranks have launched up to operation {most}
  2 ranks have launched up to operation {few}
  Rank 12 -- GPU 4 managed by process 323032 on node 10.0.190.124
  Rank 13 -- GPU 5 (NVML 6) managed by process 323033 on node 10.0.190.124
"""
DEAD = """
Errors
======

DEAD
  {count} job process{es} considered dead (unreachable via the RAS network)
{who}
Warnings
========

"""


def report(body: str, errors: str = "MISMATCH") -> list[str]:
    return (TABLE.format(errors=errors) + body).splitlines()


def test_one_look_at_ranks_that_differ_is_no_fault() -> None:
    (found,) = ras.judge(report(AHEAD.format(most=640, few=641)))
    assert (found.category, found.action, found.is_benign) == ("none", "none", True)
    assert "Rank 12" in " ".join(found.evidence)


def test_counts_that_grow_between_looks_are_no_fault() -> None:
    looks = report(AHEAD.format(most=640, few=641)) + report(AHEAD.format(most=700, few=699))
    (found,) = ras.judge(looks)
    assert found.action == "none" and "2 looks" in found.note


def test_the_same_counts_twice_accuse_those_behind() -> None:
    (found,) = ras.judge(report(AHEAD.format(most=640, few=639)) * 2)
    assert found.culprit == Culprit("rank", (12, 13))
    assert (found.action, found.host) == ("retry", "10.0.190.124")


def test_when_ras_lists_those_ahead_nobody_is_accused() -> None:
    (found,) = ras.judge(report(AHEAD.format(most=640, few=641)) * 2)
    assert found.culprit == Culprit() and found.action == "human"


def test_a_fact_may_stand_for_the_second_look() -> None:
    (found,) = ras.judge(report(AHEAD.format(most=640, few=639)), {"ras_counts": "unchanged after 60 s"})
    assert found.culprit == Culprit("rank", (12, 13))


def test_one_rank_behind_has_its_own_wording() -> None:
    lines = report(
        "#1-0 (cf264af53edbe986) MISMATCH\n  Communicator ranks have different AllReduce operation counts\n"
        "  31 ranks have launched up to operation 15\n"
        "  Rank 7 has not launched any operations -- GPU 7 managed by process 9 on node 10.1.1.1\n"
    )
    (found,) = ras.judge(lines * 2)
    assert found.culprit == Culprit("rank", 7) and found.rank == 7


def test_all_processes_of_a_node_dead_is_the_node() -> None:
    who = "".join(f"  Process {300 + at} on node 10.0.0.9 managing GPU {at}\n" for at in range(8))
    (found,) = ras.judge(report(DEAD.format(count=8, es="es are", who=who), "INCOMPLETE"))
    assert (found.category, found.action) == ("host_os", "evict")
    assert found.culprit == Culprit("host", "10.0.0.9")


def test_one_dead_process_convicts_no_host() -> None:
    who = "  Process 300 on node 10.0.0.9 managing GPU 3\n"
    (found,) = ras.judge(report(DEAD.format(count=1, es=" is", who=who), "INCOMPLETE"))
    assert found.action == "retry" and found.host == "10.0.0.9"


def test_a_silent_process_is_named_by_its_rank() -> None:
    lines = report(
        "INCOMPLETE\n  Missing communicator data from 1 job process\n"
        "  Process 3487984 on node 172.16.64.213 managing GPU 5\n\n"
        "#0-0 (27a079b828ff1a75) INCOMPLETE\n  Missing communicator data from 1 rank\n"
        "  Rank 21 -- GPU 5 managed by process 3487984 on node 172.16.64.213\n",
        "INCOMPLETE",
    )
    (found,) = ras.judge(lines)
    assert found.culprit == Culprit("rank", 21) and found.host == "172.16.64.213"


def test_errors_of_peers_are_symptoms() -> None:
    body = "#0-0 (1) ERROR\n  Asynchronous errors on 3 ranks\n  {}\n  Rank 3 -- GPU 3 managed by process 3 on node h1\n"
    (peers,) = ras.judge(report(body.format("3 ranks reported Remote process error"), "ERROR"))
    assert peers.is_symptom and peers.culprit == Culprit()
    (own,) = ras.judge(report(body.format("1 ranks reported Unhandled CUDA error"), "ERROR"))
    assert own.culprit == Culprit("rank", 3)


def test_a_rank_that_left_is_named() -> None:
    body = (
        "#0-0 (1) MISMATCH\n  Communicator ranks have different status\n  31 ranks have status RUNNING\n"
        "  Rank 4 has status ABORT -- GPU 4 managed by process 8 on node 10.0.0.3\n"
    )
    (found,) = ras.judge(report(body))
    assert found.culprit == Culprit("rank", 4) and "ABORT" in found.note


def test_nothing_wrong_is_said() -> None:
    (found,) = ras.judge(report("", "OK"))
    assert (found.rule, found.action) == ("ras-ok", "none")


def test_no_report_says_nothing() -> None:
    assert ras.judge(["all is well", "{not json"]) == ()
    assert ras.judge(['{"a": 1}']) == ()


def document(*behind: int) -> str:
    ranks = [
        {"rank": rank, "host": "10.0.0.1", "pid": rank, "cuda_dev": rank,
         "status": {"init_state": 0, "async_error": 0}, "collective_counts": {"AllReduce": 9 - (rank in behind)}}
        for rank in range(4)
    ]  # fmt: skip
    return json.dumps({"communicators": [{"hash": "0x1", "ranks": ranks, "missing_ranks": []}]}, indent=2)


def test_json_twice_the_same() -> None:
    lines = document(2).splitlines()
    (one,) = ras.judge(lines)
    assert one.action == "none"
    (found,) = ras.judge(lines + lines)
    assert found.culprit == Culprit("rank", 2)


def test_one_ahead_of_all_others_accuses_nobody() -> None:
    lines = document(0, 1, 3).splitlines()
    (found,) = ras.judge(lines + lines)
    assert (found.action, found.culprit) == ("human", Culprit())


def test_json_missing_ranks() -> None:
    missing = {"rank": 5, "host": "h", "status": {"considered_dead": True}}
    (found,) = ras.judge([json.dumps({"communicators": [{"ranks": [], "missing_ranks": [missing]}]})])
    assert found.rule == "ras-dead" and found.culprit == Culprit("rank", 5)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["ranks", "missing_ranks", "status", "async_error", "rank", "AllReduce"]), inner
        )
    ),
    max_leaves=10,
)


@given(st.lists(junk, max_size=3))
def test_any_json_is_judged(communicators: list[object]) -> None:
    for found in ras.judge([json.dumps({"communicators": communicators})]):
        assert found.action in ("none", "retry", "human", "evict")


@given(st.lists(st.sampled_from((TABLE + AHEAD + DEAD).splitlines()) | st.text(max_size=40), max_size=40))
def test_lines_in_any_disorder_are_judged(lines: list[str]) -> None:
    for found in ras.judge(lines):
        assert found.note
