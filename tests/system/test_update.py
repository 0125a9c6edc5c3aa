"""Real jobs get other code while they run: at once, with the next restart, and back again where it fails."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from conftest import InPeace, StartJob
from support import jobs, training
from support.training import RANKS, digest

Done = subprocess.CompletedProcess[str]


def tree(folder: Path, script: str, *edits: tuple[str, str], **files: str) -> Path:
    """A folder of code: a script of tests/support/scripts with `edits`, and more files beside it."""
    folder.mkdir(parents=True)
    text = (jobs.SCRIPTS / script).read_text()
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    (folder / script).write_text(text)
    for name, content in files.items():
        (folder / f"{name}.py").write_text(content)
    return folder


def tell(job: jobs.Job, *words: str | Path, timeout_s: float = 90) -> Done:
    command, *rest = words
    return jobs.evertrain(job.folder, command, job.name, *rest, environment=job.environment, timeout_s=timeout_s)


def update(job: jobs.Job, code: Path, *words: str) -> Done:
    return tell(job, "update", "--code", code, *words)


def versions(job: jobs.Job) -> dict[int, Any]:
    answer = tell(job, "versions", "--json")
    assert answer.returncode == 0, answer.stderr
    return {one["version"]: one for one in json.loads(answer.stdout)["versions"]}


def captured(job: jobs.Job) -> None:
    job.wait_until(lambda status: status["version"], "the code is captured")


def starts(job: jobs.Job, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.folder / f"starts-r{rank}.jsonl").read_text().splitlines()]


MARK = '"added": os.environ.get("ADDED"),'
"""Of steady.py: here a test lets a version say what it is."""


def says(text: str) -> tuple[str, str]:
    return MARK, f'{MARK} "says": {text},'


def steady(start_job: StartJob, *edits: tuple[str, str], flags: Sequence[str] = (), **files: str) -> jobs.Job:
    job: jobs.Job = start_job("steady.py", nproc=2, flags=["--help"])  # for its folder
    job.wait()
    tree(job.folder / "code", "steady.py", *edits, **files)
    (job.folder / "code" / ".gitignore").write_text("data/\n")
    (job.folder / "code" / "data").mkdir()
    (job.folder / "code" / "data" / "tokens.txt").write_text("tokens")
    begun: jobs.Job = start_job(job.folder / "code" / "steady.py", nproc=2, flags=flags)
    begun.wait_for_step(3, within_s=60)
    captured(begun)
    return begun


def end(job: jobs.Job) -> None:
    (job.folder / "over").touch()
    assert job.wait() == 0


READS_DATA = 'open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "tokens.txt")).read()'


def test_at_once_with_the_next_failure_and_back(start_job: StartJob) -> None:
    job = steady(
        start_job, ("import torch\n", "import torch\nimport helper\n"), says("helper.TEXT"), helper='TEXT = "one"\n'
    )
    assert starts(job)[0]["says"] == "one"
    keeper = job.processes()["keeper-node-0"].pid

    edits = [("import torch\n", "import torch\nimport helper\n"), says(f"helper.TEXT + {READS_DATA}")]
    new = tree(job.folder / "new", "steady.py", *edits, helper='TEXT = "two "\n')
    done = update(job, new, "--urgent", "--reason", "a better text")
    assert done.returncode == 0, done.stderr
    assert "version 2" in done.stdout
    assert [start.get("says") for start in starts(job)] == ["one", "two tokens"], "data beside the script is found"
    assert starts(job)[1]["resumed"] >= 3
    assert job.incidents() == []

    newer = tree(job.folder / "newer", "steady.py", *edits, helper='TEXT = "three "\n')
    done = update(job, newer, "--within", "2h")
    assert done.returncode == 0, done.stderr
    assert job.status()["change"]["version"] == 3
    job.kill_rank(1)
    job.wait_until(lambda status: status["version"] == 3 and status["state"] == "running", "version 3 runs")
    assert starts(job)[2]["says"] == "three tokens"
    (incident,) = job.incidents()
    assert (incident["action"], incident["from_version"], incident["to_version"]) == ("hot_update", 2, 3)

    done = tell(job, "rollback", "2", "--keep-progress")
    assert done.returncode == 0, done.stderr
    assert starts(job)[3]["says"] == "two tokens"
    assert starts(job)[3]["resumed"] > starts(job)[2]["resumed"]
    assert job.processes()["keeper-node-0"].pid == keeper
    known = versions(job)
    assert known[2]["runs"] and not known[3]["runs"] and known[1]["own"]
    assert (known[2]["reason"], known[1]["attempts"], known[2]["attempts"]) == ("a better text", [1], [2, 4])
    audit = json.loads(tell(job, "versions", "--audit", "--json").stdout)
    assert {one["act"] for one in audit} == {"upload", "update", "rollback"} and {one["outcome"] for one in audit} == {
        "done"
    }
    end(job)
    assert set(job.report()["run"]["by_category"]) >= {"code_change"}


STEP = '        hold("step", step)\n'
"""Of train.py: where each step begins."""


def until(name: str) -> tuple[str, str]:
    """From step 7 on the ranks wait for this file."""
    lines = (
        '        with evertrain.phase("pause"):',
        f"            while step > 6 and not Path({name!r}).exists():",
        "                time.sleep(0.02)",
    )
    return STEP, "".join(f"{line}\n" for line in lines) + STEP


def waiting(start_job: StartJob, name: str, **options: Any) -> jobs.Job:
    """A training that has saved six steps, and goes on when the file is there; its code has been captured."""
    first: jobs.Job = start_job("train.py", nproc=1, flags=["--help"])  # for its folder
    first.wait()
    code = tree(first.folder / "code", "train.py", until(name))
    job: jobs.Job = start_job(code / "train.py", **options)
    job.wait_for_step(6, within_s=60)
    captured(job)
    return job


def test_an_update_that_breaks_model_and_state_is_rolled_back_to_the_same_bits(
    start_job: StartJob, undisturbed: str
) -> None:
    job = waiting(start_job, "has-failed", nproc=RANKS)
    broken = tree(
        job.folder / "broken",
        "train.py",
        ("nn.Linear(192, 192), nn.Tanh()", "nn.Linear(192, 192), nn.ReLU(), nn.LayerNorm(192)"),
        ('{"model": net, "optimizer": optimizer, "held": held, "own": own}', '{"weights": net, "adam": optimizer}'),
        ("    done = checkpointer.load() or 0\n", _LOAD),
        (STEP, _FAIL),
        ("    if not bool((own == RANK + done).all()):", "    if False:"),
    )
    done = update(job, broken, "--urgent")
    assert done.returncode in (0, 1), done.stderr
    assert job.wait() == 0
    assert digest(job.folder) == undisturbed
    assert (job.folder / "has-failed").exists(), "it had trained and saved in its own layout"
    incidents = job.incidents()
    assert incidents[-1]["action"] == "roll_back" and incidents[-1]["cause"] == "exception TypeError"
    assert (incidents[-1]["from_version"], incidents[-1]["to_version"]) == (2, 1)
    assert versions(job)[2]["outcome"] == "rolled_back"
    assert training.steps_done(job.folder, 0).count(9) >= 2, "what it had done was done again"


_LOAD = """\
    try:
        done = checkpointer.load() or 0
    except RuntimeError:
        done = evertrain.init().resume_step
