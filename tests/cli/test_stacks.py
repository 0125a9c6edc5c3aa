"""`evertrain stacks`: what is shown of a capture, where it comes from, and what is said when there is none."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from cli import logs, served
from cli.plans import known_job
from cli.served import Served
from evertrain.cli import stack_view, stacks
from evertrain.cli.main import main
from evertrain.controller import capture_files, dump_files
from evertrain.controller.capture_files import Kept
from evertrain.locate import culprit
from evertrain.model import records as r
from evertrain.model.capture_records import CaptureAsked
from evertrain.model.stacks import Located, RecorderDumps
from support.stuck import ALL_REDUCE, IDLE_WORKER, SLEEP, Job

Json = dict[str, Any]


def stuck(number: int = 3, mesh: str = "pp=2,dp=2,tp=2", **different: Any) -> Kept:
    """Rank 5 of eight sleeps in the script; each has a data loader's worker."""
    job = Job({"pp": 2, "dp": 2, "tp": 2})
    for rank in range(8):
        job.see(rank, IDLE_WORKER, kind="loader", pid=5000 + rank)
    job.outside(5, SLEEP)
    merged = job.merged(number, missing=different.pop("missing", ()))
    asked = CaptureAsked(time=1_700_000_000.0, capture=number, attempt=2, reason="hang")
    located = culprit.locate(merged, mesh=job.mesh)
    return Kept(job="job", asked=asked, step=41, mesh=mesh, merged=merged, located=located)


def as_sent(kept: Kept) -> Json:
    sent: Json = json.loads(msgspec.json.encode(kept))
    return sent


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with served.job(tmp_path, monkeypatch) as job:
        job.answers["POST /v1/captures"] = [(202, {"capture": 3})]
        waits = {"capture": 3, "over": False, "waits_for": ["node-1"]}
        job.answers["GET /v1/captures/3"] = [(202, waits), (200, as_sent(stuck()))]
        yield job


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a job that is over: captures 3 and 4 are kept, incident 1 was seen in 2 and 3."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("EVERTRAIN_RUN_DIR", str(tmp_path / "runs"))
    folder = known_job(tmp_path / "runs", "job")
    for number in (3, 4):
        capture_files.write(folder, stuck(number))
    incident: Json = {"attempt": 2, "fault_time": 2.0, "category": "unknown", "ranks": (5,), "nodes": ("node-2",),
                      "confidence": 0.9, "evidence": (), "step": 41, "source": "hang"}  # fmt: skip
    logs.write(
        folder / "events.db",
        r.RunStarted(
            time=1.0, run_id="job-1", nodes=("node-0",), standby=0, nproc_per_node=8, fresh=False, start="zygote",
            command="t.py",
        ),
        r.IncidentOpened(time=3.0, incident=1, cause="hang (still)", captures=(2, 3), **incident),
        r.IncidentOpened(time=4.0, incident=2, cause="hang (busy)", **incident),
        r.IncidentOpened(time=5.0, incident=3, cause="hang (busy)", captures=(1,), **incident),
        r.JobEnded(time=6.0, state="stopped", exit_code=1, message=""),
    )  # fmt: skip
    return folder


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["stacks", *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["stacks", *words])
    out, line = capsys.readouterr()
    assert out == "" and line.count("\n") == 1, (out, line)
    return code, line


# -- what is shown ---------------------------------------------------------------------------------------------------


def test_groups_grid_and_verdict(running: Served, capsys: pytest.CaptureFixture[str]) -> None:
    title, waiting, odd, loaders, *rest = said(capsys).splitlines()
    assert title.startswith("job job, capture 3, attempt 2, 8 ranks; step 41; taken 2023-11-1")
    assert title.endswith("(a hang was suspected)")
    assert waiting.split()[:4] == ["A", "trainer", "ranks", "0-4,"]
    assert "all_reduce (torch/distributed/distributed_c10d.py:2501)" in waiting and "[" not in waiting
    assert odd.split()[:4] == ["B", "trainer", "rank", "5*"]
    assert "[wait_for_record (train.py:30)] < main (train.py:85)" in odd, "where it leaves what the others do"
    assert loaders.split()[:3] == ["loader", "ranks", "0-7"]
    assert rest[0] == "grid pp x dp x tp: one cell a rank, a letter a group"
    assert [line.split() for line in rest[1:3]] == [["pp=0", "dp=0-1", "AA"], ["pp=1", "dp=0", "AB*", "dp=1", "AA"]]
    assert rest[3].startswith("verdict: rank 5 on node-2: sleeps outside of all operations (outside, confidence 0.")
    assert any("wait for it in all_reduce number 41" in line for line in rest)
    assert [one.path for one in running.of("POST", "/v1/captures")] == ["/v1/captures"]


