"""Real ranks that run from a version folder, however they are started."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from keeper.node import Json, Node, user_environ
from support import versions
from worker.test_finder import HELD, fake_site

StartNode = Callable[..., Node]

SCRIPT = """
import json, multiprocessing, os, sys
import evertrain
import side, plain.part, mapped, built

def child(queue):
    import plain.late
    queue.put([plain.late.who, plain.late.__file__, os.getcwd()])

class Numbers:
    def __len__(self):
        return 1
    def __getitem__(self, number):
        import plain.late
        return plain.late.who

if __name__ == '__main__':
    assert evertrain.init().rank == 0
    open('out.txt', 'w').write('kept')
    children = {}
    for method in ('fork', 'spawn'):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        children[method] = queue.get()
        process.join()
    if 'torch' in sys.modules:
        import torch
        assert list(torch.utils.data.DataLoader(Numbers(), num_workers=1)) == [['new']]
    print(json.dumps({
        'who': [side.who, plain.part.who, mapped.who, built.who, plain.__file__],
        'names': [__file__, sys.argv[0], sys.path[0], os.getcwd(), *sys.argv[1:]],
        'orig': sys.orig_argv[1:], 'ps': open('/proc/self/cmdline').read().rstrip(chr(0)).split(chr(0))[1:],
        'children': children, 'torch': 'torch' in sys.modules, 'opened': open('conf/base.yaml').read(),
        'given': open(sys.argv[1].partition('=')[2]).read(),
    }))
    open('conf/base.yaml').close()
    1 / 0
"""

NEW = {**HELD, "train.py": SCRIPT, "src/plain/late.py": "who = 'new'", "conf/base.yaml": "new"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for name, text in NEW.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("print('in place')" if name == "train.py" else text.replace("new", "old"))
    return root


@pytest.fixture
def start_node(root: Path, tmp_path: Path) -> Iterator[StartNode]:
    environ = user_environ(PYTHONPATH=str(fake_site(tmp_path, root)))
    with ExitStack() as stack:
        yield lambda *args, **more: stack.enter_context(Node(root, *args, environ=environ, **more))


def use(node: Node, tmp_path: Path, held: dict[str, str]) -> Json:
    code: Json = versions.make(tmp_path / "root", tmp_path / "v2", held)
    node.send(do="configure", term=1, env={}, code=code)
    node.wait_for(lambda state: state["code"] == code)
    return code


def run(node: Node, attempt: int, *args: str) -> int:
    node.prepare(attempt)
    node.go(attempt, args=args or None)
    node.wait_for(lambda state: node.phase(attempt) == "ended")
    return int(node.rank(attempt)["exit"]["status"])


def record(node: Node, attempt: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((node.rank_folder(attempt) / "exception.json").read_text())
    return found


@pytest.mark.parametrize("start", ["zygote", pytest.param("parked", marks=pytest.mark.matrix), "spawn"])
def test_a_rank_finds_the_version_wherever_it_looks(
    start_node: StartNode, root: Path, tmp_path: Path, start: str
) -> None:
    node = start_node("train.py", "--conf=conf/base.yaml", "x", start=start, preload=["plain.part"])
    folder = use(node, tmp_path, NEW)["folder"]
    assert run(node, 1) == 1
    assert node.output(1), node.output(1, 0, "err")
    found = json.loads(node.output(1))
    assert found["who"] == [*["new"] * 4, f"{folder}/src/plain/__init__.py"]
    script, conf = f"{folder}/train.py", f"--conf={folder}/conf/base.yaml"
    assert found["names"] == [script, script, folder, str(root), conf, "x"]
    assert found["orig"] == found["ps"] == ["-u", script, conf, "x"]
    in_child = ["new", f"{folder}/src/plain/late.py", str(root)]
    assert found["children"] == {"fork": in_child, "spawn": in_child}
    assert (found["torch"], found["given"], found["opened"]) == (start != "spawn", "new", "old")
    assert (node.state["starter"]["mode"], node.state["starter"]["reason"]) == (start, "")
    assert (root / "out.txt").read_text() == "kept", "what it writes lands where it always did"

    error = node.output(1, 0, "err")
    assert error.count("evertrain: rank 0 reads") == 1 and f"{root}/conf/base.yaml, of which" in error
    assert f'File "{script}", line' in error and record(node, 1)["file"] == script


def test_a_module_runs_from_the_version(start_node: StartNode, root: Path, tmp_path: Path) -> None:
    node = start_node("plain.tool", kind="module")
    (root / "side.py").write_text("who = 'old'")
    tool = "import side, sys; print(side.who, __file__, sys.argv[0], sys.path[0])"
    folder = use(node, tmp_path, {**NEW, "src/plain/tool.py": tool})["folder"]
    assert run(node, 1) == 0, node.output(1, 0, "err")
    assert node.output(1).split() == ["new", *[f"{folder}/src/plain/tool.py"] * 2, folder]


def test_a_script_that_the_version_has_not_is_not_run_from_the_root(
    start_node: StartNode, root: Path, tmp_path: Path
) -> None:
    node = start_node("train.py")
    code = versions.make(root, tmp_path / "v2", {"side.py": ""}, without=["train.py"])
    node.send(do="configure", term=1, env={}, code=code)
    node.wait_for(lambda state: state["code"] == code)
    assert run(node, 1) == 1
    error = node.output(1, 0, "err")
    # an exception: it is the version's fault, so the job goes back at once
    assert "Traceback" in error and f"WrongCode: this version of the code has no {code['folder']}/train.py" in error


def test_a_program_is_the_versions_and_so_are_its_files(start_node: StartNode, root: Path, tmp_path: Path) -> None:
    node = start_node("./run.sh", "conf/base.yaml", "$x", kind="program")
    (root / "run.sh").write_text("#!/bin/sh\necho in place\n")
    held = {**NEW, "run.sh": '#!/bin/sh\necho "$0" "$@" "$(cat "$1")" "$PWD"\n'}
    (tmp_path / "v2").mkdir()
    (tmp_path / "v2" / "run.sh").touch(mode=0o755)
    folder = use(node, tmp_path, held)["folder"]
    assert run(node, 1) == 0, node.output(1, 0, "err")
    assert node.output(1).split() == [f"{folder}/run.sh", f"{folder}/conf/base.yaml", "$x", "new", str(root)]


STALE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("stale", "side.py")
sys.modules["stale"] = stale = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stale)
try:
    if sys.argv[1] == "init":
        import evertrain
        evertrain.init()
    elif sys.argv[1] == "step":
        import torch
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).step()
    elif sys.argv[1] == "group":
        import torch.distributed
        torch.distributed.init_process_group("gloo")
finally:
    print("no further", flush=True)
print("further")
"""


def test_code_of_two_versions_ends_a_rank_before_it_trains(start_node: StartNode, root: Path, tmp_path: Path) -> None:
    node = start_node("train.py", start="zygote")
    folder = use(node, tmp_path, {**NEW, "train.py": STALE})["folder"]
    where = f"module stale was loaded from {root}/side.py, but its version is {folder}/side.py"
    for attempt, at in enumerate(["init", "step", "group"], 1):
        assert run(node, attempt, at) == 1
        assert node.output(attempt) == "no further\n"
        found = record(node, attempt)
        assert (found["type"], found["file"]) == ("WrongCode", f"{folder}/train.py")
        assert found["message"].startswith(f"rank 0 runs code of two versions: {where}. Import it")
        assert where in node.output(attempt, 0, "err")
    assert node.state["starter"]["mode"] == "zygote"
