"""A knob that nobody reads would lie to the user who turns it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

import evertrain
from evertrain.model import config

SOURCES = Path(evertrain.__file__).parent


def knobs(settings: msgspec.Struct) -> Iterator[str]:
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if isinstance(value, msgspec.Struct):
            yield from knobs(value)
        else:
            yield name


def test_every_knob_is_read_by_something() -> None:
    code = "\n".join(file.read_text() for file in SOURCES.rglob("*.py") if file != Path(config.__file__))
    idle = [name for name in knobs(config.Config()) if not re.search(rf"\.{name}\b", code)]
    assert idle == []