"""
_FAIL = """\
        if step == 11:
            Path("has-failed").touch()
            raise TypeError("unsupported operand")
"""


def test_an_error_without_an_update_ends_the_job_with_its_traceback(start_job: StartJob) -> None:
    job = start_job("train.py", nproc=RANKS, args=["--fail", "1:3"])
    assert job.wait() == 1
    assert "ValueError: no good number at step 3" in job.errors
    assert len(job.incidents()) == 2
    assert all(one["to_version"] is None for one in job.incidents())


@pytest.mark.matrix
def test_a_module_that_was_imported_ahead_is_that_of_the_version(start_job: StartJob) -> None:
    edits = [("import torch\n", "import torch\nimport helper\n"), says("helper.TEXT")]
    job = steady(start_job, *edits, flags=["--preload", "helper"], helper='TEXT = "one"\n')
    new = tree(job.folder / "new", "steady.py", *edits, helper='TEXT = "two"\n')
    newest = tree(job.folder / "newest", "steady.py", *edits, helper='TEXT = "three"\n')
    asked = [
        subprocess.Popen(
            [jobs.EVERTRAIN, "update", job.name, "--code", code, "--urgent"],
            cwd=job.folder, env=job.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for code in (new,)
    ]  # fmt: skip
    job.wait_until(lambda status: status["change"] is not None or status["version"] == 2, "the first is under way")
    job.kill_rank(0)  # recovery and update at once, with the zygote of either version
    second = update(job, newest, "--urgent")
    out, err = asked[0].communicate(timeout=90)
    assert second.returncode == 0, second.stderr
    assert asked[0].returncode in (0, 1), err
    job.wait_until(lambda status: status["version"] == 3 and status["state"] == "running", "the newest runs")
    texts = {1: "one", 2: "two", 3: "three"}
    ran = {attempt: version for version, one in versions(job).items() for attempt in one["attempts"]}
    for rank in (0, 1):
        for start in starts(job, rank):
            assert start["says"] == texts[ran[start["attempt"]]], (out, start, ran)
    assert job.status()["start"]["mode"] == "zygote"
    end(job)


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["parked", "spawn"])
def test_other_ways_to_start(start_job: StartJob, mode: str) -> None:
    edits = [("import torch\n", "import torch\nimport helper\n"), says("helper.TEXT")]
    job = steady(start_job, *edits, flags=["--start", mode], helper='TEXT = "one"\n')
    new = tree(job.folder / "new", "steady.py", *edits, helper='TEXT = "two"\n')
    assert update(job, new, "--urgent").returncode == 0
    assert starts(job)[1]["says"] == "two"
    end(job)


@pytest.mark.matrix
def test_several_nodes_switch_at_once(start_job: StartJob, in_peace: InPeace) -> None:
    flags = ["--local-nodes", "2"]
    undisturbed = in_peace("train.py", nproc=2, flags=flags)
    job = waiting(start_job, "go-on", nproc=2, flags=flags)
    new = tree(job.folder / "new", "train.py", ('hold("start")\n', 'hold("start")\nVERSION = 2\n'))
    assert update(job, new, "--urgent").returncode == 0
    assert job.wait() == 0
    assert digest(job.folder) == digest(undisturbed)
    assert versions(job)[2]["attempts"] == [2]