def test_a_node_that_sent_nothing_is_named(ended: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capture_files.write(ended, stuck(5, mesh="", missing=("node-3",)))
    lines = said(capsys).splitlines()
    at = lines.index("grid ranks: one cell a rank, a letter a group")
    assert lines[at + 1].split() == ["rank=0", "AAAAAB*??"]
    assert lines[-1] == "not seen: node-3 has sent nothing"


def test_on_a_terminal_what_differs_is_coloured() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=200)
    for line in stack_view.lines(stuck()):
        console.print(line)
    odd = next(line for line in out.getvalue().splitlines() if "wait_for_record" in line and "trainer" in line)
    assert "\x1b[1;33m[wait_for_record (train.py:30)]\x1b[0m" in odd and "\x1b[1;31mrank 5*" in odd


def test_text_of_strangers_moves_no_cursor(capsys: pytest.CaptureFixture[str], ended: Path) -> None:
    kept = stuck(5)
    frame = msgspec.structs.replace(kept.merged.positions[0].frames[0], function="evil\x1b[2J\nsecond")
    position = msgspec.structs.replace(kept.merged.positions[0], frames=(frame,))
    merged = msgspec.structs.replace(kept.merged, positions=(position, *kept.merged.positions[1:]))
    capture_files.write(ended, msgspec.structs.replace(kept, merged=merged))
    shown = said(capsys)
    assert "\x1b" not in shown and "evil\\x1b[2J" in shown


def test_nobody_named_and_nothing_read(ended: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = stuck(5)
    blind = msgspec.structs.replace(
        kept.merged.positions[0], frames=(), failure="Permission denied", place="unreadable", state="uninterruptible"
    )
    merged = msgspec.structs.replace(kept.merged, positions=(blind,), blind=("node-0: py-spy is not there",))
    located = Located(kind="unknown", evidence=("too few stacks",))
    capture_files.write(ended, msgspec.structs.replace(kept, merged=merged, located=located, step=None))
    shown = said(capsys)
    assert "not to be read: Permission denied" in shown and "(sleeps in the kernel, heeds no signal)" in shown
    assert "verdict: not enough evidence to name anybody\n  too few stacks\n" in shown
    assert shown.endswith("not seen: node-0: py-spy is not there\n")


def test_ten_thousand_ranks_fit_on_a_screen() -> None:
    kept = stuck()
    usual, odd = (one for one in kept.merged.positions if one.kind == "trainer")
    member = usual.members[0]
    everywhere = msgspec.structs.replace(
        usual,
        members=tuple(msgspec.structs.replace(member, rank=rank) for rank in range(10_000) if rank != 5005),
    )
    alone = msgspec.structs.replace(odd, members=(msgspec.structs.replace(member, rank=5005),))
    nodes = {rank: f"node-{rank // 8}" for rank in range(10_000)}
    merged = msgspec.structs.replace(kept.merged, positions=(everywhere, alone), nodes=nodes)
    for mesh in ("dp=1250,tp=8", ""):
        lines = list(map(str, stack_view.lines(msgspec.structs.replace(kept, merged=merged, mesh=mesh))))
        assert len(lines) < 60
        assert any("AAAAABAA" in line for line in lines), "what differs is not left out"


def test_json(running: Served, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, "--json"))
    assert (found["job"], found["capture"], found["attempt"], found["step"]) == ("job", 3, 2, 41)
    assert [(one["kind"], one["span"], one["letter"], one["suspect"]) for one in found["groups"]] == [
        ("trainer", "0-4, 6-7", "A", False), ("trainer", "5", "B", True), ("loader", "0-7", None, False),
    ]  # fmt: skip
    assert found["groups"][1]["frames"][0] == {"function": "wait_for_record", "file": "train.py", "line": 30}
    assert (found["verdict"]["kind"], found["verdict"]["ranks"]) == ("outside", [5])
    assert found["nodes"]["5"] == "node-2"


