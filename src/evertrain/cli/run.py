"""`evertrain run`, in torchrun's place: reads the flags, and imports the rest only when there is something to run."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from evertrain.cli import flags
from evertrain.model.errors import UsageError


def main(argv: Sequence[str]) -> int:
    began = time.monotonic()
    args = flags.run_parser().read(argv)
    if args.print_config:
        from evertrain.cli import config

        print(config.annotated(config.from_flags(args)), end="")
        return 0
    if not sys.platform.startswith("linux"):
        raise UsageError(f"Linux (or WSL2) is needed; this is {sys.platform}")
    from evertrain.cli import serve

    return serve.job(args, began)
