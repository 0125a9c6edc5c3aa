"""How far has an attempt come, by what its ranks show and what the log has of it?"""

from __future__ import annotations

from evertrain.decide.picture import Picture
from evertrain.decide.state import Attempt


def steps(attempt: Attempt, picture: Picture) -> tuple[int | None, int]:
    """How far the attempt has come: the highest absolute step of any rank, and the highest relative one."""
    pages = picture.pages(attempt.number).values()
    absolute = [page.step for page in pages if page.step is not None]
    mark = attempt.progress
    if mark is not None and mark.step is not None:
        absolute.append(mark.step)
    relative = max((page.relative_step for page in pages), default=mark.relative_step if mark else 0)
    return max(absolute, default=None), relative
