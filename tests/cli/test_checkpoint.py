"""`evertrain checkpoint`: what is there, whether it is intact, what is in it."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path

import pytest

from cli.plans import known_job
from evertrain.checkpoint import disk, store
from evertrain.cli import main
from evertrain.controller.store import EventStore
from evertrain.model.records import StoreCommitted
from evertrain.worker import slots as layout
from evertrain.worker.store_files import FILES, Folder, Manifest
from support.slots import slot


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Two ranks' steps 7 and 8 on disk, and step 9 of rank 0 alone in memory."""
    memory = tmp_path / "memory"
    run_dir = known_job(tmp_path, "toy", run_folder=str(memory))
    for step in (7, 8):
        paths = [slot(tmp_path / "earlier", rank, step) for rank in (0, 1)]
        assert disk.flush(paths, run_dir / "checkpoints" / "node-0") == ()
    slot(memory / "node-0" / "slots", 0, 9)
    return tmp_path


def ask(job: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main.main(["checkpoint", words[0], "--run-dir", str(job), "--job", "toy", *words[1:]])
    out, err = capsys.readouterr()
    return code, out + err


def flip(job: Path, step: int, rank: int) -> None:
    path = Path(layout.flushed_path(str(job / "toy" / "checkpoints" / "node-0"), step, rank))
    raw = bytearray(path.read_bytes())
    raw[layout.HEADER_BYTES + 100] ^= 4
    path.write_bytes(raw)


def test_list(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = ask(job, capsys, "list", "--json")
    assert code == 0
    found = json.loads(said)
    assert [(step["step"], step["tiers"], step["missing"]) for step in found["steps"]] == [
        (7, {"memory": [], "disk": [0, 1], "peers": []}, []),
        (8, {"memory": [], "disk": [0, 1], "peers": []}, []),
        (9, {"memory": [0], "disk": [], "peers": []}, [1]),
    ]
    code, said = ask(job, capsys, "list")
    assert code == 0 and "2 of 2" in said and "no, without rank 1" in said


def test_verify_names_what_is_damaged(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(job, capsys, "verify") == (0, "5 copies of 3 steps intact, 0 damaged\n")
    flip(job, 8, 1)
    code, said = ask(job, capsys, "verify")
    assert code == 1
    assert "step 8, rank 1, tier disk: 1 of 1 chunks do not match their checksums, in model (" in said
    assert ask(job, capsys, "verify", "7") == (0, "2 copies of 1 step intact, 0 damaged\n")


def test_a_file_that_is_cut_off_is_no_copy(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(layout.flushed_path(str(job / "toy" / "checkpoints" / "node-0"), 8, 1))
    path.write_bytes(path.read_bytes()[:-1])
    _, said = ask(job, capsys, "list", "--json")
    assert [step["missing"] for step in json.loads(said)["steps"]] == [[], [1], [1]]
    code, said = ask(job, capsys, "verify")
    assert code == 1 and f"damaged or cut off ({path})" in said


def test_show_takes_the_newest_whole_step(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = ask(job, capsys, "show")
    assert code == 0 and said.startswith("step 8 of job job, attempt 1, rank 0 of 2\n")
    code, said = ask(job, capsys, "show", "9", "--json")
    shown = json.loads(said)
    assert (code, shown["step"], [part["name"] for part in shown["parts"]]) == (0, 9, ["model"])


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (("show", "6"), 1, "step 6 of job toy is not here; there are 7, 8, 9"),
        (("show", "last"), 2, "'last' is not a step"),
        (("show", "9", "--rank", "1"), 1, "no copy of rank 1 is here, only of rank 0"),
        (("export", "9"), 1, "step 9 is not whole here, without rank 1"),
        (("export", "8", "--only", "modle"), 2, "--only modle: step 8 has model"),
        (("export", "8", "--to", "/nowhere/x.pt"), 2, "there is no folder /nowhere"),
        (("export", "8", "--python", "/bin/false"), 1, "export with /bin/false: exit code 1"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    job: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, line: str
) -> None:
    found, said = ask(job, capsys, *words)
    assert found == code and line in said and said.count("\n") == 1


def test_export_takes_the_intact_copy_and_refuses_without_one(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(job, 8, 1)
    code, said = ask(job, capsys, "export", "8")
    assert code == 1 and "do not match their checksums" in said and "step-000000000008/r1" in said


def test_commands_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["checkpoint"]) == 2
    assert main.main(["checkpoint", "verfy"]) == 2
    assert "did you mean verify?" in capsys.readouterr().err


def an_interpreter(job: Path, *lines: str) -> tuple[str, str]:
    """In place of one with torch, which export hands its files to: does this with `files`, and then says so."""
    start = (f"#!{sys.executable}", "import json, os, shutil, sys", "spec = json.load(open(sys.argv[-1]))")
    path = job / "python"
    path.write_text(
        "\n".join((*start, "files = spec['files']", *lines, "open(spec['to'], 'w').close(); print('done')"))
    )
    path.chmod(0o700)
    return "--python", str(path)


def test_export_may_take_longer_than_a_job_that_runs_keeps_the_step(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = job / "toy" / "checkpoints" / "node-0" / "step-000000000008"
    python = an_interpreter(job, f"shutil.rmtree({str(folder)!r})", "assert all(os.path.getsize(f) for f in files)")
    code, said = ask(job, capsys, "export", "8", "--to", str(job / "x.pt"), *python)
    assert code == 0 and said.startswith("step 8: done") and not folder.exists()
    assert not list((job / "toy").glob("export-*"))


def test_export_rather_takes_a_step_on_disk_than_a_newer_one_in_memory(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slot(job / "memory" / "node-0" / "slots", 1, 9)
    python = an_interpreter(job)
    assert "step 9 of" in ask(job, capsys, "show")[1]
    assert ask(job, capsys, "export", "--to", str(job / "x.pt"), *python)[1].startswith("step 8: done")


def test_a_step_that_is_overwritten_during_its_export_is_not_called_damaged(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = slot(job / "newer", 0, 12)
    python = an_interpreter(job, f"os.replace({str(newer)!r}, files[0])", "sys.exit('it does not match')")
    code, said = ask(job, capsys, "export", "9", "--rank", "0", "--to", str(job / "x.pt"), *python)
    assert code == 1 and "step 9 is gone: the job runs and has saved newer ones" in said


def in_store(job: Path, step: int) -> str:
    """The job has written a step to a store; its folder there."""
    url = str(job / "store")
    place = Folder(store.root(url, "toy")).at("attempt-1", f"step-{step}")
    place.write_json(FILES, {"files": {}, "made_by": {}, "code": ""})
    store.commit(url, Manifest("toy", 1, step, 2, 5.0, 1.0, {}), keep=1, one_a_day=False)
    log = EventStore(job / "toy" / "events.db")
    said = {"folder": place.url, "attempt": 1, "step": step, "world_size": 2, "bytes": 1, "seconds": 1.0}
    asyncio.run(log.append([StoreCommitted(time=5.0, url=url, **said)]))  # type: ignore[arg-type]
    log.close()
    return place.url


def test_without_copies_here_the_store_is_known_from_the_event_log(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(job / "toy" / "checkpoints")
    shutil.rmtree(job / "memory")
    place = in_store(job, 40)
    _, said = ask(job, capsys, "list", "--json")
    assert [(step["step"], step["store"]) for step in json.loads(said)["steps"]] == [(40, place)]
    code, said = ask(job, capsys, "export")
    assert code == 1 and f"toy has no checkpoint here ({job}/toy/checkpoints); {place} has step 40" in said
    code, said = ask(job, capsys, "verify", "40")
    assert code == 0 and said.startswith("1 copy of 1 step intact")


def test_a_step_that_only_the_store_has_is_named_with_its_place(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = in_store(job, 5)
    code, said = ask(job, capsys, "show", "5")
    assert code == 1 and f"step 5 is in {place} alone, which torch.distributed.checkpoint reads" in said
