"""The catalogue: each rule knows its own examples, and words are found in patterns."""

from __future__ import annotations

import pytest

from evertrain.detect.catalogue import Rule, build
from evertrain.detect.gate import words_of
from evertrain.model.errors import UsageError
from evertrain.model.signals import Line
from evertrain.observe import rules

CATALOGUE = build(rules.contents())


def line(text: str) -> Line:
    return Line(text=text, raw=text, order=1)


@pytest.mark.parametrize("rule", CATALOGUE.rules, ids=[rule.rule for rule in CATALOGUE.rules])
def test_a_rule_knows_its_examples(rule: Rule) -> None:
    look = CATALOGUE.look_at if rule.where == "lines" else CATALOGUE.look_at_metric
    assert rule.examples
    for example in rule.examples:
        assert rule.rule in [found.rule for found in look(line(example))], example


@pytest.mark.parametrize(
    "text",
    [
        "iteration 7/ 100 | lm loss: 2.1E+00 | grad norm: 0.1 | skipped iterations: 0 | number of nan iterations: 0 |",
        "node-1:2:3 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM",
        "node-1:2:3 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>",
        "INFO:root:saved checkpoint at step 100 in 12.1 s",
        "[2026-01-01 10:00:00] INFO epoch 3 finished, validation loss 1.2",
        "DEBUG: DataLoader prefetch queue 7/8",
    ],
)
def test_ordinary_lines_mean_nothing(text: str) -> None:
    assert CATALOGUE.look_at(line(text)) == []


def test_a_later_rule_replaces_one_of_the_same_name() -> None:
    rule = {"rule": "cuda-oom", "pattern": "CUDA out of memory", "category": "data", "action": "human", "confidence": 1}
    catalogue = build([*rules.contents(), ([rule], "mine")])
    (found,) = [one for one in catalogue.look_at(line("CUDA out of memory")) if one.rule == "cuda-oom"]
    assert found.category == "data"


def test_a_group_can_be_left_out() -> None:
    assert not CATALOGUE.without(["memory"]).look_at(line("CUDA out of memory"))


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(UsageError, match="rule x"):
        build(
            [
                (
                    [
                        {
                            "rule": "x",
                            "pattern": "abc",
                            "category": "data",
                            "action": "none",
                            "confidence": 1,
                            "colour": 2,
                        }
                    ],
                    "m",
                )
            ]
        )


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("out of memory", ("out of memory",)),
        ("A failed|B (?:x|y) lost", ("a failed", " lost")),
        (r"code \d+ at", ("code ",)),
        ("abou?rers", ("rers",)),
        (r"\[Errno 28\]", ("[errno 28]",)),
        ("[abc]def+g", ("def",)),
        (r"x{2}\w*yes no", ("yes no",)),
    ],
)
def test_words_stand_in_every_match(pattern: str, words: tuple[str, ...]) -> None:
    assert words_of(pattern) == words


def test_a_pattern_without_words_is_refused() -> None:
    with pytest.raises(ValueError, match="name its words"):
        words_of(r"abc|\d+")
