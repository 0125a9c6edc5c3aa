"""What is asked of groups of nodes that replay the job, and what do they give? The words of it, and what the log says.

In a round some groups replay the job's own script at the same time, each as a job of its own (`decide.replaying`);
which groups, and what their results come to, is said by `locate.replay`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from evertrain.model.record import Record

Phase = Literal["horizontal", "vertical", "retest", "control"]


class Group(msgspec.Struct, frozen=True):
    """Nodes that replay the job together."""

    phase: Phase
    number: int
    """Of the group in its phase; in a re-test the position of the node that is tried."""
    nodes: tuple[str, ...]


class ReplaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `evertrain.replay_config()` tells the script; the same for all groups of all rounds."""

    layers: int | None
    """None: all of them."""
    dp: int
    """Replicas of the model in a group."""
    steps: int
    from_step: int | None
    seed: int


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of one node have given so far."""

    round: int
    digests: dict[int, str]
    """By rank in the group; of those whose steps are done."""


class ReplayAsked(Record, frozen=True, kw_only=True):
    """Groups of stopped nodes are to replay the job."""

    round: int
    """Its number, over all runs of the job."""
    incident: int
    nodes: tuple[str, ...]
    """All that take part in this replay, in the order of their ranks."""
    nodes_per_replica: int
    repeats: int
    groups: tuple[Group, ...]
    settings: ReplaySettings
    limit_s: float


class ReplayDone(Record, frozen=True, kw_only=True):
    """All groups have given something, or their time is up."""

    round: int
    incident: int
    digests: tuple[str | None, ...]
    """In the order of the groups; None: no whole result."""
    because: tuple[str, ...]
    """Why there is none; empty where there is one."""
