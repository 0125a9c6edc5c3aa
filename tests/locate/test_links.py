"""What do connections say of the way between two ranks?"""

from __future__ import annotations

from evertrain.locate.links import Way, lossy
from evertrain.model.collectives import Flow


def way(source: int, target: int, *, resent: int) -> Way:
    sent = Flow(peer=target, sent=100_000, acked=96_000, resent=resent)
    return Way(source, target, sent, Flow(peer=target, sent=100_000, acked=100_000))


def test_what_had_to_be_sent_again_was_lost() -> None:
    found = lossy([way(0, 1, resent=3), way(0, 2, resent=2)], 8)
    assert found is not None and (found.component, found.ranks) == ("network", (0,))
    assert "rank 0 to rank 1: 4.0% of what was sent was not acknowledged (before: 0.0%)" in found.evidence


def test_what_is_only_on_its_way_was_not() -> None:
    assert lossy([way(0, 1, resent=0), way(0, 2, resent=0)], 8) is None
