"""Flight recorder dumps, matched across ranks: exactly those are accused whom the others wait for."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.locate import flight, recorder
from evertrain.model.findings import Culprit, Finding

DATA = Path(__file__).parent.parent / "data" / "flight"


def recorded(kind: str, suffix: str = "") -> list[recorder.Recordings]:
    paths = [DATA / kind / f"rank_{rank}{suffix}" for rank in range(4)]
    return [recorder.read(path.read_bytes(), recorder.rank_of(path.name)) for path in paths]


def judge(found: recorder.Recordings) -> Finding:
    (one,) = flight.judge(found)
    return one


# --- what torch 2.13 writes


@pytest.mark.parametrize(
    ("kind", "suffix", "rule", "rank"),
    [
        ("absent", "", "flight-absent", 2),
        ("behind", "", "flight-absent", 1),
        ("behind", ".json", "flight-absent", 1),
        ("mismatch", "", "flight-mismatch", 1),
    ],
)
def test_real_jobs(kind: str, suffix: str, rule: str, rank: int) -> None:
    found = judge(recorder.together(recorded(kind, suffix)))
    assert (found.rule, found.culprit) == (rule, Culprit("rank", rank))


def test_the_missing_dump_of_a_rank_that_nobody_knows_of_accuses_nobody_wrongly() -> None:
    dumps = recorded("absent")
    assert judge(recorder.together([dumps[0], dumps[1], dumps[3]])).culprit == Culprit()


# --- other layouts


def entry(group: str, number: int, op: str = "all_reduce", *, done: bool = False, **other: Any) -> dict[str, Any]:
    return {
        "process_group": (group, ""), "collective_seq_id": number, "p2p_seq_id": 0, "profiling_name": f"nccl:{op}",
        "input_sizes": [[8]], "output_sizes": [[8]], "input_dtypes": ["Float"], "output_dtypes": ["Float"],
        "state": "completed" if done else "started", "time_discovered_completed_ns": 5 if done else None,
        "retired": done, "is_p2p": False,
    } | other  # fmt: skip


def dump(rank: int, *entries: dict[str, Any], groups: dict[str, list[int]] | None = None) -> recorder.Recordings:
    config = {
        name: {"name": name, "desc": f"desc {name}", "ranks": str(ranks)} for name, ranks in (groups or {}).items()
    }
    content = {"version": "2.4", "pg_config": config, "pg_status": {}, "nccl_comm_state": {}, "entries": entries}
    return recorder.read(json.dumps(content).encode(), rank)


WORLD = {"0": [0, 1, 2, 3]}


def test_an_older_layout_is_a_bare_list_with_seq_id() -> None:
    def old(rank: int, number: int) -> recorder.Recordings:
        entries = [
            {
                "pg_id": 0,
                "seq_id": number,
                "profiling_name": "nccl:all_reduce",
                "state": "scheduled",
                "input_sizes": [[4]],
            }
        ]
        return recorder.read(json.dumps(entries).encode(), rank)

    assert judge(recorder.together([old(0, 7), old(1, 7), old(2, 6), old(3, 7)])).culprit == Culprit("rank", 2)


def test_a_device_that_does_not_finish_what_its_peers_finished() -> None:
    dumps = [dump(rank, entry("0", 5, done=True), entry("0", 6), groups=WORLD) for rank in (0, 1, 3)]
    dumps.append(dump(2, entry("0", 5), entry("0", 6), groups=WORLD))
    found = judge(recorder.together(dumps))
    assert (found.rule, found.culprit, found.action) == ("flight-passed", Culprit("rank", 2), "evict")


def test_a_broadcast_ends_on_its_root_first_and_shows_no_fault_of_others() -> None:
    dumps = [dump(rank, entry("0", 5, "broadcast", done=rank == 0), groups=WORLD) for rank in range(4)]
    assert judge(recorder.together(dumps)).culprit == Culprit()


def test_an_empty_dump_stands_for_a_held_interpreter() -> None:
    dumps = [dump(rank, entry("0", 5), groups=WORLD) for rank in (0, 1, 2)] + [dump(3)]
    found = judge(recorder.together(dumps))
    assert (found.rule, found.culprit, found.action) == ("flight-empty", Culprit("rank", 3), "retry")


def test_a_member_without_a_dump() -> None:
    found = judge(recorder.together([dump(rank, entry("0", 5), groups=WORLD) for rank in (0, 1, 2)]))
    assert (found.rule, found.culprit) == ("flight-no-dump", Culprit("rank", 3))


def test_different_sizes_are_a_matter_of_the_code() -> None:
    dumps = [dump(rank, entry("0", 5, input_sizes=[[16 if rank == 1 else 8]]), groups=WORLD) for rank in range(4)]
    found = judge(recorder.together(dumps))
    assert (found.rule, found.culprit, found.action) == ("flight-mismatch", Culprit("rank", 1), "user_code")
    assert "sizes" in found.note


def test_sizes_of_an_uneven_exchange_may_differ() -> None:
    dumps = [dump(rank, entry("0", 5, "all_to_all", input_sizes=[[rank + 8]]), groups=WORLD) for rank in range(4)]
    assert judge(recorder.together(dumps)).rule == "flight-all-arrived"


def test_without_a_majority_nobody_is_named() -> None:
    dumps = [dump(rank, entry("0", 5, "barrier" if rank % 2 else "all_reduce"), groups=WORLD) for rank in range(4)]
    assert judge(recorder.together(dumps)).culprit.type == "code"


def test_groups_in_different_order_are_a_circle() -> None:
    groups = {"1": [0, 1], "2": [0, 1]}
    found = judge(recorder.together([dump(0, entry("1", 5), groups=groups), dump(1, entry("2", 5), groups=groups)]))
    assert (found.rule, found.culprit) == ("flight-deadlock", Culprit("rank", (0, 1)))


def test_a_job_that_runs_accuses_nobody() -> None:
    dumps = [dump(rank, entry("0", 5, done=True), groups=WORLD) for rank in range(4)]
    assert flight.judge(recorder.together(dumps)) == ()


def test_victims_of_victims_lead_to_the_cause_through_several_groups() -> None:
    """Pipelines 0-2, 1-3; tensor groups 0-1, 2-3. Rank 3 stays away; 2 waits for it, 0 and 1 for their next stage."""
    groups = {"pp0": [0, 2], "pp1": [1, 3], "tp0": [0, 1], "tp1": [2, 3]}

    def receive(group: str) -> dict[str, Any]:
        return entry(group, 3, "recv 0<-1", is_p2p=True, p2p_seq_id=40)

    dumps = [
        dump(0, receive("pp0"), groups=groups),
        dump(1, receive("pp1"), groups=groups),
        dump(2, entry("tp1", 9), groups=groups),
        dump(3, entry("tp1", 8, done=True), groups=groups),
    ]
    assert judge(recorder.together(dumps)).culprit == Culprit("rank", 3)


# --- the summary of a set


def pending(group: str, description: str, op: str, number: int) -> dict[str, Any]:
    return {"pg": group, "desc": description, "op": f"nccl:{op}", "collective_seq_id": number, "p2p_seq_id": number,
            "state": "scheduled"}  # fmt: skip


def test_members_that_are_not_listed_follow_from_other_groups_of_the_kind() -> None:
    """Two pipelines of two stages; only the first is listed. Rank 3 has recorded nothing."""
    summary = {
        "pg_members": {"5": ["PIPELINE_GROUP", "[0, 2]"]},
        "per_rank": {
            "0": {"entries": 3, "first_pending": [pending("5", "PIPELINE_GR", "send 0->1", 7)]},
            "1": {"entries": 3, "first_pending": [pending("6", "PIPELINE_GR", "send 0->1", 7)]},
            "2": {"entries": 3, "first_pending": [pending("5", "PIPELINE_GR", "recv 1<-0", 7)]},
            "3": {"entries": 0, "first_pending": []},
        },
    }
    (found,) = flight.judge_summary(summary)
    assert found.culprit == Culprit("rank", 3)


def test_the_lowest_number_in_a_group() -> None:
    per_rank = {
        str(rank): {"entries": 9, "first_pending": [pending("9", "EXPERT", "all_to_all", 20 if rank in (1, 2) else 27)]}
        for rank in range(6)
    }
    (found,) = flight.judge_summary({"pg_members": {"9": ["EXPERT", "[0, 1, 2, 3, 4, 5]"]}, "per_rank": per_rank})
    assert (found.culprit, found.action) == (Culprit("rank", (1, 2)), "evict")


@pytest.mark.parametrize(
    "content", [{}, {"per_rank": 3}, {"per_rank": {"x": {}}}, {"pg_members": [], "per_rank": {"0": None}}]
)
def test_a_summary_of_nothing(content: dict[str, Any]) -> None:
    assert flight.judge_summary(content) == ()


# --- whatever comes


@pytest.mark.parametrize(
    ("data", "rank", "why"),
    [
        (b"", 0, "neither"),
        (b"{}", 0, "no entries"),
        (b"[" * 100_000, 0, "neither"),
        (b'{"entries": []}', None, "whose"),
        (b"\x80\x02cos\nsystem\n.", 0, "more than data"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(data: bytes, rank: int | None, why: str) -> None:
    with pytest.raises(ValueError, match=why) as told:
        recorder.read(data, rank)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("name", "rank"), [("comm_lib_trace_rank_12", 12), ("rank_3.json", 3), ("r7.pkl.gz", 7), ("trace", None)]
)
def test_the_rank_stands_at_the_end_of_the_name(name: str, rank: int | None) -> None:
    assert recorder.rank_of(name) == rank


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["pg", "op", "process_group", "profiling_name", "pg_id", "input_sizes", "state",
                                       "collective_seq_id", "first_pending", "entries", "0", "1"]), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(junk, junk, junk)
def test_any_content_is_read_or_refused(entries: Any, config: Any, per_rank: Any) -> None:
    for content in ({"entries": entries, "pg_config": config}, {"per_rank": per_rank, "pg_members": config}, entries):
        try:
            found = recorder.read(json.dumps(content).encode(), 0)
        except ValueError:
            continue
        flight.judge(recorder.together([found, found]))
