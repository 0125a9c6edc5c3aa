"""Flight recorders of live ranks, read from outside, and what follows from them."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from evertrain.locate import export, flight, recorder
from evertrain.model.activity import Operation, RankActivity
from evertrain.model.findings import Culprit
from evertrain.observe import recorder_dumps
from support.recorded import Analysis, Forge, Job
from support.waiting import eventually

Serve = Callable[..., Path]


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    one = Forge()
    yield one
    one.close()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "YOUNG_S", 0.3)


# --- real jobs of four ranks; the odd one is rank 2

Faults = list[tuple[str, int, set[int]]]
W, TP, DP = "0:default_pg", "2:tp", "3:dp"


@pytest.mark.parametrize(
    ("kind", "rule", "ranks", "missing", "different"),
    [
        ("absent", "flight-absent", 2, [(W, 11, {2})], []),
        ("tensor group left out", "flight-skipped", 2, [(TP, 11, {2}), (W, 11, {3})], []),
        ("another order", "flight-order", 2, [], [(W, 11, {2})]),
        # the others have finished it and wait in the next one
        ("wrong size", "flight-mismatch", 2, [(W, 12, {2})], [(W, 11, {2})]),
        ("two groups", "flight-deadlock", (0, 1, 2, 3), [("5:a", 1, {0, 2}), ("6:b", 1, {1, 3})], []),
        pytest.param("at once", "flight-absent", 2, [(W, 1, {2})], [], marks=pytest.mark.matrix),
        pytest.param("left out", "flight-order", 2, [], [(W, 11, {2})], marks=pytest.mark.matrix),
        pytest.param("wrong type", "flight-mismatch", 2, [(W, 12, {2})], [(W, 11, {2})], marks=pytest.mark.matrix),
        # in a pair there is no majority: torch takes the first for right, the habit knows better
        pytest.param(
            "wrong operation", "flight-mismatch", 2, [(TP, 13, {2}), ("1:tp", 13, {0})], [(DP, 6, {0})],
            marks=pytest.mark.matrix,
        ),
    ],
)  # fmt: skip
def test_the_odd_rank_of_a_job_that_stands(
    forge: Forge, tmp_path: Path, kind: str, rule: str, ranks: int | tuple[int, ...], missing: Faults, different: Faults
) -> None:
    with forge.job(kind) as job:
        (found,) = flight.judge(job.standing())
        dumps = export.files(job.raw(), job.groups)
    assert (found.rule, found.culprit) == (rule, Culprit("rank", ranks))
    told = Analysis(dumps, tmp_path / "dumps")
    assert sorted(told.missing) == sorted(missing)
    assert told.different == different


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "rule"),
    [("absent", "flight-absent"), ("tensor group left out", "flight-skipped"), ("another order", "flight-order")],
)
def test_eight_ranks(forge: Forge, kind: str, rule: str) -> None:
    with forge.job(kind, ranks=8) as job:
        (found,) = flight.judge(job.standing())
    assert (found.rule, found.culprit) == (rule, Culprit("rank", 2))


def test_dumps_as_they_come_are_more_than_torch_can_read(forge: Forge, tmp_path: Path) -> None:
    with forge.job("absent") as job:
        job.standing()
        raw = job.raw()
    as_they_are = {f"rank_{rank}": export.pickled(json.loads(data)) for rank, data in raw.items()}
    with pytest.raises(KeyError):
        Analysis(as_they_are, tmp_path)


def test_who_holds_its_interpreter_answers_all_the_same(forge: Forge) -> None:
    with forge.job("interpreter held") as job:
        found = job.standing()
        began = time.monotonic()
        assert recorder_dumps.fetch(job.socket(2), 2, 5).ranks[2].count
        assert time.monotonic() - began < 2
    (told,) = flight.judge(found)
    assert (told.rule, told.culprit) == ("flight-absent", Culprit("rank", 2))
    assert flight.waits(found) == dict.fromkeys((0, 1, 3), (2,))


def test_a_stopped_rank_does_not_answer_and_is_the_one_the_others_wait_for(forge: Forge) -> None:
    with forge.job("healthy") as job:
        eventually(lambda: job.recordings().ranks[2].count > 20, "steps")
        os.kill(job.pids[2], signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="no answer in time: the process is stopped"):
            recorder_dumps.fetch(job.socket(2), 2, 0.5)
        assert time.monotonic() - began < 5

        def told() -> tuple[str, Culprit] | None:
            found = flight.judge(job.recordings(frozenset({2})))
            return (found[0].rule, found[0].culprit) if found else None

        expected = ("flight-no-dump", Culprit("rank", 2))
        eventually(lambda: told() == expected, "the stopped rank", story=lambda: str(told()))


def test_a_job_that_runs_accuses_nobody(forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "YOUNG_S", 1.0)  # others use this machine
    with forge.job("healthy") as job:
        eventually(lambda: job.recordings().ranks[0].count > 20, "steps")
        for _ in range(10):
            assert flight.judge(job.recordings()) == ()


def test_a_wait_that_gloo_does_not_record_comes_from_the_page(forge: Forge) -> None:
    """Rank 0 receives from 2, rank 1 waits for 0 and 3 for 2. By the recorder alone, 0 is where 2 is."""
    with forge.job("waits in a transfer") as job:
        found = job.standing()
    assert flight.judge(found)[0].culprit == Culprit("rank", (0, 2))
    for op in ("recv 0<-2", "recv_"):
        page = RankActivity(
            rank=0, node="n", still_s=5, started=True, last=None, inside=Operation(group="0", op=op, seq=1)
        )
        assert flight.judge(recorder.with_activities(found, [page]))[0].culprit == Culprit("rank", 2)
    assert flight.waits(recorder.with_activities(found, [page]))[0] == ()


# --- servers that are not what they should be


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """A unix socket that answers each request by the path in it."""
    listening: list[socket.socket] = []

    def start(**answers: bytes) -> Path:
        path = tmp_path / "s"
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
        server.listen()
        listening.append(server)

        def run() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                asked = peer.recv(4096).split(b" ")[1].rpartition(b"/")[2].decode() or "list"
                try:
                    peer.sendall(answers[asked])
                except OSError:
                    pass
                if answers[asked]:
                    peer.close()
                else:
                    listening.append(peer)

        threading.Thread(target=run, daemon=True).start()
        return path

    yield start
    for one in listening:
        with suppress(OSError):  # wakes the thread that accepts: until then the kernel keeps the socket
            one.shutdown(socket.SHUT_RDWR)
        one.close()


def answer(content: object, status: str = "200 OK") -> bytes:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


OFFER = answer(["ping", "fr_trace_json"])


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({"list": b"hello"}, "broke off"),
        ({"list": answer(b"<h1>")}, "no server of torch"),
        ({"list": answer(["ping"])}, "no flight recorder, only ping"),
        ({"list": OFFER, "fr_trace_json": answer({}, "500 Oh")}, "answered 500"),
        ({"list": OFFER, "fr_trace_json": answer({"entries": []})[:-3]}, "broke off"),
        ({"list": OFFER, "fr_trace_json": answer(b"{")}, "neither a pickle nor JSON"),
        ({"list": OFFER, "fr_trace_json": answer({})}, "no entries"),
    ],
)
def test_a_bad_answer_is_told_in_one_line(serve: Serve, answers: dict[str, bytes], why: str) -> None:
    with pytest.raises(ValueError, match=why) as told:
        recorder_dumps.fetch(serve(**answers), 0, 5)
    assert "\n" not in str(told.value)


def test_an_answer_that_never_comes_or_never_ends(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    path = serve(list=OFFER, fr_trace_json=b"")
    with pytest.raises(TimeoutError):
        recorder_dumps.fetch(path, 0, 0.2)
    monkeypatch.setattr(recorder_dumps, "_MOST_BYTES", 20)
    with pytest.raises(ValueError, match="an answer of more than"):
        recorder_dumps.fetch(path, 0, 5)


def test_a_rank_that_has_called_nothing_writes_no_entries(serve: Serve) -> None:
    empty = {"version": "2.10", "pg_config": {}, "pg_status": {}, "comm_lib_version": ""}
    found = recorder_dumps.fetch(serve(list=OFFER, fr_trace_json=answer(empty)), 3, 5)
    assert found.ranks[3].count == 0


def test_a_rank_with_groups_of_both_kinds_has_two_recorders(serve: Serve) -> None:
    def dump(name: str, at: int, group: str) -> bytes:
        entry = {"process_group": [group, ""], "profiling_name": name, "collective_seq_id": 1, "time_created_ns": at}
        config = {group: {"name": group, "desc": "", "ranks": "[0, 1]"}}
        return answer({"version": "2.10", "pg_config": config, "pg_status": {}, "entries": [entry]})

    path = serve(
        list=answer(["fr_trace_json", "dump_nccl_trace_json"]),
        fr_trace_json=dump("gloo:barrier", 9, "1"),
        dump_nccl_trace_json=dump("nccl:all_reduce", 5, "0"),
    )
    found = recorder_dumps.fetch(path, 0, 5)
    assert [(one.name, one.on_host) for one in found.ranks[0].operations] == [("all_reduce", False), ("barrier", True)]
    assert {name: group.members for name, group in found.groups.items()} == {"0": (0, 1), "1": (0, 1)}


def test_jobs_of_the_tests_end(forge: Forge) -> None:
    with forge.job("healthy", ranks=2) as job:
        assert isinstance(job, Job)
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in job.pids), "the end of its ranks")
