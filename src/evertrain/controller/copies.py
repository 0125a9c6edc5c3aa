"""Where do copies of checkpoints go, and which do nodes lack? What is thought over seldom, kept for every order.

`decide.rounds` has the rules of a round of backups, `decide.starting` those of what a start needs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from evertrain.checkpoint import placement
from evertrain.decide import rounds, starting
from evertrain.decide.picture import Picture
from evertrain.decide.rounds import Placed, Rounds, Shard
from evertrain.decide.state import JobState
from evertrain.model.copies import Fetch, RoundOrder, Save
from evertrain.model.spec import ControllerSpec

_REST_FACTOR = 10
"""What takes long with very many ranks is done for a tenth of the time at most."""


class Copies:
    """Of one job."""

    def __init__(self, spec: ControllerSpec) -> None:
        self._config = spec.config
        self._mesh = tuple(placement.groups_of(spec.mesh)) if spec.mesh is not None else ()
        self._rounds = Rounds()
        self._placed: tuple[object, tuple[Placed, ...]] | None = None
        self._fetches: dict[str, tuple[Fetch, ...]] = {}
        self._next_choice = 0.0

    def advance(self, state: JobState, picture: Picture, now: float) -> None:
        """The round of backups goes on as far as reports allow."""
        config = self._config.checkpoint
        self._rounds = rounds.advance(self._rounds, state, picture, config, self._place, self._mesh, now)

    def order(self, node: str, *, has_ranks: bool, pinned: Save | None) -> RoundOrder | None:
        """What a node is to do for the round; `pinned` stays in any case."""
        return rounds.order(self._rounds, node, self._config.checkpoint, has_ranks=has_ranks, pinned=pinned)

    def fetches(self, state: JobState, picture: Picture) -> dict[str, tuple[Fetch, ...]]:
        """What nodes lack; not thought over with every word that one of thousands of nodes says."""
        if not starting.may_fetch(state, picture):
            self._fetches = {}
        elif (began := time.monotonic()) >= self._next_choice:
            self._fetches = starting.fetches(state, picture, self._config)
            self._next_choice = began + _REST_FACTOR * (time.monotonic() - began)
        return self._fetches

    def _place(
        self, shards: tuple[Shard, ...], node_of: Mapping[int, str], groups: rounds.Groups
    ) -> tuple[Placed, ...]:
        """Where backups go; thought over once for as long as the shards are of the same kind."""
        asked = (shards, dict(node_of), groups)
        if self._placed is None or self._placed[0] != asked:
            plan = placement.plan([placement.Shard(one.name, one.owners, one.bytes) for one in shards], node_of, groups)
            self._placed = (asked, tuple(Placed(backup.holder, backup.source) for backup in plan.backups))
        return self._placed[1]
