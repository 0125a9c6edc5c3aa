"""Which evertrain is this? Nodes of one job must run the same one."""

from __future__ import annotations


def own() -> str:
    # slow to import, and seldom asked
    from importlib.metadata import version

    return version("evertrain")
