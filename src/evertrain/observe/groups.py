"""Which process groups has a rank made? The reader's side of `evertrain.worker.groups`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from evertrain.model.recording import Group

_MOST_BYTES = 16 << 20


def read_groups(path: Path) -> tuple[dict[str, Group], list[str]]:
    """The groups that a rank has written down, and why it cannot be asked as it could; nothing where it has not yet."""
    try:
        with path.open("rb") as file:
            lines = file.read(_MOST_BYTES).splitlines()
    except OSError:
        return {}, []
    return _parsed(lines)


def _parsed(lines: Iterable[bytes]) -> tuple[dict[str, Group], list[str]]:
    found: dict[str, Group] = {}
    blind = []
    for line in lines:
        try:
            said = msgspec.json.decode(line, type=_Line)
        except msgspec.MsgspecError:
            continue  # it is being written
        if said.blind:
            blind.append(said.blind)
        else:
            found[said.name] = Group(said.name, said.desc, said.ranks)
    return found, blind


class _Line(msgspec.Struct):
    name: str = ""
    desc: str = ""
    ranks: tuple[int, ...] = ()
    blind: str = ""
