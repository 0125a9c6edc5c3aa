"""How many examples does a test of a property try? A quarter in the usual run, all of them in `make test-all`."""

from __future__ import annotations

import os

IS_WHOLE = bool(os.environ.get("EVERTRAIN_TEST_ALL"))


def examples(count: int) -> int:
    return count if IS_WHOLE else max(10, count // 4)
