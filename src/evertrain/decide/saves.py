"""What follows from saves that fail? One of them nothing: the next one tries again. Many in a row are an incident.

Nobody is ended for it: training goes on, with ever more steps at risk, and somebody should make room.
"""

from __future__ import annotations

from evertrain.decide import incidents
from evertrain.decide.blame import Blame
from evertrain.decide.picture import Picture
from evertrain.decide.state import Attempt, JobState
from evertrain.model import records as r
from evertrain.model.records import AnyRecord


def look(
    state: JobState, picture: Picture, attempt: Attempt, step: int | None, limit: int, now: float
) -> list[AnyRecord]:
    """An incident where some rank has not saved anything `limit` times in a row; it is over when all save again."""
    pages = picture.pages(attempt.number)
    failing = [rank for rank, page in sorted(pages.items()) if page.saves_failed >= limit]
    open_one = state.tolerated if state.tolerated is not None and state.tolerated.opened.source == "saves" else None
    if open_one is not None:
        if failing or len(pages) < len(attempt.started.placement):
            return []
        return [r.IncidentClosed(time=now, incident=open_one.number, first_new_step=step, passed_time=now)]
    known = any(
        one.opened.attempt == attempt.number and one.opened.source == "saves" for one in state.incidents.values()
    )
    if not failing or known or state.incident is not None:
        return []
    nodes = tuple(dict.fromkeys(attempt.started.placement[rank] for rank in failing))
    verdict = Blame(
        source="saves",
        fault_time=now,
        cause="checkpoints are not saved",
        category="storage",
        ranks=tuple(failing),
        nodes=nodes,
        evidence=tuple(
            f"rank {rank} on {attempt.started.placement[rank]}: {pages[rank].saves_failed} saves in a row have failed; "
            "its output says why"
            for rank in failing[:8]
        ),
    )
    return incidents.watch(state, attempt, verdict, step, now)
