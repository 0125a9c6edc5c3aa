"""`evertrain run` with stand-ins for keeper, agent and controller: what is its own business, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import processes
from support.jobs import evertrain, user_environment
from support.leftovers import SHARED_MEMORY
from support.waiting import eventually

FAKE = Path(__file__).with_name("fake.py")


def _hang_up_as_usual() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Run:
    """One `evertrain run --job fake…` in its own folder."""

    def __init__(self, folder: Path, name: str, words: list[str], environ: dict[str, str]) -> None:
        self.folder = folder
        self.run_dir = folder / "runs" / name
        self.environ = environ
        command = [sys.executable, str(FAKE), "drive", "run", "--job", name, *words, str(folder / "train.py")]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # tests that run under nohup must not hand that on: what is ignored stays ignored
            preexec_fn=_hang_up_as_usual,
        )

    def end(self, timeout_s: float = 20.0) -> tuple[int, bytes, str]:
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err.decode()

    def pid(self, name: str) -> int:
        found = eventually(lambda: processes.recorded(self.run_dir).get(name), f"{name} is written down", within_s=10)
        assert found is not None
        return found.pid

    def new_pid(self, name: str, old: int) -> int:
        def other() -> int | None:
            found = processes.recorded(self.run_dir).get(name)
            return found.pid if found is not None and found.pid != old else None

        found = eventually(other, f"{name} is started again", within_s=10)
        assert found is not None
        return found

    def wait_for(self, name: str) -> Path:
        file = self.run_dir / name
        eventually(file.exists, name, within_s=10)
        return file

    def posts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "posts.jsonl").read_text().splitlines()]


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "train.py").touch()
    started: list[Run] = []

    def run(*words: str, fake: dict[str, Any] | None = None, **environ: str) -> Run:
        name = f"fake-{os.getpid()}-{len(started)}"
        whole = user_environment(tmp_path, {"FAKE": json.dumps(fake or {}), **environ})
        started.append(Run(tmp_path, name, list(words), whole))
        return started[-1]

    yield run
    for one in started:
        one.process.kill()
        one.process.communicate()
    for left in processes.of_folder(tmp_path):
        processes.send(left)


def test_from_start_to_end(start: Start) -> None:
    noise = bytes(range(256)).decode("latin-1") * 40 + "no newline"
    run = start("--nproc-per-node", "2", "--start-method", "fork", fake={"stdout": noise})
    code, out, err = run.end()
    assert code == 0
    assert out == noise.encode("latin-1")
    lines = err.splitlines()
    assert lines[0].startswith(f"evertrain: job {run.run_dir.name}: 2 ranks")
    assert "restarts for as long as there is progress" in lines[1]
    assert lines[2].startswith("evertrain: --start-method has no effect")
    assert f"evertrain: job {run.run_dir.name} done: as planned" in lines
    assert "active: everything" in err and "blind: nothing" in err
    assert not list(SHARED_MEMORY.glob(f"{run.run_dir.name}*"))
    assert not (run.run_dir / "processes").exists()
    assert (run.run_dir / "token").stat().st_mode & 0o777 == 0o600


def test_the_controller_knows_the_code_and_its_token(start: Start) -> None:
    run = start()
    assert run.end()[0] == 0
    where, token = (run.run_dir / "code.txt").read_text().splitlines()
    root, folder, file = where.split()
    assert (root, folder) == (str(run.folder), str(run.run_dir / "code"))
    assert file == f"{SHARED_MEMORY}/{Path(file).parent.name}/code-token" and run.run_dir.name in file
    made = run.run_dir / "code-token"
    assert made.read_text() == token and len(token) == 64 and made.stat().st_mode & 0o777 == 0o600
    assert token != (run.run_dir / "token").read_text()


def test_a_code_token_that_fits_no_header_is_refused(start: Start) -> None:
    code, out, err = start(EVERTRAIN_CODE_TOKEN="zwölf").end()
    assert (code, out) == (2, b"")
    assert err == "evertrain: EVERTRAIN_CODE_TOKEN: a token is one line of printable ASCII characters\n"


@pytest.mark.parametrize("name", ["keeper-node-0", "agent-node-0", "controller"])
def test_whoever_dies_is_started_again(start: Start, name: str) -> None:
    run = start(fake={"after_s": 2.0})
    first = run.pid(name)
    run.wait_for("controller.json")
    url = json.loads((run.run_dir / "controller.json").read_text())["url"]
    os.kill(first, signal.SIGKILL)
    run.new_pid(name, first)
    code, _, err = run.end()
    assert code == 0
    assert f"{name} ended (SIGKILL); it is started again" in err
    assert json.loads((run.run_dir / "controller.json").read_text())["url"] == url


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_stops_the_job(start: Start, number: signal.Signals, code: int) -> None:
    run = start(fake={"after_s": 30.0})
    run.wait_for("controller.json")
    run.process.send_signal(number)
    ended, _, err = run.end()
    assert ended == code
    assert run.posts() == [{"path": "/v1/stop", "signal": int(number), "reason": f"stopped by {number.name}"}]
    assert f"{number.name}: stopping within 25 s" in err


def test_a_controller_that_does_not_stop_is_ended_by_force(start: Start) -> None:
    run = start("--grace", "0", fake={"after_s": 60.0, "deaf": True})
    run.wait_for("controller.json")

    def over() -> bool:  # the third one is the last word
        run.process.send_signal(signal.SIGINT)
        return run.process.poll() is not None

    eventually(over, "the end by force", within_s=10, every_s=0.3)
    code, _, err = run.end()
    assert code == 130
    assert "ended by force" in err


def test_a_job_ends_where_the_disk_has_no_room_for_its_result(start: Start) -> None:
    code, _, err = start(fake={"no_room": True, "exit_code": 1, "state": "failed"}).end()
    assert code == 1
    assert "failed: as planned" in err and "started again" not in err


def test_a_run_dir_without_room_is_named(start: Start, tmp_path: Path) -> None:
    run = start()
    run.end()
    (run.run_dir / "token").unlink()
    (run.run_dir / "token").mkdir()  # as root nothing else is unwritable
    again = subprocess.run(
        run.process.args, cwd=run.folder, env=run.environ, capture_output=True, text=True, timeout=20
    )
    assert again.returncode == 1
    assert again.stderr.startswith("evertrain: ") and "cannot be written" in again.stderr
    assert again.stderr.count("\n") == 1


def test_a_controller_that_hangs_does_not_keep_the_job_from_ending(start: Start) -> None:
    run = start(fake={"after_s": 60.0})
    run.wait_for("controller.json")
    os.kill(run.pid("controller"), signal.SIGSTOP)
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.end(timeout_s=30)
    assert code == 130
    assert "the controller has not answered for" in err
    assert {post["path"] for post in run.posts()} == {"/v1/stop"}  # asked again until somebody answers


def test_a_run_that_is_killed_is_noticed_by_all(start: Start) -> None:
    run = start(fake={"after_s": 60.0})
    run.pid("agent-node-0")
    run.wait_for("controller.json")
    run.process.kill()
    run.wait_for("keeper-node-0.owner-gone")
    run.wait_for("agent-node-0.owner-gone")


def test_a_second_run_of_the_same_job_is_refused(start: Start) -> None:
    run = start(fake={"after_s": 3.0})
    run.wait_for("controller.json")
    second = subprocess.run(
        [sys.executable, FAKE, "drive", "run", "--job", run.run_dir.name, "train.py"],
        cwd=run.folder,
        env=run.environ,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert second.returncode == 1
    assert second.stderr.startswith(
        f"evertrain: job {run.run_dir.name} is already running (pid {run.process.pid}); "
        f"`evertrain status --job {run.run_dir.name}` shows it"
    )
    assert second.stderr.count("\n") == 1
    assert run.end()[0] == 0


def test_on_nfs_lock_and_database_are_local_and_the_rest_is_found(start: Start) -> None:
    run = start(fake={"after_s": 30.0}, FAKE_NFS="1")
    run.wait_for("controller.json")
    described = json.loads((run.run_dir / "job.json").read_text())
    local = Path(described["database"]).parent
    try:
        assert local.parent == Path(f"/var/tmp/evertrain-{os.getuid()}")
        assert {file.name for file in local.iterdir()} == {"lock"}
        seen = evertrain(run.folder, "status", "--json", "--job", run.run_dir.name, environment=run.environ)
        assert json.loads(seen.stdout)["step"] == 7
        run.process.send_signal(signal.SIGTERM)
        assert run.end()[0] == 143
    finally:
        shutil.rmtree(local)


def test_a_controller_that_cannot_start_is_given_up_with_its_last_words(start: Start) -> None:
    code, _, err = start(fake={"broken": True}).end(40)
    assert code == 1
    assert "controller cannot be started; the job is given up" in err
    assert "this controller is broken" in err


def test_the_token_of_the_environment_is_used_and_kept_from_the_ranks(start: Start) -> None:
    run = start(EVERTRAIN_TOKEN="secret", EVERTRAIN_CODE_TOKEN="more secret")
    assert run.end()[0] == 0
    assert (run.run_dir / "token").read_text() == "secret"
    assert (run.run_dir / "code-token").read_text() == "more secret"
    assert all(line.endswith("False") for line in (run.run_dir / "lives.txt").read_text().splitlines())


def test_orphans_of_a_dead_keeper_are_ended(start: Start) -> None:
    run = start(fake={"after_s": 3.0}, FAKE_ORPHAN="1")
    first = run.pid("keeper-node-0")
    orphan = processes.identify(int(run.wait_for("orphan.txt").read_text()))
    assert orphan is not None
    os.kill(first, signal.SIGKILL)
    eventually(lambda: not processes.is_alive(orphan), "the orphan is ended", within_s=5)
    assert run.end()[0] == 0


def test_a_node_is_wiped_once_and_comes_back(start: Start) -> None:
    run = start("--local-nodes", "2", "--inject", "wipe:node=1@step=5", fake={"after_s": 3.0})
    first = run.pid("keeper-node-1")
    disk = run.run_dir / "checkpoints" / "node-1"
    disk.mkdir(parents=True)
    (disk / "step").touch()
    run.new_pid("keeper-node-1", first)
    code, _, err = run.end()
    assert code == 0
    assert err.count("drill: wipe:node=1@step=5") == 1
    assert "agent-node-1 ended (SIGKILL)" in err and "node-0 ended" not in err
    assert not disk.exists()


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("gpu-lost", "gpu_lost"), ("network-alert", "network_alert"), ("reading", "hardware_reading")],
)
def test_what_is_seen_of_a_node_is_reported_to_the_controller(start: Start, fault: str, kind: str) -> None:
    run = start("--inject", f"{fault}:node=node-0@step=5", fake={"after_s": 2.0})
    assert run.end()[0] == 0
    (post,) = run.posts()
    assert (post["path"], post["kind"], post["node"]) == ("/v1/signals", kind, "node-0")


def test_the_same_drill_twice_is_two_drills(start: Start) -> None:
    twice = ("--inject", "network-alert:node=0@step=5") * 2
    run = start(*twice, fake={"after_s": 2.0})
    assert run.end()[0] == 0
    assert [post["kind"] for post in run.posts()] == ["network_alert"] * 2


def test_a_lost_node_stays_away_and_the_job_ends_without_it(start: Start) -> None:
    run = start("--local-nodes", "2", "--inject", "node-loss:node=1@step=5", fake={"after_s": 4.0})
    lost = [processes.identify(run.pid(name)) for name in ("keeper-node-1", "agent-node-1")]
    eventually(lambda: not any(one and processes.is_alive(one) for one in lost), "the node is gone", within_s=5)
    code, _, err = run.end()
    assert code == 0
    assert err.count("drill: node-loss:node=1@step=5") == 1 and "started again" not in err
    lives = (run.run_dir / "lives.txt").read_text().split()
    assert (lives.count("keeper-node-1"), lives.count("agent-node-1")) == (1, 1)
    assert not list(SHARED_MEMORY.glob(f"{run.run_dir.name}*"))


def test_a_lost_node_comes_back_when_its_time_is_over(start: Start) -> None:
    run = start("--local-nodes", "2", "--inject", "node-loss:node=1,for=1.5@step=5", fake={"after_s": 6.0})
    first = processes.identify(run.pid("keeper-node-1"))
    assert first is not None
    eventually(lambda: not processes.is_alive(first), "the node is gone", within_s=5)
    gone = time.monotonic()
    run.new_pid("keeper-node-1", first.pid)
    assert time.monotonic() - gone > 1.0, "keepers that die by themselves are back in a tenth of a second"
    code, _, err = run.end()
    assert code == 0 and "started again" not in err


def test_a_detached_job_is_watched_and_stopped_from_elsewhere(start: Start) -> None:
    run = start("--detach", fake={"after_s": 30.0, "stdout": "a rank speaks\n"})
    code, out, _ = run.end()
    name = run.run_dir.name
    assert code == 0
    assert out.decode().splitlines()[0] == f"evertrain: job {name} runs in the background"
    run.wait_for("controller.json")
    seen = evertrain(run.folder, "status", "--json", environment=run.environ)
    assert seen.stderr == ""
    assert json.loads(seen.stdout)["step"] == 7
    stopped = evertrain(run.folder, "stop", "--job", name, environment=run.environ)
    assert stopped.stdout == f"job {name} has ended: stopped by `evertrain stop`\n"
    assert "a rank speaks" in (run.run_dir / "logs" / "run.log").read_text()
    assert not list(SHARED_MEMORY.glob(f"{name}*"))
