"""What do the agents say now? The newest report of each node, and whether the node can be heard.

A picture is not remembered: after a controller takes over it is empty until the agents have spoken again, and nothing
is decided about a node that has not.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from evertrain.model.activity import RankActivity
from evertrain.model.report import AttemptReport, NodeReport, PageReport


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A step that the shared store has."""

    folder: str
    attempt: int
    step: int
    world_size: int
    life: float
    """When the life of the job began that stored it."""


class NodePicture(msgspec.Struct, frozen=True):
    report: NodeReport
    connected: bool
    since: float
    """Wall time of the last connect or disconnect."""


class Picture(msgspec.Struct, frozen=True):
    nodes: dict[str, NodePicture] = {}
    stored: tuple[Stored, ...] | None = None
    """What lies in the shared store, oldest first; None: nobody has looked yet."""
    problems: tuple[str, ...] = ()
    """The controller's own, one line each."""

    def report(self, node: str) -> NodeReport | None:
        seen = self.nodes.get(node)
        return seen.report if seen is not None else None

    def connected(self, node: str) -> bool:
        seen = self.nodes.get(node)
        return seen is not None and seen.connected

    def attempt(self, node: str, number: int) -> AttemptReport | None:
        report = self.report(node)
        if report is None:
            return None
        return next((attempt for attempt in report.attempts if attempt.attempt == number), None)

    def stuck(self, number: int) -> frozenset[int]:
        """Ranks of one attempt that sleep in the kernel, SIGKILL notwithstanding: they never run a line again."""
        reports = (self.attempt(node, number) for node in self.nodes)
        return frozenset(rank.rank for seen in reports if seen for rank in seen.ranks if rank.state == "stuck")

    def activities(self, placement: dict[int, str], now: float) -> list[RankActivity]:
        """Ranks that stand still, of nodes that can be heard, and for no longer than every node has been heard.

        While a link was down its two ends could not move; when it is back they need their time to find each other.
        """
        nodes = [node for node in dict.fromkeys(placement.values()) if self.connected(node)]
        longest_s = now - max((self.nodes[node].since for node in nodes), default=now)
        return [
            replace(one, still_s=min(one.still_s, longest_s))
            for node in nodes
            for one in self.nodes[node].report.activities
        ]

    def pages(self, number: int) -> dict[int, PageReport]:
        """The pages of one attempt, by rank."""
        return {page.rank: page for seen in self.nodes.values() for page in seen.report.pages if page.attempt == number}
