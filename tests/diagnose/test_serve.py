"""A node's process: one test after the other, each within its budget, whatever becomes of its ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil

from evertrain import diagnose
from support.fleet import Fleet
from support.waiting import eventually


def fake(folder: Path, script: str) -> str:
    path = folder / "fake-dcgmi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


def test_it_runs_by_file_without_what_evertrain_depends_on(tmp_path: Path) -> None:
    given = {"node": "a", "device": "cpu", "folder": str(tmp_path)}
    test = {
        "id": 1,
        "program": "compute",
        "budget_s": 60,
        "parameters": {"size": 32, "dtypes": ["float32"], "rounds": 1},
    }
    code = (
        "import sys, runpy\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('msgspec', 'aiohttp', 'psutil', 'numpy', 'sqlalchemy', 'yaml'):\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "runpy.run_path(sys.argv[1], run_name='__main__')\n"
    )
    file = Path(diagnose.__file__).with_name("__main__.py")
    # the process ends with its input, and so would the test that runs
    with subprocess.Popen(
        [sys.executable, "-I", "-c", code, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(given) + "\n" + json.dumps(test) + "\n")
        process.stdin.flush()
        lines = [json.loads(process.stdout.readline())]
        while lines[-1]["is"] != "done":
            lines.append(json.loads(process.stdout.readline()))
        process.stdin.close()
        assert process.wait(30) == 0
    assert [line["is"] for line in lines] == ["ready", "reading", "reading", "done"]
    assert lines[0]["node"] == "a" and lines[-1]["outcome"] == "passed"
    assert all(line["id"] == 1 and line["rank"] == 0 and line["ok"] is True for line in lines[1:3])


def test_what_is_not_known_is_refused(fleet: Fleet) -> None:
    node = fleet.node("a")
    assert node.test("sing").outcome == "refused" and "vendor, compute" in node.test("sing").because
    done = node.test("compute", sise=3)
    assert done.outcome == "refused" and done.because.startswith("compute takes size, dtypes, rounds")


def test_a_rank_that_raises_or_dies_spoils_its_own_test_only(fleet: Fleet, tmp_path: Path) -> None:
    node = fleet.node("a", ranks=2)
    done = node.test("compute", dtypes=["int32"])
    assert done.outcome == "crashed" and "rank 0: ValueError: 'int32' is no floating point type" in done.because
    done = node.test("vendor", dcgmi=fake(tmp_path, "kill -9 $PPID"))
    assert done.outcome == "crashed" and done.because == "rank 0: ended by SIGKILL"
    assert node.test("compute", size=32, dtypes=["float32"]).outcome == "passed"


def test_without_a_scratch_folder_nothing_is_tested_and_the_process_lives(fleet: Fleet, tmp_path: Path) -> None:
    node = fleet.node("a", folder=str(tmp_path / "gone"))
    done = node.test("compute", size=32, dtypes=["float32"])
    assert done.outcome == "absent" and done.because.startswith(f"no scratch folder in {tmp_path / 'gone'}: No such")
    (tmp_path / "gone").mkdir()
    assert node.test("compute", size=32, dtypes=["float32"]).outcome == "passed"


def test_a_rank_over_the_budget_is_killed_with_all_that_it_started(fleet: Fleet, tmp_path: Path) -> None:
    node = fleet.node("a")
    # stopped, it cannot watch the time itself
    done = node.test("vendor", budget_s=1, dcgmi=fake(tmp_path, "kill -STOP $PPID; exec sleep 1000"))
    assert (done.outcome, done.because) == ("late", "not within 1 s: rank 0") and done.seconds < 30
    left = psutil.Process(node.ready["pid"])
    eventually(lambda: not left.children(recursive=True), "the end of the rank")
    eventually(
        lambda: not [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "1000"]],
        "sleep's end",
    )
    assert list(tmp_path.glob("evertrain-test-*")) == []
    assert node.test("compute", size=32, dtypes=["float32"]).outcome == "passed"


def test_the_end_of_its_input_ends_the_test_and_the_process(fleet: Fleet, tmp_path: Path) -> None:
    node = fleet.node("a")
    node.ask("vendor", dcgmi=fake(tmp_path, f"touch {tmp_path}/begun; exec sleep 1000"))
    eventually(lambda: (tmp_path / "begun").exists(), "the test's begin")
    family = [psutil.Process(node.ready["pid"]), *psutil.Process(node.ready["pid"]).children(recursive=True)]
    assert len(family) == 3
    node.close()
    eventually(lambda: not any(one.is_running() and one.status() != "zombie" for one in family), "the end of all")
    assert list(tmp_path.glob("evertrain-test-*")) == []


def test_every_program_says_whether_each_rank_takes_part() -> None:
    from importlib import import_module

    for name in diagnose.PROGRAMS:
        assert isinstance(import_module(f"evertrain.diagnose.{name}").ON_EACH_RANK, bool)
