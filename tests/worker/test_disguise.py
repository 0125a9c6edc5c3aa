"""What others see of a process that was started ahead."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"


def run(body: str, *argv: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run `body` as the keeper's bootstrap is run, with the real standard input at descriptor `real`."""
    with tempfile.TemporaryFile() as real:
        real.write(stdin)
        real.seek(0)
        start = f"import os, sys; sys.path[0], real = {str(SRC)!r}, {real.fileno()}\n"
        start += "from evertrain.worker import disguise\n"
        return subprocess.run(
            [sys.executable, "-u", *(argv or ("-",))],
            input=(start + body).encode(),
            capture_output=True,
            pass_fds=[real.fileno()],
            timeout=30,
            check=True,
        )


@pytest.mark.parametrize(
    ("words", "shown"),
    [(["python", "-u", "a"], ["python", "-u", "a"]), (["python", "x" * 5000], ["python", "x"])],
)
def test_a_command_line_fills_its_area_and_never_leaves_it(words: list[str], shown: list[str]) -> None:
    out = run(
        f"before = open('/proc/self/cmdline', 'rb').read()\ndisguise.show_command_line({words!r})\n"
        "after = open('/proc/self/cmdline', 'rb').read()\n"
        "assert len(after) == len(before), (before, after)\nsys.stdout.buffer.write(after)",
        "-",
        "padding",
    ).stdout
    assert out.endswith(b"\0")
    found = out.rstrip(b"\0").split(b"\0")
    assert [word.decode()[: len(start)] for word, start in zip(found, shown, strict=True)] == shown


def test_standard_input_is_the_real_one(tmp_path: Path) -> None:
    body = "disguise.take_stdin(real)\nprint(input(), sys.stdin.name, sys.stdin.mode, sys.stdin is sys.__stdin__)\n"
    rest = "print(os.read(0, 100), os.path.exists(f'/proc/self/fd/{real}'))"
    expected = b"first <stdin> r True\nb'' False\n"
    assert run(body + rest, stdin=b"first\nsecond\n").stdout == expected


def test_a_process_gets_another_name() -> None:
    out = run("disguise.name_process('a name that is too long')\nprint(open('/proc/self/comm').read())").stdout
    assert out == b"a name that is \n\n"


def test_a_child_without_its_parent_ends_at_once() -> None:
    out = run(
        "told, tell = os.pipe()\nif os.fork() == 0:\n    disguise.die_with_parent(1)\n    os.write(tell, b'alive')\n"
        "    os._exit(0)\nos.close(tell)\nprint(os.read(told, 10), os.wait()[1])"
    ).stdout
    assert out == (b"b'' 0\n" if os.getpid() != 1 else out)
