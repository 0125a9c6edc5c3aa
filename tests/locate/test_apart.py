"""Who stands out?"""

from __future__ import annotations

import pytest

from evertrain.locate.apart import apart


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((76.4, 10.3, 9.0, 1.0), (0,)),
        ((18.0, 17.0, 3.0, 2.9), (0, 1)),
        ((1.0, 3.0, -2.0), (1,)),
        ((18.6, 11.4, 10.3, 9.7, 7.3, 6.0, 5.0, 4.0), tuple(range(8))),
        ((0.5,), (0,)),
        ((), ()),
    ],
)
def test_those_far_above_the_next(values: tuple[float, ...], expected: tuple[int, ...]) -> None:
    """... and all of them where it goes down from one to the next: on a machine with too many at work."""
    assert apart(dict(enumerate(values))) == expected
