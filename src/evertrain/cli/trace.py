"""`evertrain trace`: what do ranks communicate, and how does that go? live, export, query, rca.

Exit code 0: shown or written; 1: there is nothing to show, or nobody answers; 2: wrong usage.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from evertrain.cli.parsing import did_you_mean
from evertrain.model.errors import UsageError

COMMANDS = {
    "live": "groups of ranks, how far each has come, and who lags behind",
    "export": "the last seconds as a file for Perfetto or Chrome, or as Parquet",
    "query": "ask the last seconds in SQL",
    "rca": "communication is stuck or slow: who has begun it, and along which way do the others wait for it?",
}
HELP = """usage: evertrain trace COMMAND [flags]

What ranks communicate, and how that goes, from their trace rings.

commands:
{commands}

`evertrain trace COMMAND --help` tells more.
"""


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        lines = "\n".join(f"  {name:<8}{what}" for name, what in COMMANDS.items())
        print(HELP.format(commands=lines), end="", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        known = f"{did_you_mean(argv[0], COMMANDS)} (see `evertrain trace --help`)"
        raise UsageError(f"unknown command trace {argv[0]}{known}")
    exit_code: int = import_module(f"evertrain.cli.trace_{argv[0]}").main(argv[1:])
    return exit_code
