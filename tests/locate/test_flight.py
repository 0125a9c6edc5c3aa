"""Flight recorder dumps, matched across ranks: exactly those are accused whom the others wait for."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.locate import flight, recorder
from evertrain.model import activity
from evertrain.model.activity import RankActivity
from evertrain.model.findings import Culprit, Finding
from evertrain.model.recording import Group, Recordings

DATA = Path(__file__).parent.parent / "data" / "flight"


def recorded(kind: str, suffix: str = "") -> list[Recordings]:
    paths = [DATA / kind / f"rank_{rank}{suffix}" for rank in range(4)]
    return [recorder.read(path.read_bytes(), recorder.rank_of(path.name)) for path in paths]


def judge(found: Recordings) -> Finding:
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


def dump(rank: int, *entries: dict[str, Any], groups: dict[str, list[int]] | None = None) -> Recordings:
    config = {
        name: {"name": name, "desc": f"desc {name}", "ranks": str(ranks)} for name, ranks in (groups or {}).items()
    }
    content = {"version": "2.4", "pg_config": config, "pg_status": {}, "nccl_comm_state": {}, "entries": entries}
    return recorder.read(json.dumps(content).encode(), rank)


WORLD = {"0": [0, 1, 2, 3]}


def test_an_older_layout_is_a_bare_list_with_seq_id() -> None:
    def old(rank: int, number: int) -> Recordings:
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


def test_a_broadcast_ends_on_some_first_and_shows_no_fault_of_the_others() -> None:
    ahead = [dump(rank, entry("0", 5, "broadcast", done=True), entry("0", 6), groups=WORLD) for rank in (0, 3)]
    dumps = [*ahead, *(dump(rank, entry("0", 5, "broadcast"), groups=WORLD) for rank in (1, 2))]
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


# --- what live ranks show


def live(rank: int, *calls: tuple[str, int, str], pending: bool = True, at: float = 100.0, **other: Any) -> Recordings:
    """The calls of a rank on gloo, the last one pending since `at`, read at second 110."""
    entries = [entry(group, number, op, retired=True, profiling_name=f"gloo:{op}") for group, number, op in calls]
    if pending:
        entries[-1] |= {"retired": False, "state": "scheduled", "time_created_ns": int(at * 1e9)} | other
    content = {"version": "2.10", "pg_config": {"": {"name": "", "ranks": "[]"}}, "entries": entries}
    return recorder.read(json.dumps(content).encode(), rank, 110.0)


MEMBERS = Recordings(
    {},
    {
        "0": Group("0", "default_pg", (0, 1, 2, 3)),
        "1": Group("1", "tp", (0, 1)),
        "2": Group("2", "tp", (2, 3)),
    },
)


def steps(rank: int, count: int, *more: tuple[str, int, str]) -> list[tuple[str, int, str]]:
    """Each step: its pair, the world, the pair again."""
    pair = "1" if rank < 2 else "2"
    done = []
    for step in range(count):
        done += [(pair, 2 * step + 1, "all_gather"), ("0", step + 1, "all_reduce"), (pair, 2 * step + 2, "all_reduce")]
    return [*done, *((pair if group == "pair" else group, number, op) for group, number, op in more)]


def test_one_that_leaves_out_what_a_pair_does_is_told_from_its_partner() -> None:
    """Rank 2 has skipped its pair's operation, 3 waits there; all others wait in the world for 3."""
    dumps = [live(rank, *steps(rank, 4, ("pair", 9, "all_gather"), ("0", 5, "all_reduce"))) for rank in (0, 1)]
    dumps += [live(2, *steps(2, 4, ("0", 5, "all_reduce"))), live(3, *steps(3, 4, ("pair", 9, "all_gather")))]
    together = recorder.together([MEMBERS, *dumps])
    found = judge(together)
    assert (found.rule, found.culprit, found.action) == ("flight-skipped", Culprit("rank", 2), "user_code")
    assert "without all_gather #9 of group 2 (tp)" in found.note
    assert flight.waits(together) == {0: (3,), 1: (3,), 2: (3,), 3: (2,)}


def test_without_a_past_that_is_a_circle() -> None:
    dumps = [live(rank, ("1", 1, "all_gather"), ("0", 1, "all_reduce")) for rank in (0, 1)]
    dumps += [live(2, ("0", 1, "all_reduce")), live(3, ("2", 1, "all_gather"))]
    found = judge(recorder.together([MEMBERS, *dumps]))
    assert (found.rule, found.culprit) == ("flight-deadlock", Culprit("rank", (2, 3)))


def test_half_a_job_in_another_order_is_no_single_rank_that_leaves_something_out() -> None:
    dumps = [live(rank, *steps(rank, 4, ("pair", 9, "all_gather"))) for rank in (0, 3)]
    dumps += [live(rank, *steps(rank, 4, ("0", 5, "all_reduce"))) for rank in (1, 2)]
    assert judge(recorder.together([MEMBERS, *dumps])).rule == "flight-deadlock"


