"""One pass over lines: whatever the pieces, and within bounds."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from evertrain.detect.catalogue import Catalogue, Rule
from evertrain.detect.sieve import MAX_ALIKE, MAX_EACH, MAX_LINE, Sieve
from evertrain.model.findings import Finding

CATALOGUE = Catalogue(
    [
        Rule(
            rule="burnt",
            pattern="card is burnt",
            category="gpu_hardware",
            action="evict",
            culprit="host",
            confidence=0.9,
        )
    ]
)
TEXT = (
    b"step 1\n"
    b"node-3: the CARD is burnt\n"
    b"[rank4]: Traceback (most recent call last):\n"
    b"step 2\n"
    b"[rank5]: Traceback (most recent call last):\n"
    b'[rank4]:   File "/home/u/a.py", line 3, in f\n'
    b'[rank5]:   File "/home/u/b.py", line 4, in g\n'
    b"[rank5]: ValueError: five\n"
    b"[rank4]: KeyError: 'four'\n"
    b"[9.1] NVRM: Xid (PCI:0000:19:00): 79, GPU has fallen off the bus."
)


def findings(*pieces: bytes) -> tuple[Finding, ...]:
    sieve = Sieve(CATALOGUE)
    sieve.begin("job.log", host="node-1")
    for piece in pieces:
        sieve.feed(piece)
    sieve.end()
    return sieve.findings(exitcode=None, host=None)


def test_what_lines_say() -> None:
    found = {one.rule: one for one in findings(TEXT)}
    assert found["burnt"].evidence == ("job.log:2: node-3: the CARD is burnt",)
    assert found["burnt"].host == "node-3"
    assert found["xid-79"].culprit.id == "node-1/0000:19:00"


def test_tracebacks_of_mixed_ranks_are_joined() -> None:
    found = {one.rank: one for one in findings(TEXT) if one.group == "tracebacks"}
    assert found[4].evidence[0] == "/home/u/a.py:3 in f"
    assert found[5].evidence[0] == "/home/u/b.py:4 in g"


@given(st.lists(st.integers(0, len(TEXT)), max_size=12))
@settings(deadline=None)
def test_where_pieces_end_does_not_matter(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(TEXT)]
    pieces = [TEXT[start:end] for start, end in pairwise(bounds)]
    assert findings(*pieces) == findings(TEXT)


def test_a_line_without_an_end_costs_its_beginning_only() -> None:
    sieve = Sieve(CATALOGUE)
    sieve.begin("job.log")
    sieve.feed(b"node-3: the card is burnt ")
    for _ in range(100):
        sieve.feed(b"x" * 1_000_000)
        assert len(sieve._rest) <= 5 * MAX_LINE
    sieve.feed(b"\nnode-4: the card is burnt\n")
    sieve.end()
    found = sieve.findings(exitcode=None, host=None)
    assert [(one.host, one.evidence[0][:10]) for one in found] == [("node-3", "job.log:1:"), ("node-4", "job.log:2:")]
    assert len(found[0].evidence[0]) < 2 * MAX_LINE


def test_a_flood_of_one_error_is_bounded() -> None:
    sieve = Sieve(CATALOGUE)
    sieve.begin("job.log")
    sieve.feed(b"node-3: the card is burnt\n" * (MAX_EACH + 500))
    sieve.end()
    assert len(sieve.findings(exitcode=None, host=None)) == MAX_EACH


def test_lines_that_nobody_wants_are_not_looked_at() -> None:
    sieve = Sieve(CATALOGUE)
    sieve.begin("job.log")
    sieve.feed(b"iteration 7 | lm loss: 2.1 | grad norm: 0.1\n" * 1000)
    sieve.end()
    assert (sieve.lines, sieve.looked) == (1000, 0)


def test_a_flood_of_lines_that_differ_in_numbers_only_ends_to_be_looked_at() -> None:
    sieve = Sieve(CATALOGUE)
    sieve.begin("job.log")
    sieve.feed(b"".join(b"node-3: the card is burnt, block [%d,0,0]\n" % n for n in range(MAX_ALIKE + 1000)))
    sieve.feed(b"node-4: this card is burnt too: the card is burnt\n")
    sieve.end()
    assert sieve.looked == MAX_ALIKE + 1
    assert sieve.lines == MAX_ALIKE + 1001
