"""What does a program call at this place every time, and has it called something else this once?

Training repeats itself: what a rank calls after the same operations as before is known from its own past. Where it
departs from that and its peers do not, it has left something out, or has changed the order. The past says so without a
majority, which two ranks that wait for each other do not have.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

Call = TypeVar("Call", bound=Hashable)

_LOOKED_AT = 4_000
"""Calls, the newest ones."""
_LAST_PLACES = 64
"""Departures further back are over: nobody waits for them any more."""
_CONTEXTS = (32, 8, 4)
"""So many calls before make a place; the longest of these lengths that was seen before tells best."""


def departures(calls: Sequence[Call]) -> Iterator[tuple[int, Call]]:
    """Newest first: (index of a call, what has always been called at such a place until then instead)."""
    cut = max(len(calls) - _LOOKED_AT, 0)
    kinds: dict[Call, int] = {}
    numbers = [kinds.setdefault(call, len(kinds)) for call in calls[cut:]]
    found: list[tuple[int, int]] = []
    seen: list[tuple[int, dict[tuple[int, ...], set[int]]]] = [(length, {}) for length in _CONTEXTS]
    for at, number in enumerate(numbers):
        is_settled = at < len(numbers) - _LAST_PLACES
        for length, followers in seen:
            if at < length:
                continue
            usual = followers.setdefault(tuple(numbers[at - length : at]), set())
            if usual and not is_settled:
                is_settled = True
                if number not in usual and len(usual) == 1:
                    found.append((at, next(iter(usual))))
            usual.add(number)
    by_number = list(kinds)
    return ((at + cut, by_number[number]) for at, number in reversed(found))
