"""The commands as a user meets them: quick help, one clear line for what is wrong, never a traceback."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cli.plans import known_job
from support.jobs import EVERTRAIN, evertrain, user_environment


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    return tmp_path


def refused(folder: Path, *words: str) -> tuple[int, str]:
    done = evertrain(folder, *words)
    assert done.stdout == ""
    assert done.stderr.startswith("evertrain: ") and done.stderr.count("\n") == 1, done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize("words", [("--help",), ("run", "--help"), ("status", "--help"), ("--version",)])
def test_help_comes_at_once(folder: Path, words: tuple[str, ...]) -> None:
    best_s = 9.0
    for _ in range(5):
        # processor time: on a loaded machine everything waits
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = evertrain(folder, *words)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best_s = min(best_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0 and done.stdout
    assert best_s <= 0.3


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("run", "--help"),
        ("status", "--help"),
        ("incidents", "--help"),
        ("stacks", "--help"),
        ("standby", "--help"),
        ("versions", "--help"),
        ("update", "--help"),
        ("rollback", "--help"),
        ("restart", "--help"),
        ("node", "list", "--help"),
    ],
)
def test_help_imports_nothing_heavy(words: tuple[str, ...]) -> None:
    look = (
        "import sys; from evertrain.cli.main import main\n"
        f"try: main({list(words)!r})\n"
        "except SystemExit: pass\n"
        "heavy = {'msgspec', 'aiohttp', 'sqlalchemy', 'rich', 'torch', 'yaml', 'psutil', 'pathspec'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=30)
    assert done.stderr == "[]\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("rnu", "train.py"), "unknown command rnu; did you mean run?"),
        (("--nproc-per-node", "2"), "unknown flag --nproc-per-node"),
        (("run", "missing.py"), "no such script: missing.py"),
        (("run", "--nproc-per-node", "0", "train.py"), "--nproc-per-node 0: at least 1 rank a node"),
        (("run", "--nproc_per_nod=2", "train.py"), "did you mean --nproc-per-node?"),
        (("run", "--mesh", "dp=3", "train.py"), "--mesh dp=3: 3 = 3 ranks, but there are 1"),
        (("run", "--inject", "kil:rank=0", "train.py"), "unknown fault 'kil'"),
        (("run", "--nnodes", "2", "train.py"), "needs --rdzv-endpoint HOST:PORT on every node"),
        (("status", "--jsno"), "unknown flag --jsno; did you mean --json?"),
        (("incidents", "1", "2"), "1 2: one job and the number of one of its incidents"),
        (("incidents", "first", "second"), "first second: one job and the number of one of its incidents"),
        (("restart", "--from-step", "x"), "invalid int value: 'x'"),
        (("restart", "--from-step", "3", "--verify", "2"), "not allowed with argument"),
        (("restart", "--env", "A"), "--env A: NAME=VALUE is needed"),
        (("restart", "--env", "RANK=3"), "--env RANK=3: RANK is set for each rank by evertrain"),
        (("update",), "--code is missing"),
        (("update", "--code", "none"), "--code none: no such folder"),
        (("run", "--code", "none", "train.py"), "--code none: no such folder"),
        (("clean", "all"), "unexpected argument 'all'"),
    ],
)
def test_what_was_typed_wrong_is_one_line_and_2(folder: Path, words: tuple[str, ...], line: str) -> None:
    code, said = refused(folder, *words)
    assert line in said
    assert code == 2


def test_no_command_shows_the_help(folder: Path) -> None:
    done = evertrain(folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: evertrain COMMAND" in done.stderr


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_refused(folder: Path, platform: str) -> None:
    pretend = f"import sys; sys.platform = {platform!r}; from evertrain.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", pretend, "run", "train.py"], cwd=folder, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2
    assert done.stderr == f"evertrain: Linux (or WSL2) is needed; this is {platform}\n"


@pytest.mark.parametrize("flags", [("--master-port",), ("--rdzv-backend", "c10d", "--rdzv-endpoint")])
def test_a_port_that_is_taken(folder: Path, flags: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        where = str(port) if flags == ("--master-port",) else f"localhost:{port}"
        code, said = refused(folder, "run", *flags, where, "train.py")
    assert code == 1
    assert f"port {port} is taken" in said


def test_a_run_dir_that_cannot_be_written(folder: Path) -> None:
    code, said = refused(folder, "run", "--run-dir", "/proc/runs", "train.py")
    assert code == 1
    assert "cannot make /proc/runs" in said and "--run-dir names another place" in said


def test_commands_that_look_know_no_job(folder: Path) -> None:
    for command in ("status", "incidents", "restart", "rollback", "versions", "stop"):
        code, said = refused(folder, command)
        assert (code, "there is no job here" in said) == (1, True)
        code, said = refused(folder, command, "--job", "other")
        assert (code, said) == (1, "evertrain: there is no job other (known: none)\n")


def test_json_of_a_job_that_has_ended_is_all_that_is_on_stdout(folder: Path) -> None:
    run_dir = known_job(folder / "runs", "job")
    code, said = refused(folder, "status", "--job", "job")
    assert (code, "has written nothing down yet" in said) == (1, True)

    make_log = f"""
from evertrain.controller.store import EventStore
from evertrain.model.records import RunStarted
from pathlib import Path
import asyncio
async def main():
    store = EventStore(Path({str(run_dir / "events.db")!r}))
    await store.append([RunStarted(time=1.0, run_id="job-1", nodes=("node-0",), standby=0, nproc_per_node=2,
                                   fresh=False, start="zygote", command="train.py")])
    store.close()
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", make_log], check=True, timeout=30)
    status = json.loads(evertrain(folder, "status", "--json").stdout)
    assert (status["job"], status["state"], status["nodes"][0]["id"]) == ("job", "stopped", "node-0")
    assert json.loads(evertrain(folder, "incidents", "--json").stdout) == []
    assert "job job: stopped" in evertrain(folder, "status").stdout
    assert evertrain(folder, "incidents").stdout == "job job has had no incident\n"
    assert evertrain(folder, "incidents", "5").stderr.startswith("evertrain: job job has no incident 5")


def test_a_reader_that_has_had_enough_is_no_trouble(folder: Path) -> None:
    process = subprocess.Popen(
        [EVERTRAIN, "run", "--help"], env=user_environment(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == b""
    process.wait(10)
