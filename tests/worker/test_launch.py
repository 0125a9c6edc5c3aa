"""From `go` to the end of the script, in real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from keeper.node import Node, user_environ

StartNode = Callable[..., Node]


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[StartNode]:
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(Node(tmp_path, *args, **options))


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """What Python itself makes of it."""
    return subprocess.run(
        [sys.executable, "-u", *words], cwd=folder, env=user_environ(), capture_output=True, text=True, timeout=30
    )


def record(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((node.rank_folder(1) / "exception.json").read_text())
    return found


def test_an_exception_is_recorded_with_the_users_own_line(start_node: StartNode, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import json\n\ndef load():\n    json.loads('{')\n\nload()\n")
    node = start_node("script.py")
    assert node.run() == {0: 1}
    found = record(node)
    assert (found["type"], found["module"], found["step"]) == ("JSONDecodeError", "json.decoder", 0)
    assert (found["file"], found["line"]) == (str(tmp_path / "script.py"), 4)
    assert found["message"].startswith("Expecting property name")
    assert found["traceback"] == node.output(1, 0, "err") == python(tmp_path, "script.py").stderr


def test_what_a_script_prints_in_a_group_is_what_python_prints(start_node: StartNode, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise ExceptionGroup('two', [ValueError(1), KeyError(2)])")
    node = start_node("script.py")
    assert node.run() == {0: 1}
    assert node.output(1, 0, "err") == python(tmp_path, "script.py").stderr


def test_the_users_own_excepthook_gets_the_users_own_traceback(start_node: StartNode, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys, traceback\n"
        "def hook(kind, error, trace):\n"
        "    print([frame.name for frame in traceback.extract_tb(trace)], sys.last_traceback is trace)\n"
        "sys.excepthook = hook\n"
        "1 / 0\n"
    )
    node = start_node("script.py")
    assert node.run() == {0: 1}
    assert node.output(1) == "['<module>'] True\n" == python(tmp_path, "script.py").stdout


@pytest.mark.parametrize(
    "text", ["import sys; sys.exit(5)", "raise SystemExit", "import sys; sys.exit('text')", "import os; os._exit(6)"]
)
def test_leaving_is_not_an_exception(start_node: StartNode, tmp_path: Path, text: str) -> None:
    (tmp_path / "script.py").write_text(text)
    node = start_node("script.py")
    expected = python(tmp_path, "script.py")
    assert node.run() == {0: expected.returncode}
    assert node.output(1, 0, "err") == expected.stderr
    assert not (node.rank_folder(1) / "exception.json").exists()


def test_an_interrupt_ends_by_the_signal(start_node: StartNode, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise KeyboardInterrupt")
    node = start_node("script.py")
    expected = python(tmp_path, "script.py")
    assert node.run() == {0: expected.returncode} == {0: -2}
    assert node.output(1, 0, "err") == expected.stderr


MAIN = "import sys; print(sys.argv, sys.path[0], __name__, __file__, __spec__ and __spec__.name, __package__)"


def in_a_folder(folder: Path) -> tuple[str, str]:
    (folder / "app").mkdir()
    (folder / "app" / "__main__.py").write_text(MAIN)
    return "script", "app"


def in_an_archive(folder: Path) -> tuple[str, str]:
    with zipfile.ZipFile(folder / "app.zip", "w") as archive:
        archive.writestr("__main__.py", MAIN)
    return "script", "app.zip"


def compiled(folder: Path) -> tuple[str, str]:
    import py_compile

    (folder / "script.py").write_text(MAIN)
    py_compile.compile(str(folder / "script.py"), str(folder / "script.pyc"))
    return "script", "script.pyc"


def in_another_encoding(folder: Path) -> tuple[str, str]:
    (folder / "script").write_bytes("# coding: latin-1\nprint('é', sys.argv) if 0 else None\n".encode("latin-1"))
    return "script", "./script"


def in_a_package(folder: Path) -> tuple[str, str]:
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "tool.py").write_text(MAIN)
    return "module", "package.tool"


def nowhere(folder: Path) -> tuple[str, str]:
    return "script", "no-such-script.py"


def nowhere_as_module(folder: Path) -> tuple[str, str]:
    return "module", "no.such.module"


@pytest.mark.parametrize(
    "make",
    [in_a_folder, in_an_archive, compiled, in_another_encoding, in_a_package, nowhere, nowhere_as_module],
    ids=lambda make: make.__name__,
)
def test_every_kind_of_script_runs_as_python_runs_it(
    start_node: StartNode, tmp_path: Path, make: Callable[[Path], tuple[str, str]]
) -> None:
    kind, target = make(tmp_path)
    expected = python(tmp_path, *(["-m"] if kind == "module" else []), target, "a", "b c")
    node = start_node(target, "a", "b c", kind=kind)
    assert node.run() == {0: expected.returncode}
    assert node.output(1) == expected.stdout
    assert node.output(1, 0, "err") == expected.stderr


def test_output_that_cannot_be_written_is_lost_and_the_rank_is_not(start_node: StartNode, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('lost'); open('done', 'w')")
    node = start_node("script.py")
    node.prepare(1)
    order = node.orders(1, 0, {}) | {"stdout": "/nowhere/out", "stderr": "/nowhere/err"}
    node.send(do="go", term=1, attempt=1, ranks={"0": order})
    node.wait_for(lambda state: node.phase(1) == "ended")
    assert node.rank(1)["exit"]["status"] == 0
    assert (tmp_path / "done").exists()


def test_a_script_is_read_at_go_not_before(start_node: StartNode, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('old')")
    node = start_node("script.py")
    node.prepare(1)
    (tmp_path / "script.py").write_text("print('new')")
    node.go(1)
    node.wait_for(lambda state: node.phase(1) == "ended")
    assert node.output(1) == "new\n"