def test_left_out_long_ago_and_now_elsewhere() -> None:
    """Rank 2 is outside of all operations, but others wait in one that it has passed by."""
    groups = Recordings({}, MEMBERS.groups | {"3": Group("3", "dp", (0, 2)), "4": Group("4", "dp", (1, 3))})

    def calls(rank: int, *last: str) -> list[tuple[str, int, str]]:
        pair, dp = ("1" if rank < 2 else "2"), ("4" if rank % 2 else "3")
        names = {"pair": pair, "dp": dp, "0": "0"}
        listed = ["pair", "dp", "0", "dp"] * 5 + list(last)
        counts: dict[str, int] = {}
        done = []
        for name in listed:
            counts[name] = counts.get(name, 0) + 1
            done.append((names[name], counts[name], "all_reduce"))
        return done

    dumps = [live(0, *calls(0, "pair", "dp", "0")), live(1, *calls(1, "pair", "dp"))]
    dumps += [live(2, *calls(2, "dp"), pending=False), live(3, *calls(3, "pair"))]
    found = judge(recorder.together([groups, *dumps]))
    assert (found.rule, found.culprit) == ("flight-skipped", Culprit("rank", 2))


def test_what_most_do_for_the_first_time_is_no_departure_of_one() -> None:
    """All but rank 0 come to a barrier that no step had before; rank 0 goes on and waits for 2 in the usual way."""
    groups = Recordings({}, MEMBERS.groups | {"3": Group("3", "dp", (0, 2)), "4": Group("4", "dp", (1, 3))})

    def calls(rank: int, *last: tuple[str, int, str]) -> list[tuple[str, int, str]]:
        dp = "4" if rank % 2 else "3"
        usual = [
            one for step in range(6) for one in ((dp, 2 * step + 1, "all_gather"), (dp, 2 * step + 2, "reduce_scatter"))
        ]
        return [*usual, *last]

    dumps = [live(0, *calls(0, ("3", 13, "all_gather")))]
    dumps += [live(rank, *calls(rank, ("0", 1, "barrier"))) for rank in (1, 2, 3)]
    found = judge(recorder.together([groups, *dumps]))
    assert (found.rule, found.culprit) == ("flight-deadlock", Culprit("rank", (0, 2)))


@pytest.mark.parametrize(
    ("op", "sizes", "rule"),
    [
        ("all_reduce", [[8]], "flight-order"),  # which it calls as well, but later
        ("barrier", [], "flight-mismatch"),
        ("all_gather", [[9]], "flight-mismatch"),
    ],
)
def test_in_a_pair_the_past_says_who_is_wrong(op: str, sizes: list[list[int]], rule: str) -> None:
    dumps = [live(rank, *steps(rank, 4, ("pair", 9, "all_gather"), ("0", 5, "all_reduce"))) for rank in (0, 1)]
    dumps += [
        live(2, *steps(2, 4, ("pair", 9, op)), input_sizes=sizes),
        live(3, *steps(3, 4, ("pair", 9, "all_gather"))),
    ]
    found = judge(recorder.together([MEMBERS, *dumps]))
    assert (found.rule, found.culprit) == (rule, Culprit("rank", 2))


def test_another_size_that_the_others_are_done_with() -> None:
    """gloo: the others have received all they expect, and wait in the next one for the rank that expects more."""
    dumps = [live(rank, ("0", 1, "all_reduce"), ("0", 2, "all_gather")) for rank in (0, 1, 3)]
    dumps.append(live(2, ("0", 1, "all_reduce"), input_sizes=[[16]]))
    found = judge(recorder.together([MEMBERS, *dumps]))
    assert (found.rule, found.culprit) == ("flight-mismatch", Culprit("rank", 2))


def test_who_has_just_come_does_not_wait() -> None:
    dumps = [live(rank, ("0", 1, "all_reduce"), at=109.5) for rank in (0, 1, 3)]
    together = recorder.together([MEMBERS, *dumps, live(2, ("2", 1, "all_reduce"), pending=False)])
    assert flight.judge(together) == ()
    assert flight.waits(together) == {}


def test_who_came_late_is_there() -> None:
    """All but rank 2 have waited long; it has come in this moment."""
    dumps = [live(rank, ("0", 1, "all_reduce"), at=109.9 if rank == 2 else 100.0) for rank in range(4)]
    assert judge(recorder.together([MEMBERS, *dumps])).rule == "flight-all-arrived"


def test_without_devices_what_peers_have_finished_accuses_no_hardware() -> None:
    dumps = [live(rank, ("0", 1, "all_reduce"), ("0", 2, "all_reduce")) for rank in (0, 1, 3)]
    found = judge(recorder.together([MEMBERS, *dumps, live(2, ("0", 1, "all_reduce"))]))
    assert (found.rule, found.culprit, found.category) == ("flight-passed", Culprit("rank", 2), "unknown")


