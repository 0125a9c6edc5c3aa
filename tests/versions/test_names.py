"""Names of somebody else's, judged and shown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evertrain.versions import names
from support.effort import examples


@pytest.mark.parametrize("path", ["a", "a/b.py", "..a", "a..", "...", "\u00e4/\u4e2d", "a b", "~", "-rf", "a\u200bb"])
def test_good_ones(path: str) -> None:
    assert names.problem(path) == ""


@pytest.mark.parametrize(
    "path", ["", "/", "/a", "a/", "a//b", ".", "..", "a/..", "a/./b", "\0", "a\x85b", "\udc80", "a\\b"]
)
def test_bad_ones(path: str) -> None:
    assert names.problem(path)


@settings(max_examples=examples(40), deadline=None)
@given(st.text())
def test_anything_is_shown_in_one_line(text: str) -> None:
    shown = names.shown(text)
    assert shown.isprintable() and len(shown.splitlines()) <= 1 and len(shown) <= 120
    shown.encode()


def test_a_good_name_is_shown_as_it_is() -> None:
    assert names.shown("\u00e4/b c.py") == "\u00e4/b c.py"
    assert names.shown("a\nb\x1b") == "a\\nb\\x1b"
    assert len(names.shown("x" * 500)) == 120
