"""What a rank has written reaches the terminal as text, never as orders to it."""

from __future__ import annotations

import io

from evertrain.cli import tables
from evertrain.cli.plain import plain

EVIL = "a\x1b[2Jb\x07\x9bc"
SHOWN = r"a\x1b[2Jb\x07\x9bc"


def test_letters_stay_and_orders_are_written_out() -> None:
    assert plain("größer 你好") == "größer 你好"
    assert plain(EVIL) == SHOWN
    assert plain("one\n\ttwo") == "one\n\ttwo"
    assert plain("one\ntwo", kept="") == r"one\ntwo"


def test_lines_and_tables() -> None:
    out = io.StringIO()
    console = tables.console(out)
    console.print(EVIL)
    row = {"id": 1, "attempt": 1, "ranks": [1], "nodes": ["n"], "cause": EVIL, "action": "none", "step": None}
    console.print(tables.incidents([{**row, "seconds": dict.fromkeys(tables.PHASES)}]))
    assert out.getvalue().count(SHOWN) == 2
    assert "\x1b" not in out.getvalue()
