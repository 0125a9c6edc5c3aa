"""The command line that a waiting process has room for."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.keeper.interpreter import command_line, disguised

WORDS = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=60)


def size(words: list[str]) -> int:
    return sum(len(os.fsencode(word)) + 1 for word in words)


@given(target=WORDS.filter(bool), args=st.lists(WORDS, max_size=5), kind=st.sampled_from(["script", "module"]))
def test_there_is_exactly_as_much_room_as_the_real_command_line_needs(target: str, args: list[str], kind: str) -> None:
    real = command_line("/usr/bin/python3", {"kind": kind, "target": target, "args": args})
    assert size(disguised(real)) == size(real)
    assert disguised(real)[:3] == ["/usr/bin/python3", "-u", "-"]


@pytest.mark.parametrize("target", ["a", "ab", "abc", "ü"])
def test_short_names(target: str) -> None:
    real = command_line("python", {"kind": "script", "target": target, "args": []})
    assert size(disguised(real)) == size(real)


def test_command_lines_are_torchruns() -> None:
    command = {"target": "train", "args": ["-x", "1"]}
    assert command_line("py", command | {"kind": "script"}) == ["py", "-u", "train", "-x", "1"]
    assert command_line("py", command | {"kind": "module"}) == ["py", "-u", "-m", "train", "-x", "1"]
    assert command_line("py", command | {"kind": "program"}) == ["train", "-x", "1"]
