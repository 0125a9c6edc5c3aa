"""What waits is of the code that is wanted, and what runs is left alone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from keeper.node import Json, Node
from keeper.test_early import early, reaches
from support import versions

StartNode = Callable[..., Node]

SCRIPT = "import sys; print({name!r}, 'torch' in sys.modules, __file__, flush=True)"


def version(folder: Path, name: str, text: str = SCRIPT, number: int = 2) -> Json:
    """A version of the script that says its name."""
    code: Json = versions.make(folder, folder / "code" / name, {"script.py": text.format(name=name)}, version=number)
    return code


def configure(node: Node, code: Json | None, env: dict[str, str] | None = None) -> None:
    node.send(do="configure", term=1, env=env or {}, code=code)
    node.wait_for(lambda state: state["code"] == code and state["env"] == (env or {}))


def run(node: Node, attempt: int) -> str:
    node.go(attempt)
    node.wait_for(lambda state: node.phase(attempt) == "ended")
    assert node.errors == [], node.errors
    return node.output(attempt)


def is_renewed(node: Node, attempt: int, before: Json) -> bool:
    return node.phase(attempt) == "prepared" and node.attempt(attempt)["ranks"] != before


def test_what_waits_for_other_code_is_not_let_go(start_node: StartNode, tmp_path: Path) -> None:
    node = start_node(SCRIPT.format(name="in place"))
    assert node.state["code"] is None
    code = version(tmp_path, "second")
    node.prepare(1)
    before = node.attempt(1)["ranks"]
    orders = {"0": node.orders(1, 0, {})}
    node.send(do="go", term=1, attempt=1, ranks=orders, code=code["digest"])
    wanted = code["digest"][:12]
    assert node.wait_for_error() == f"attempt 1 waits with the files in place, not with code {wanted}"
    configure(node, code)
    node.wait_for(lambda state: is_renewed(node, 1, before))
    node.send(do="go", term=1, attempt=1, ranks=orders)
    assert node.wait_for_error() == f"attempt 1 waits with code {wanted}, not with the files in place"
    assert run(node, 1) == f"second False {code['folder']}/script.py\n"
    configure(node, None)
    node.prepare(2)
    assert run(node, 2) == f"in place False {tmp_path}/script.py\n"


def test_the_same_code_again_and_the_same_files_under_another_number_change_nothing(
    start_node: StartNode, tmp_path: Path
) -> None:
    node = start_node(SCRIPT.format(name="in place"))
    code = version(tmp_path, "second")
    configure(node, code, {"A": "1"})
    node.prepare(1)
    before = node.attempt(1)["ranks"]
    configure(node, code, {"A": "1"})
    configure(node, code | {"version": 7}, {"A": "1"})
    node.prepare(2)
    assert node.attempt(1)["ranks"] == before
    assert run(node, 1).startswith("second")


@pytest.mark.parametrize(
    "wrong",
    [
        {"digest": ""},
        {"folder": "relative"},
        {"root": ""},
        {"version": "x"},
        {"digest": None},
        {"folder": 7},
        {"root": ...},
    ],
)
def test_code_that_says_too_little_is_refused(start_node: StartNode, tmp_path: Path, wrong: Json) -> None:
    node = start_node(SCRIPT)
    code = {name: value for name, value in (version(tmp_path, "x") | wrong).items() if value is not ...}
    node.send(do="configure", term=1, env={}, code=code)
    assert node.wait_for_error().startswith("not understood")
    assert node.state["code"] is None


def test_an_attempt_that_has_been_let_go_is_not_touched(start_node: StartNode, tmp_path: Path) -> None:
    node = start_node("import time; print('in place', flush=True); time.sleep(600)")
    node.prepare(1)
    node.go(1)
    node.wait_for(lambda state: node.phase(1) == "running")
    before = node.rank(1)
    configure(node, version(tmp_path, "second"))
    node.prepare(2)
    node.go(1)  # as an agent says again and again; nothing of it waits any more
    assert run(node, 2).startswith("second")
    assert node.rank(1) == before and before["state"] == "running"
    assert node.output(1) == "in place\n"


def test_a_rank_that_ended_while_it_waited_is_no_obstacle(start_node: StartNode, tmp_path: Path) -> None:
    node = start_node(SCRIPT.format(name="in place"), nproc=2)
    node.prepare(1)
    node.prepare(2)
    for attempt, rank in ((1, 0), (1, 1), (2, 0)):
        os.kill(node.rank(attempt, rank)["pid"], signal.SIGKILL)
    node.wait_for(lambda state: node.phase(1) == "ended" and node.rank(2, 0)["state"] == "ended")
    configure(node, version(tmp_path, "second"))
    node.wait_for(lambda state: node.phase(2) == "prepared" and node.rank(2, 0)["exit"] is None)
    assert node.phase(1) == "ended"
    assert run(node, 2).startswith("second")


def test_ranks_that_ran_ahead_with_old_code_begin_anew(start_node: StartNode, tmp_path: Path) -> None:
    text = "import evertrain; print({name!r}, flush=True); evertrain.init(); print('on with', {name!r})"
    node = start_node(text.format(name="in place"))
    node.send(do="run_ahead", term=1, asked=early(node))
    first = reaches(node, "waiting")["pids"]
    second, third = version(tmp_path, "second", text), version(tmp_path, "third", text, 3)
    configure(node, second)
    node.wait_for(lambda state: state["early"]["state"] == "waiting" and state["early"]["pids"] != first)
    assert (tmp_path / "standby" / "0.out").read_text() == "in place\nsecond\n"
    node.prepare(1)  # of those that are ahead
    before = node.attempt(1)["ranks"]
    configure(node, third)
    node.wait_for(lambda state: is_renewed(node, 1, before))
    assert run(node, 1) == "third\non with third\n"


def test_a_zygote_is_renewed_with_a_fork_under_way_and_whatever_was_refused_before(
    start_node: StartNode, tmp_path: Path
) -> None:
    node = start_node("import os; os.environ['OMP_NUM_THREADS'] = '3'; import torch", start="zygote", nproc=2)
    node.prepare(1, store=True)
    assert node.state["starter"]["mode"] == "spawn"
    before = node.attempt(1)
    second, third = version(tmp_path, "second"), version(tmp_path, "third", number=3)
    configure(node, second)
    assert (node.state["starter"]["mode"], node.state["starter"]["reason"]) == ("zygote", "")
    node.wait_for(lambda state: is_renewed(node, 1, before["ranks"]), 60)
    assert node.attempt(1)["store_port"] == before["store_port"]
    forked = node.attempt(1)["ranks"]
    zygote = node.state["starter"]["pid"]
    os.kill(zygote, signal.SIGSTOP)
    node.prepare(2, store=True, wait=False)  # the zygote of the second version has been asked, and does not answer
    node.wait_for(lambda state: node.phase(2) == "preparing")
    configure(node, third)
    node.wait_for(lambda state: is_renewed(node, 1, forked) and node.phase(2) == "prepared", 60)
    assert node.state["starter"]["mode"] == "zygote" and node.state["starter"]["pid"] != zygote
    assert [run(node, attempt).split()[:2] for attempt in (1, 2)] == [["third", "True"]] * 2


def test_a_zygote_of_another_version_is_never_forked_from(start_node: StartNode, tmp_path: Path) -> None:
    """Also where the keeper should forget to replace it."""
    seam = tmp_path / "forgetful.py"
    seam.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2] / 'src')!r})\n"
        "from evertrain.keeper import main, starter\n"
        "starter.Starter.begin_anew = lambda self: None\n"
        "main.main(sys.argv[1])\n"
    )
    node = start_node(SCRIPT.format(name="in place"), start="zygote", command=(str(seam),))
    node.wait_for(lambda state: state["starter"]["state"] == "ready", 60)
    configure(node, version(tmp_path, "second"))
    node.prepare(1)
    assert node.state["starter"]["reason"] == (
        "the zygote is being started again: it has imported another version of the code"
    )
    assert run(node, 1).split()[:2] == ["second", "False"]


def test_the_command_line_of_a_rank_has_room_for_the_names_in_the_folder(start_node: StartNode, tmp_path: Path) -> None:
    text = "import json, sys; print({name!r}, json.dumps([sys.orig_argv, open('/proc/self/cmdline').read()]))"
    node = start_node(text.format(name="in place"), "--file=script.py", "x")
    node.prepare(1)
    before = node.attempt(1)["ranks"]
    code = version(tmp_path, "second", text)
    configure(node, code)
    node.wait_for(lambda state: is_renewed(node, 1, before))
    name, _, rest = run(node, 1).partition(" ")
    argv, shown = json.loads(rest)
    inside = f"{code['folder']}/script.py"
    assert (name, argv[1:]) == ("second", ["-u", inside, f"--file={inside}", "x"])
    assert shown.split("\0")[:-1] == argv
