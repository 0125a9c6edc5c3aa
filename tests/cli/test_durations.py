"""What is a duration, and what is said of what is none."""

from __future__ import annotations

import pytest

from evertrain.cli import durations
from evertrain.model.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90.0), ("30m", 1800.0), ("30 min", 1800.0), ("24h", 86400.0), ("2d", 172800.0), ("1.5h", 5400.0)],
)
def test_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert durations.of_flag("--within", text, at_once="--urgent") == seconds


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "--within : not a duration, as 90s, 30m, 24h or 2d"),
        ("x", "--within x: not a duration, as 90s, 30m, 24h or 2d"),
        ("-3h", "--within -3h: it cannot be negative"),
        ("-3y", "--within -3y: not a duration, as 90s, 30m, 24h or 2d"),
        ("1y", "--within 1y: not a duration, as 90s, 30m, 24h or 2d"),
        ("inf", "--within inf: not a duration, as 90s, 30m, 24h or 2d"),
        ("24", "--within 24: of what? As 90s, 30m, 24h or 2d"),
        ("0", "--within 0: what is to come at once is --urgent"),
        ("0h", "--within 0h: what is to come at once is --urgent"),
        ("1001d", "--within 1001d: at most 1000d"),
    ],
)
def test_nonsense_is_one_clear_line(text: str, line: str) -> None:
    with pytest.raises(UsageError) as refused:
        durations.of_flag("--within", text, at_once="--urgent")
    assert str(refused.value) == line
