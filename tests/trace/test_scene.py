"""What all ranks have written down, put side by side: who is where, who lags, who is at the other end."""

from __future__ import annotations

from pathlib import Path

import pytest

from evertrain.agent.rings import Rings
from evertrain.agent.windowing import Windowing
from evertrain.model import windows
from evertrain.model.spec import AgentSpec
from evertrain.model.windows import JobWindow, NodePart, WindowOrder
from evertrain.trace import progress, remains, scene
from support import traced


def window(folder: Path, *nodes: str, seconds: float = 60.0, brief: bool = False) -> JobWindow:
    """As the agents of these nodes would answer."""
    parts = []
    for node in nodes:
        spec = AgentSpec(
            job="job", run_id="job-1", node=node, node_dir=str(folder / node), disk_dir="", log_root="",
            controller_url="", token_file="", fired_dir="",
        )  # fmt: skip
        page_path = lambda attempt, rank, node=node: folder / node / "pages" / f"a{attempt}-r{rank}"  # noqa: E731
        agent = Windowing(spec, "", Rings(spec), page_path, zero=1e6)
        answer = agent.read(WindowOrder(number=7, attempt=1, seconds=seconds, brief=brief))
        parts.append(NodePart(node=node, offset_s=2.0, packed=windows.pack(answer)))
    whole = JobWindow(
        job="job", number=7, attempt=1, seconds=seconds, time=0.0, parts=tuple(parts), missing=("node-9",)
    )
    return windows.decode(windows.encode(whole))


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    traced.job(tmp_path / "node-0", ranks=(0, 1), node="node-0")
    traced.job(tmp_path / "node-1", ranks=(2, 3), node="node-1")
    return tmp_path


@pytest.mark.parametrize("way", ["window", "files"])
def test_who_lags_and_who_waits_since_when(two_nodes: Path, way: str) -> None:
    if way == "window":
        found = scene.of_window(window(two_nodes, "node-0", "node-1"))
        assert found.missing == ("node-9 has not answered",)
    else:
        found = scene.of_folder(two_nodes)
    assert found.problems == ()
    (row,) = progress.rows(found)
    assert (row.comm, row.name, row.members) == (traced.COMM, "default_pg", (0, 1, 2, 3))
    assert (row.op, row.least, row.most, row.lagging, row.unseen, row.in_flight) == ("all_reduce", 5, 6, (2,), (), 3)
    assert row.blocked_s is not None and 7.5 < row.blocked_s < 60
    assert {track.node for track in found.tracks if track.rank in (2, 3)} == {"node-1"}


def test_a_brief_window_says_the_same_with_one_record_a_group(two_nodes: Path) -> None:
    found = scene.of_window(window(two_nodes, "node-0", "node-1", brief=True))
    (row,) = progress.rows(found)
    assert (row.least, row.most, row.lagging) == (5, 6, (2,))
    assert {len(track.records.operations) for track in found.of("hook")} == {1}
    assert {len(track.records) for track in found.of("agent")} == {0}


def test_peers_on_other_nodes_are_found_by_their_addresses(two_nodes: Path) -> None:
    found = scene.of_window(window(two_nodes, "node-0", "node-1"))
    peers = {track.rank: track.records.flows["peer"].tolist() for track in found.of("agent")}
    assert peers == {0: [1], 1: [2], 2: [3], 3: [0]}


def test_times_become_those_of_the_controllers_clock(two_nodes: Path) -> None:
    found = scene.of_window(window(two_nodes, "node-0"))
    assert {track.wall_ns for track in found.tracks} == {int((1e6 + 2.0) * 1e9)}


def test_only_the_seconds_asked_for_come(two_nodes: Path) -> None:
    found = scene.of_window(window(two_nodes, "node-0", seconds=2.0))
    assert {len(track.records.operations) for track in found.of("hook")} == {0}
    assert {len(track.records.flows) for track in found.of("agent")} == {1}
    assert progress.rows(found)[0].most == 6, "what is so now is always told"


def test_what_nobody_says_the_end_of_is_neither_in_flight_nor_progress(tmp_path: Path) -> None:
    traced.job(tmp_path, behind=None, read_ahead=3)
    (row,) = progress.rows(scene.of_folder(tmp_path))
    assert (row.most, row.in_flight, row.lagging) == (6, 4, ())


def test_a_rank_without_a_ring_is_unseen_and_accused_of_nothing(tmp_path: Path) -> None:
    traced.job(tmp_path, ranks=(0, 1, 3))
    found = scene.of_folder(tmp_path)
    (row,) = progress.rows(found)
    assert (row.lagging, row.unseen) == ((), (2,))
    assert remains.judge(found)[0].rule == "trace-all-arrived"


def test_the_newest_attempt_counts(tmp_path: Path) -> None:
    traced.job(tmp_path, attempt=1, done=50)
    traced.job(tmp_path, attempt=2, done=3)
    assert progress.rows(scene.of_folder(tmp_path))[0].most == 4


def test_what_is_no_ring_costs_a_line(tmp_path: Path) -> None:
    traced.job(tmp_path, ranks=(0,))
    (tmp_path / "trace" / "odd.ring").write_bytes(b"nonsense")
    found = scene.of_folder(tmp_path)
    assert len(found.tracks) == 2 and len(found.problems) == 1 and "odd.ring" in found.problems[0]


def test_remains_name_who_was_behind(tmp_path: Path) -> None:
    traced.job(tmp_path)
    (finding,) = remains.judge(scene.of_folder(tmp_path))
    assert (finding.rule, finding.culprit.id, finding.action) == ("trace-behind", 2, "retry")
    assert finding.note == "rank 2 had not begun all_reduce 6 of default_pg, which ranks 0, 1, 3 waited in"
    assert finding.evidence[0] == "rank 2 on node-0: in no operation"
    assert finding.evidence[1].startswith("rank 0 on node-0: waited in all_reduce 6 of default_pg for 8.")


def test_a_window_that_is_damaged_is_refused_in_one_line() -> None:
    for content in (b"", b"nonsense"):
        with pytest.raises(ValueError, match="cannot be read"):
            windows.unpack(content)
        with pytest.raises(ValueError, match="no window"):
            windows.decode(content)