def test_speedscope(ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "stacks.json"
    assert f"written for speedscope: {file}" in said(capsys, "--speedscope", str(file))
    found = json.loads(file.read_text())
    frames = [one["name"] for one in found["shared"]["frames"]]
    trainer, loader = found["profiles"]
    assert (trainer["type"], trainer["unit"], trainer["endValue"]) == ("sampled", "none", 8)
    assert sum(trainer["weights"]) == trainer["endValue"] and len(trainer["samples"]) == len(trainer["weights"]) == 2
    assert [frames[at] for at in trainer["samples"][1]] == ["main", "wait_for_record"], "the outermost comes first"
    assert len(trainer["samples"][0]) == len(ALL_REDUCE)
    assert (loader["name"], sum(loader["weights"])) == ("loader", 8)
    assert main(["stacks", "--speedscope", str(tmp_path / "no" / "folder.json")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


# -- which one ---------------------------------------------------------------------------------------------------------


def test_after_the_run_the_last_one_that_of_an_incident_or_the_one_named(
    ended: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "capture 4," in said(capsys)
    assert "capture 3," in said(capsys, "--capture", "3")
    assert "capture 3," in said(capsys, "job", "--incident", "1")


FLIGHT = Path(__file__).parent.parent / "data" / "flight" / "absent"


def with_dumps(number: int) -> Kept:
    kept = stuck(number)
    return replace(kept, asked=replace(kept.asked, dumps=True))


def dumps(*ranks: int) -> bytes:
    packed = {rank: gzip.compress((FLIGHT / f"rank_{rank}").read_bytes()) for rank in ranks}
    return msgspec.msgpack.encode(RecorderDumps(node="node-0", dumps=packed))


def test_flight_recorders_as_torch_reads_them(ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capture_files.write(ended, with_dumps(5))
    dump_files.write(ended, 5, "node-0", dumps(0, 1))
    dump_files.write(ended, 5, "node-1", dumps(2, 3))
    target = tmp_path / "for torch"
    out = said(capsys, "--flight-recorder", str(target))
    assert sorted(path.name for path in target.iterdir()) == ["rank_0", "rank_1", "rank_2", "rank_3"]
    assert f"torchfrtrace '{target}' -p rank_ --allow-incomplete-ranks\n" in out
    assert "4 flight recorders written" in out and "without those of 4 ranks that did not answer: [4, 5, 6, 7]" in out
    # 4 was taken without
    code, line = refused(capsys, "--capture", "4", "--flight-recorder", str(target))
    assert code == 1 and "without the flight recorders' dumps" in line
    (tmp_path / "file").touch()
    code, line = refused(capsys, "--flight-recorder", str(tmp_path / "file"))
    assert code == 1 and "cannot be written" in line


def test_flight_recorders_of_a_running_job(running: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = with_dumps(3)
    path = "/v1/captures/3/recorders"
    running.answers["GET /v1/captures/3"] = [(200, as_sent(kept))]
    nodes = sorted(set(kept.merged.nodes.values()))
    running.answers[f"GET {path}"] = [(200, nodes[:1]), (200, nodes)]
    for at, node in enumerate(nodes):
        running.answers[f"GET {path}/{node}"] = [(200, dumps(at))]
    assert len(nodes) == 4
    out = said(capsys, "--flight-recorder", str(tmp_path / "dumps"))
    assert "4 flight recorders written" in out and (tmp_path / "dumps" / "rank_3").exists()
    assert [json.loads(one.body) for one in running.of("POST", "/v1/captures")] == [{"dumps": True}]


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (("--incident", "9"), 1, "job job has no incident 9; `evertrain incidents` lists them"),
        (("--incident", "2"), 1, "incident 2 of job job (hang (busy)) was named without stacks"),
        (("--incident", "3"), 1, "job job has no stacks of capture 1: kept are 3, 4"),
        (("--capture", "9"), 1, "job job has no stacks of capture 9: kept are 3, 4"),
        (("--capture", "x"), 2, "--capture x: not a number"),
        (("--incident", "-1"), 2, "--incident"),
        (("--incident", "1", "--capture", "2"), 2, "not allowed with"),
        (("--job", "jab"), 1, "there is no job jab; did you mean job?"),
    ],
)
def test_what_is_not_there_is_one_line(
    ended: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, line: str
) -> None:
    found = refused(capsys, *words)
    assert found[0] == code and line in found[1], found


def test_where_nothing_was_kept_it_says_when_something_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("EVERTRAIN_RUN_DIR", str(tmp_path / "runs"))
    known_job(tmp_path / "runs", "job")
    code, line = refused(capsys)
    assert code == 1 and "of job job no stacks were kept" in line


def test_a_damaged_file_is_one_line(ended: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (ended / "captures" / "4-hang.msgpack.gz").write_bytes(gzip.compress(b"nonsense"))
    code, line = refused(capsys, "--capture", "4")
    assert code == 1 and "4-hang.msgpack.gz cannot be read" in line


def test_a_running_job_gives_what_is_kept_without_looking_anew(
    running: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    running.answers["GET /v1/captures/3"] = [(200, as_sent(stuck()))]
    assert "capture 3," in said(capsys, "--capture", "3")
    assert not running.of("POST", "/v1/captures")
    code, line = refused(capsys, "--capture", "8")
    assert code == 1 and "job job: unknown" in line


def test_the_wait_has_an_end(
    running: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "FRESH_S", 0.05)
    running.answers["GET /v1/captures/3"] = [(202, {"capture": 3, "over": False, "waits_for": ["node-1"]})]
    code, line = refused(capsys)
    assert code == 1 and "capture 3 is not there after 0 s (node-1 still to answer)" in line


def test_what_the_controller_refuses_is_said(running: Served, capsys: pytest.CaptureFixture[str]) -> None:
    running.answers["POST /v1/captures"] = [(409, {"error": "no rank runs now"})]
    assert refused(capsys) == (1, "evertrain: job job shows no stacks: no rank runs now\n")
    running.answers["POST /v1/captures"] = [(202, {"capture": 3})]
    running.answers["GET /v1/captures/3"] = [(410, {"error": "capture 3 was lost"})]
    assert refused(capsys) == (1, "evertrain: job job shows no stacks: capture 3 was lost\n")
    running.answers["GET /v1/captures/3"] = [(200, {"merged": 5})]
    assert "is not one of this version" in refused(capsys)[1]
