"""How are tests of machines shown? One line a test, and one a kind of reading: the lowest, the median, the highest.

With a thousand nodes nobody reads every number; `--json` has them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

Json = Mapping[str, Any]

_SCALES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def lines(checks: Iterable[Json]) -> list[str]:
    """What each test came to: who is accused and why, else how many passed."""
    found = []
    for check in checks:
        counts = Counter(result["outcome"] for result in check["results"].values())
        said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "under way"
        again = ", again" if check["again"] else ""
        took = f" in {check['seconds']:.1f} s" if check["seconds"] is not None else ""
        found.append(f"{check['name']}{again}: {said}{took}")
        found += [line if line.startswith(node) else f"{node}: {line}" for node, line in check["accused"].items()]
        found += check["notes"]
    return found


def table(checks: Sequence[Json]) -> Table | None:
    """All numbers, by test and kind of reading; None: there are none."""
    from evertrain.cli import tables

    rows: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    for check in checks:
        for node, result in check["results"].items():
            for reading in result["readings"]:
                if reading["value"] is not None:
                    key = (check["name"], reading["name"], reading["unit"])
                    rows.setdefault(key, []).append((reading["value"], f"{node} rank {reading['rank']}"))
    if not rows:
        return None
    shown = tables.plain_table("test", "reading", "lowest", "of", "median", "highest")
    for (test, name, unit), values in rows.items():
        lowest, where = min(values)
        middle, highest = median(value for value, _ in values), max(values)[0]
        shown.add_row(test, name, number(lowest, unit), where, number(middle, unit), number(highest, unit))
    return shown


def number(value: float, unit: str) -> str:
    """`81.2 GFLOP/s`, `1.3 GB/s`"""
    if unit != "bytes/s":
        return f"{value:.4g} {unit}"
    for scale, prefix in _SCALES:
        if value >= scale:
            return f"{value / scale:.4g} {prefix}B/s"
    return f"{value:.4g} B/s"
