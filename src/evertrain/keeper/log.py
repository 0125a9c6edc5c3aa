"""What does the keeper say? One line at a time on standard error, and a full disk does not stop it."""

from __future__ import annotations

import sys
import time


def log(text: str) -> None:
    try:
        print(time.strftime("%Y-%m-%d %H:%M:%S"), text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass
