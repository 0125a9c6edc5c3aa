"""`evertrain checkpoint`: what is there, whether it is intact, what is in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.plans import known_job
from evertrain.checkpoint import disk
from evertrain.cli import main
from evertrain.worker import slots as layout
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
    assert code == 0 and "2 of 2" in said and "no: ranks 1 are not here" in said


def test_verify_names_what_is_damaged(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(job, capsys, "verify") == (0, "5 copies of 3 steps are intact, 0 damaged\n")
    flip(job, 8, 1)
    code, said = ask(job, capsys, "verify")
    assert code == 1
    assert "step 8, rank 1, tier disk: 1 of 1 chunks do not match their checksums, in model (" in said
    assert ask(job, capsys, "verify", "7") == (0, "2 copies of 1 steps are intact, 0 damaged\n")


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
        (("show", "9", "--rank", "1"), 1, "no copy of rank 1 is here; ranks 0 are"),
        (("export", "9"), 1, "step 9 is not whole here: ranks 1 are missing"),
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