def test_behind_one_without_a_dump_nobody_else_is_to_blame() -> None:
    """Rank 2 was stopped within an operation: 3 lacks its data, 0 and 1 have finished."""
    dumps = [live(rank, ("0", 1, "all_reduce"), ("0", 2, "all_reduce")) for rank in (0, 1)]
    found = judge(recorder.together([MEMBERS, *dumps, live(3, ("0", 1, "all_reduce"))]))
    assert (found.rule, found.culprit) == ("flight-no-dump", Culprit("rank", 2))


def test_a_device_that_has_not_begun_what_those_of_peers_have() -> None:
    dumps = [
        dump(rank, entry("0", 5, state="scheduled" if rank == 2 else "started", time_discovered_started_ns=None),
             groups=WORLD)
        for rank in range(4)
    ]  # fmt: skip
    found = judge(recorder.together(dumps))
    assert (found.rule, found.culprit) == ("flight-unstarted", Culprit("rank", 2))


def test_pages_show_the_transfers_that_are_in_no_dump() -> None:
    def page(rank: int, op: str) -> RankActivity:
        inside = activity.Operation(group="0", op=op, seq=1)
        return RankActivity(rank=rank, node="n", still_s=9, started=True, last=None, inside=inside)

    dumps = [live(rank, ("0", 1, "all_reduce"), pending=False) for rank in range(3)]
    dumps.append(live(3, ("0", 1, "all_reduce"), ("2", 1, "all_reduce")))
    together = recorder.together([MEMBERS, *dumps])
    pages = [page(0, "recv 0<-1"), page(1, "send 1->2"), page(3, "all_reduce"), page(2, "recv_any_source_")]
    found = recorder.with_activities(together, pages[:3])
    assert flight.waits(found) == {0: (1,), 1: (2,), 3: (2,)}
    assert judge(found).culprit == Culprit("rank", 2)
    assert recorder.with_activities(found, pages[:3]) == found
    # who stands in a transfer with nobody knows whom is not elsewhere
    assert judge(recorder.with_activities(together, pages)).rule == "flight-all-arrived"


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


def test_who_lags_on_his_device_is_accused_whatever_else_he_waits_in() -> None:
    """Ranks 0 and 2 lag in the group of all; the oldest of rank 2 is in a pair whose other half shows none."""
    lagging = [pending("7", "PAIR", "_all_gather_base", 40), pending("9", "EXPERT", "all_to_all", 20)]
    per_rank = {
        str(rank): {"entries": 9, "first_pending": lagging if rank == 2 else [pending("9", "EXPERT", "all_to_all", at)]}
        for rank, at in enumerate((20, 27, 20, 27))
    }
    members = {"9": ["EXPERT", "[0, 1, 2, 3]"], "7": ["PAIR", "[2, 3]"]}
    (found,) = flight.judge_summary({"pg_members": members, "per_rank": per_rank})
    assert found.culprit == Culprit("rank", (0, 2))


def test_a_transfer_for_which_both_have_come_is_no_wait() -> None:
    """Rank 0 sends to 1, which receives from it; 2 waits for 1. Rank 1 is neither absent nor in a circle."""
    ops = ("send 0->1", "recv 1<-0", "recv 2<-1")
    per_rank = {str(rank): {"entries": 2, "first_pending": [pending("5", "PP", op, 7)]} for rank, op in enumerate(ops)}
    (found,) = flight.judge_summary({"pg_members": {"5": ["PP", "[0, 1, 2]"]}, "per_rank": per_rank})
    assert (found.rule, found.culprit) == ("flight-all-arrived", Culprit())


def test_members_that_nobody_lists_follow_from_two_that_are_known() -> None:
    """Stages 0, 1 and 2 are ranks 0, 2 and, at equal distance, 4."""
    per_rank: dict[str, Any] = {
        "0": {"entries": 3, "first_pending": [pending("5", "PP", "send 0->2", 7)]},
        "2": {"entries": 3, "first_pending": [pending("5", "PP", "send 1->2", 7)]},
        "4": {"entries": 5, "first_pending": []},
    }
    (found,) = flight.judge_summary({"pg_members": {}, "per_rank": per_rank})
    assert (found.rule, found.culprit) == ("flight-absent", Culprit("rank", 4))


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


def test_what_is_nested_in_itself_costs_neither_time_nor_stack() -> None:
    """A list of 60 times itself as every field of many entries; and lists 300,000 deep as names."""
    itself = b"]q\x00(" + b"h\x00" * 60 + b"e"
    deep = b"]" * 300_000 + b"a" * 299_999
    for name in (b"h\x00", deep):
        fields = b"".join(
            b"X" + len(key).to_bytes(4, "little") + key + (name if key == b"process_group" else b"h\x00")
            for key in (b"process_group", b"profiling_name", b"input_sizes", b"output_sizes", b"input_dtypes", b"state")
        )
        entry = b"}q\x01(" + fields + b"u"
        data = (
            b"\x80\x02}(X\x01\x00\x00\x00s" + itself + b"X\x07\x00\x00\x00entries](" + entry + b"h\x01" * 5_000 + b"eu."
        )
        found = recorder.read(data, 0)
        assert found.ranks[0].count == 5_001
        flight.judge(found)


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
