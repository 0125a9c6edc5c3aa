"""docs/decisions.md promises functions, tests and defaults: they are there, and they are so."""

from __future__ import annotations

import re
from pathlib import Path

from evertrain.decide import eviction, failures, ladder
from evertrain.model.config import Config, LadderConfig

HERE = Path(__file__).parent
DOC = (HERE.parent.parent / "docs" / "decisions.md").read_text()
ARROWS = re.findall(r"^\| (\d+) \| `(\w+)\.(\w+)` \| `(\w+)` \|$", DOC, re.MULTILINE)
DEFAULTS = dict(re.findall(r"^\| `(\w+\.\w+)` \| (\S+) \|", DOC, re.MULTILINE))


def test_every_arrow_names_a_function_and_a_test_that_there_are() -> None:
    drawn = {int(number) for number in re.findall(r"\((\d+)\)", DOC.split("| | function")[0])}
    assert drawn == {int(number) for number, *_ in ARROWS} == set(range(1, max(drawn) + 1))
    tests = "".join((HERE / name).read_text() for name in ("test_ladder.py", "test_eviction.py"))
    modules = {"eviction": eviction, "failures": failures, "ladder": ladder}
    for _, module, function, test in ARROWS:
        assert callable(getattr(modules[module], function))
        assert f"def {test}(" in tests


def test_the_documented_defaults_are_those_of_the_configuration() -> None:
    config = Config()
    for key, documented in DEFAULTS.items():
        topic, name = key.split(".")
        assert str(getattr(getattr(config, topic), name)) == documented, key
    assert {f"ladder.{name}" for name in LadderConfig.__struct_fields__} <= DEFAULTS.keys()


def test_every_setting_that_the_text_names_exists() -> None:
    for topic, name in re.findall(r"`(ladder|restart|hang)\.(\w+)`", DOC.split("All in `src")[1]):
        assert hasattr(getattr(Config(), topic), name)
