"""Is what a node says now any news? What nobody has to act upon at once can wait for the next tick."""

from __future__ import annotations

from evertrain.model.report import NodeReport

_MATTERING = (
    "attempts", "keeper", "copies_after_attempt", "flushed_step", "starter", "env", "code",
    "code_failed", "comparisons",
    "transfer_port", "failed_fetches", "upload", "self_check", "signs", "unreachable",
    "gpus_held", "captured", "inspected", "replayed",
)  # fmt: skip
_OF_ROUNDS = ("pinned", "backups", "disk_tried", "refused")


def concerns_rounds(before: NodeReport, after: NodeReport) -> bool:
    return any(getattr(before, name) != getattr(after, name) for name in _OF_ROUNDS)


def matters(before: NodeReport, after: NodeReport) -> bool:
    """Whether anything changed that a rule could look at; a mere step forward can wait for the next tick."""
    if any(getattr(before, name) != getattr(after, name) for name in _MATTERING):
        return True
    if after.copies_after_attempt >= 0 and before.copies != after.copies:
        return True  # a copy has been fetched that a start waits for; while ranks save, lists change all the time
    marks = [(page.rank, page.attempt, page.resumed_time, page.passed_time) for page in after.pages]
    return marks != [(page.rank, page.attempt, page.resumed_time, page.passed_time) for page in before.pages]
