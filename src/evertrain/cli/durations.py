"""How does a user write how long? A number and a unit, `90s`, `30m`, `24h`, `2d`: here it becomes seconds."""

from __future__ import annotations

import re

from evertrain.model.errors import UsageError

UNITS_S = {"ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LONGEST_S = 1000 * UNITS_S["d"]
_DURATION = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*")


def seconds(text: str) -> float | None:
    """None where it is no duration."""
    match = _DURATION.fullmatch(text)
    if match is None or match[2] not in UNITS_S:
        return None
    return float(match[1]) * UNITS_S[match[2]]


def of_flag(flag: str, text: str, *, at_once: str) -> float:
    """What was given with a flag; `at_once` is the flag for those who mean no time at all."""
    found = seconds(text)
    if found is None and text.isascii() and text.isdigit():
        if int(text):
            raise UsageError(f"{flag} {text}: of what? As 90s, 30m, 24h or 2d")
        found = 0.0
    if found is None and text.startswith("-") and seconds(text[1:]) is not None:
        raise UsageError(f"{flag} {text}: it cannot be negative")
    if found is None:
        raise UsageError(f"{flag} {text}: not a duration, as 90s, 30m, 24h or 2d")
    if found == 0:
        raise UsageError(f"{flag} {text}: what is to come at once is {at_once}")
    if found > LONGEST_S:
        raise UsageError(f"{flag} {text}: at most {LONGEST_S / UNITS_S['d']:.0f}d")
    return found
