"""A rank's log while it is written: findings once each, bounded whatever comes, nothing lost at a line's end."""

import time
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from evertrain.detect.catalogue import Catalogue, Rule
from evertrain.detect.stream import Stream, StreamConfig
from evertrain.model.findings import Finding

RULES = Catalogue(
    [
        Rule(
            rule="melted",
            pattern="reactor melted",
            category="gpu_hardware",
            action="evict",
            confidence=0.9,
            culprit="host",
        ),
        Rule(rule="numbered", pattern=r"numbered fault \d+", category="storage", action="storage", confidence=0.6),
    ]
)
TRACEBACK = (
    b'Traceback (most recent call last):\n  File "/home/u/train.py", line 5, in main\n    x = d["k"]\nKeyError: \'k\'\n'
)


def stream(**config: float) -> Stream:
    settings = StreamConfig(**config) if config else None  # type: ignore[arg-type]
    return Stream(RULES, rank=3, host="node-1", source="rank3.log", config=settings)


def rules(found: tuple[Finding, ...]) -> list[str]:
    return [one.rule for one in found]


def test_a_finding_knows_its_rank_host_and_line() -> None:
    (found,) = stream().feed(b"all is well\nthe reactor melted\n", 0.0)
    assert (found.rule, found.rank, found.host) == ("melted", 3, "node-1")
    assert found.evidence == ("rank3.log:2: the reactor melted",)


def test_it_is_said_once() -> None:
    one = stream()
    assert rules(one.feed(b"the reactor melted\n", 0.0)) == ["melted"]
    assert one.feed(b"all is well\n", 1.0) == () and one.settle(5.0) == () and one.end(6.0) == ()


def test_lines_may_come_in_pieces() -> None:
    one = stream()
    assert one.feed(b"the reac", 0.0) == () and one.feed(b"tor mel", 0.1) == ()
    assert rules(one.feed(b"ted\n", 0.2)) == ["melted"]


def test_last_words_without_an_end_are_taken_after_a_silence() -> None:
    one = stream(settle_s=1.0)
    assert one.feed(b"the reactor melted", 0.0) == () and one.settle(0.9) == ()
    assert rules(one.settle(1.0)) == ["melted"]


def test_last_words_are_taken_at_the_end() -> None:
    one = stream()
    assert one.feed(b"the reactor melted", 0.0) == ()
    assert rules(one.end(0.1)) == ["melted"]


def test_an_error_on_the_line_of_a_progress_bar() -> None:
    (found,) = stream().feed(b"step 1 of 9\rstep 2 of 9\rthe reactor melted\r\n", 0.0)
    assert found.evidence == ("rank3.log:3: the reactor melted",)


def test_an_end_of_two_characters_in_two_pieces_is_one_end() -> None:
    one = stream()
    one.feed(b"well\r", 0.0)
    (found,) = one.feed(b"\nthe reactor melted\n", 0.1)
    assert found.evidence == ("rank3.log:2: the reactor melted",)


def test_a_traceback_in_pieces_is_joined() -> None:
    one = stream()
    found = [item for at in range(0, len(TRACEBACK), 7) for item in one.feed(TRACEBACK[at : at + 7], at / 1000)]
    found += one.end(9.0)
    (error,) = [item for item in found if item.category == "user_code"]
    assert any("/home/u/train.py:5" in line for line in error.evidence)


def test_rotation_begins_to_count_anew_and_keeps_what_was_open() -> None:
    one = stream()
    one.feed(b"1\n2\nthe reactor melted", 0.0)
    assert rules(one.rotated(0.1)) == ["melted"]
    (found,) = one.feed(b"numbered fault 7\n", 1.0)
    assert found.evidence == ("rank3.log:1: numbered fault 7",)


def test_one_rule_says_no_more_than_its_share_and_counts_the_rest() -> None:
    one = stream(same_rule=3, window_s=60.0, judge_every_s=0.0)
    found = [item for at in range(10) for item in one.feed(b"numbered fault %d\n" % at, at * 0.1)]
    assert len(found) == 3
    (later,) = one.feed(b"numbered fault 99\n", 100.0)
    assert "7 more like it" in later.note


def test_a_flood_is_cut_but_its_end_is_seen() -> None:
    one = stream(bytes_per_s=1000, burst_bytes=20_000, tail_bytes=1000)
    flood = b"all is well\n" * 100_000 + b"the reactor melted\n"
    assert rules(one.feed(flood, 0.0)) == ["melted"]
    assert one.skipped_bytes > 1_000_000


def test_errors_in_a_loop_cost_little() -> None:
    one = stream()
    began = time.process_time()
    for at in range(50):
        one.feed(b"numbered fault 1\n" * 20_000, at * 0.1)
    assert time.process_time() - began < 5
    assert one.skipped_bytes > 10_000_000


def test_a_line_of_100_megabytes_needs_no_memory_and_hides_nothing_behind_it() -> None:
    one = stream(bytes_per_s=1_000_000_000, burst_bytes=1_000_000_000)
    piece = b"x" * 1_000_000
    tracemalloc.start()
    try:
        for at in range(100):
            assert one.feed(piece, at * 0.1) == ()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000
    assert rules(one.feed(b"\nthe reactor melted\n", 11.0)) == ["melted"]


def test_memory_does_not_grow_with_what_was_seen() -> None:
    one = stream(lines_per_s=1e6, burst_lines=1e6, judge_every_s=0.0, lines_kept=100)
    tracemalloc.start()
    try:
        sizes = []
        for at in range(3000):
            one.feed(b"numbered fault %d\n" % at, at * 1.0)
            if at in (1000, 2999):
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert sizes[1] < sizes[0] + 300_000


def test_a_clock_that_goes_back_is_survived() -> None:
    one = stream(judge_every_s=0.0)
    one.feed(b"all is well\n", 0.0)
    assert rules(one.feed(b"the reactor melted\n", -5.0)) == ["melted"]


@given(st.lists(st.binary(max_size=60), max_size=12))
def test_any_bytes_are_taken(pieces: list[bytes]) -> None:
    one = stream()
    for at, piece in enumerate(pieces):
        one.feed(piece, float(at))
    one.end(100.0)


@given(st.lists(st.integers(1, 40), max_size=20))
def test_where_pieces_end_does_not_matter(lengths: list[int]) -> None:
    text = b"well\r\nthe reactor melted\nstep\rnumbered fault 1\r\n\nnumbered fault 2\n"
    at_once = stream(judge_every_s=0.0)
    whole = {(item.rule, item.evidence) for item in at_once.feed(text, 0.0) + at_once.end(1.0)}
    assert len(whole) == 3
    one, at, found = stream(judge_every_s=0.0), 0, set()
    for length in [*lengths, len(text)]:
        found |= {(item.rule, item.evidence) for item in one.feed(text[at : at + length], 0.0)}
        at += length
    assert found | {(item.rule, item.evidence) for item in one.end(1.0)} == whole
