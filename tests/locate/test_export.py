"""Dumps that torch's analyzer reads, and what it says of them, beside what we say."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from evertrain.locate import export, flight, recorder
from evertrain.model.findings import Culprit
from evertrain.model.recording import Group
from support.recorded import Analysis

DATA = Path(__file__).parent.parent / "data" / "flight"
GROUPS = {
    "0": Group("0", "default_pg", (0, 1, 2, 3)),
    "1": Group("1", "tp", (0, 1)),
    "2": Group("2", "tp", (2, 3)),
}


def recorded(kind: str, suffix: str = "") -> dict[int, bytes]:
    return {rank: (DATA / kind / f"rank_{rank}{suffix}").read_bytes() for rank in range(4)}


# --- what gloo has recorded


@pytest.mark.parametrize(
    ("kind", "suffix", "rank", "missing", "different"),
    [
        ("absent", "", 2, [{2}], []),
        # torch lists who is missing anywhere; 0 itself waits for 1
        ("behind", "", 1, [{0, 1}, {1}], []),
        ("behind", ".json", 1, [{0, 1}, {1}], []),
        ("mismatch", "", 1, [], [{1}]),
    ],
)
def test_gloo_of_torch_2_13(
    tmp_path: Path, kind: str, suffix: str, rank: int, missing: list[set[int]], different: list[set[int]]
) -> None:
    raw = recorded(kind, suffix)
    told = Analysis(export.files(raw, GROUPS), tmp_path)
    assert sorted(sorted(ranks) for _, _, ranks in told.missing) == [sorted(ranks) for ranks in missing]
    assert [ranks for _, _, ranks in told.different] == different
    (found,) = flight.judge(recorder.together([recorder.read(data, at) for at, data in raw.items()]))
    assert found.culprit == Culprit("rank", rank)


def test_the_command_that_users_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from torch.distributed.flight_recorder import fr_trace

    for name, content in export.files(recorded("absent"), GROUPS).items():
        (tmp_path / name).write_bytes(content)
    try:
        fr_trace.main([str(tmp_path), "-p", export.PREFIX])
    finally:
        gc.enable()  # it turns that off
    assert "missing ranks: {2}" in caplog.text


def test_members_that_nobody_names_follow_from_who_uses_a_group(tmp_path: Path) -> None:
    told = Analysis(export.files(recorded("absent"), {}), tmp_path)
    assert [ranks for _, _, ranks in told.missing] == [{2}]


def test_one_dump_alone_gets_the_groups_of_its_rank() -> None:
    content = export.corrected(recorded("absent")[3], 3, GROUPS)
    assert content["pg_config"] == {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
        "2": {"name": "2", "desc": "tp", "ranks": "[2, 3]"},
    }
    assert {one["state"] for one in content["entries"] if one["retired"]} == {"completed"}


# --- what NCCL would record


def entry(group: str, number: int, op: str = "all_reduce", *, at: int = 0, **other: Any) -> dict[str, Any]:
    return {
        "record_id": at, "pg_id": 0, "process_group": [group, GROUPS[group].description], "collective_seq_id": number,
        "p2p_seq_id": 0, "op_id": number, "profiling_name": f"nccl:{op}", "time_created_ns": 1, "input_sizes": [[8]],
        "output_sizes": [[8]], "input_dtypes": ["Float"], "output_dtypes": ["Float"], "state": "completed",
        "time_discovered_started_ns": 2, "time_discovered_completed_ns": 3, "retired": True, "is_p2p": False,
    } | other  # fmt: skip


PENDING: dict[str, Any] = {"state": "started", "time_discovered_completed_ns": None, "retired": False}


def dump(rank: int, *entries: dict[str, Any]) -> bytes:
    config = {
        name: {"name": name, "desc": group.description, "ranks": str(list(group.members))}
        for name, group in GROUPS.items()
        if rank in group.members
    }
    listed = [one | {"record_id": one["record_id"] or at} for at, one in enumerate(entries)]
    return json.dumps({"version": "2.10", "pg_config": config, "pg_status": {}, "entries": listed}).encode()


def pair(rank: int) -> str:
    return "1" if rank < 2 else "2"


STEP: list[tuple[str, str]] = [("", "all_reduce"), ("0", "all_reduce")]


@pytest.mark.parametrize(
    ("fault", "rule", "missing", "different"),
    [
        ("absent", "flight-absent", [{2}], []),
        ("left out", "flight-deadlock", [{2}, {3}], []),
        ("size", "flight-mismatch", [], [{2}]),
        ("type", "flight-mismatch", [], [{2}]),
        ("operation", "flight-mismatch", [], [{2}]),
    ],
)
def test_nccl_read_by_both_as_it_is_and_corrected(
    tmp_path: Path, fault: str, rule: str, missing: list[set[int]], different: list[set[int]]
) -> None:
    raw = {}
    for rank in range(4):
        done = [one for number in (1, 2) for one in (entry(pair(rank), number), entry("0", number))]
        last = [entry(pair(rank), 3), entry("0", 3, **PENDING)]
        if fault == "left out" and rank == 2:
            last = [entry("0", 3, **PENDING)]
        elif fault == "left out" and rank == 3:
            last = [entry("2", 3, **PENDING)]
        elif rank == 2:
            other: dict[str, dict[str, Any]] = {
                "size": {"input_sizes": [[9]], "output_sizes": [[9]]},
                "type": {"input_dtypes": ["Half"], "output_dtypes": ["Half"]},
                "operation": {"profiling_name": "nccl:broadcast"},
            }
            last = last[:1] if fault == "absent" else [last[0], last[1] | other[fault]]
        raw[rank] = dump(rank, *done, *last)
    as_it_is = {f"rank_{rank}": export.pickled(json.loads(data)) for rank, data in raw.items()}
    for at, dumps in enumerate((as_it_is, export.files(raw, GROUPS))):
        told = Analysis(dumps, tmp_path / str(at))
        assert [ranks for _, _, ranks in told.missing] == missing
        assert [ranks for _, _, ranks in told.different] == different
    (found,) = flight.judge(recorder.together([recorder.read(data, at) for at, data in raw.items()]))
    assert found.rule == rule
    if rule != "flight-deadlock":
        assert found.culprit == Culprit("rank", 2)


def test_groups_begin_where_all_members_have_a_record(tmp_path: Path) -> None:
    """Ranks 0 and 1 call more than 2 and 3, so the same 20 records go back less far; nothing is missing."""
    raw = {}
    for rank in range(4):
        calls = []
        for number in range(1, 41):
            calls += [entry(pair(rank), 2 * number - 1), entry(pair(rank), 2 * number)] if rank < 2 else []
            calls += [entry("0", number)]
        kept = [one | {"record_id": at} for at, one in enumerate(calls)][-20:]
        raw[rank] = dump(rank, *kept)
    as_it_is = {f"rank_{rank}": export.pickled(json.loads(data)) for rank, data in raw.items()}
    assert Analysis(as_it_is, tmp_path / "raw").missing
    told = Analysis(export.files(raw, GROUPS), tmp_path / "corrected")
    assert (told.missing, told.different) == ([], [])


def test_what_the_analyzer_stumbles_over_is_left_out(tmp_path: Path) -> None:
    odd = [entry("0", 2, "all_new"), entry("0", 3) | {"profiling_name": "ucc:barrier"}, entry("0", 4, **PENDING)]
    stranger = entry("0", 1) | {"process_group": ["lone", ""], "profiling_name": "nccl:send"}
    raw = {rank: dump(rank, entry("0", 1), *odd, *([stranger] if rank == 1 else [])) for rank in range(4)}
    told = Analysis(export.files(raw, GROUPS), tmp_path)
    assert (told.missing, told.different) == ([], [])


def test_an_old_layout_gets_what_the_new_one_has(tmp_path: Path) -> None:
    def old(rank: int, last: int) -> bytes:
        return json.dumps(
            [{"pg_id": 0, "seq_id": at, "profiling_name": "nccl:all_reduce", "state": "completed", "input_sizes": [[4]]}
             for at in range(1, last + 1)]
        ).encode()  # fmt: skip

    raw = {rank: old(rank, 6 if rank == 2 else 7) for rank in range(4)}
    told = Analysis(export.files(raw, GROUPS), tmp_path)
    assert told.missing == [("0:default_pg", 7, {2})]


def test_what_is_no_dump_names_its_rank() -> None:
    with pytest.raises(ValueError, match="rank 1: neither a pickle nor JSON"):
        export.files({0: recorded("absent")[0], 1: b"x"}, GROUPS)
