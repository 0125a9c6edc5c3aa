"""How is a replay of the job shown? One line a round, and what all of them have come to; `--json` has every digest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evertrain.model.words import counted

Json = Mapping[str, Any]

_MOST_NAMED = 6
_MOST_ODD = 4


def lines(replay: Json) -> list[str]:
    found = [line for one in replay["rounds"] for line in _round(one)]
    return [*found, f"{replay['because']}; confidence {replay['confidence']:.2f}"] if replay["because"] else found


def _round(one: Json) -> Iterator[str]:
    groups = one["groups"]
    phase, size = groups[0]["phase"], counted(len(groups[0]["nodes"]), "node")
    took = f" in {one['seconds']:.1f} s" if one["seconds"] is not None else ", under way"
    odd = [_named(group["nodes"]) for group in groups if group["differs"]]
    if odd:
        more = f", and {len(odd) - _MOST_ODD} more" if len(odd) > _MOST_ODD else ""
        came_to = f": {' | '.join(odd[:_MOST_ODD])} differ{'s' if len(odd) == 1 else ''}{more}"
    else:
        digests = {group["digest"] for group in groups if group["digest"]}
        came_to = ": all agree" if len(digests) == 1 else ": no two agree" if len(digests) > 1 else ""
    yield f"{phase}: {counted(len(groups), 'group')} of {size}{took}{came_to}"
    silent = [group for group in groups if group["because"]]
    for group in silent[:_MOST_ODD]:
        yield f"{phase}: no result of {_named(group['nodes'])}: {group['because']}"


def _named(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:_MOST_NAMED]) + (f", and {len(nodes) - _MOST_NAMED} more" * (len(nodes) > _MOST_NAMED))
