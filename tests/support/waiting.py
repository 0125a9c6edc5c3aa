"""How does a test wait for something another process does? Always with a deadline that says what was missing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Seen = TypeVar("Seen")


def eventually(
    look: Callable[[], Seen],
    what: str,
    *,
    within_s: float = 30.0,
    every_s: float = 0.05,
    story: Callable[[], str] = lambda: "",
) -> Seen:
    """Look again and again until `look` returns something true, and return that.

    After the deadline the error says `what` was missing and, by `story`, what happened instead.
    """
    deadline = time.monotonic() + within_s
    while not (seen := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what}\n{story()}".rstrip())
        time.sleep(every_s)
    return seen
