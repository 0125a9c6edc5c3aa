"""A rank that is inside an operation and has its interpreter held by native code.

    holds_gil.py RING SECONDS

It writes the operation down, says `inside`, holds the interpreter for so long, and says `out`.
"""

from __future__ import annotations

import ctypes
import sys
import time

from evertrain.trace import layout, rings


def main() -> None:
    writer = rings.open_writer(sys.argv[1])
    now = time.monotonic_ns()
    state, blocked = layout.KINDS["state"], layout.KINDS["blocked"]
    op = layout.OPS.index("all_reduce")
    for place, kind in ((0, blocked), (1, state)):
        body = layout.OPERATION_STRUCT.pack(
            1, kind, 0, op, 0, 0, -1, 3, layout.NOBODY, 77, 12,
            12, 4096, now, now, 0, now, 0, *[layout.UNSEEN] * 6, 0, 0, 0,
        )  # fmt: skip
        writer.set_place(place, body)
    print("inside", flush=True)
    ctypes.PyDLL(None).usleep(int(float(sys.argv[2]) * 1e6))
    for place in (0, 1):
        writer.free_place(place)
    print("out", flush=True)
    sys.stdin.read()


main()
