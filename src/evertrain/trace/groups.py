"""Which communicators is a rank a member of? As it has written them down beside its page (`worker.groups`)."""

from __future__ import annotations

import json
from pathlib import Path

from evertrain.model.windows import TracedGroup

_MOST_BYTES = 16 << 20


def read(path: Path) -> list[TracedGroup]:
    """Nothing where there is nothing; a line that is being written is left out."""
    try:
        with path.open("rb") as file:
            lines = file.read(_MOST_BYTES).splitlines()
    except OSError:
        return []
    return [group for group in map(_group, lines) if group is not None]


def _group(line: bytes) -> TracedGroup | None:
    try:
        said = json.loads(line)
        if "id" not in said:
            return None
        ranks = tuple(int(rank) for rank in said["ranks"])
        return TracedGroup(id=str(said["id"]), name=str(said["name"]), desc=str(said["desc"]), ranks=ranks)
    except (ValueError, KeyError, TypeError):
        return None
