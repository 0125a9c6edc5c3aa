"""Writers that are killed at any moment, one after another on the same file. Run by test_rings.py in its own process.

Each is a fork that writes as fast as it can until SIGKILL comes. After each the file is read: all that readers get must
be what a writer has finished. Prints what was seen, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time

from evertrain.trace import layout, rings
from evertrain.trace.reading import Array, Reader
from support.trace_records import CAPACITY, TABLE, body

LONGEST_LIFE_S = 0.0003
"""From the first record on; one in ten may not come to that."""


def write_for_ever(writer: rings.Writer) -> None:
    while True:
        number = writer.take()
        place = number % TABLE
        writer.set_place(place, body(number, "state"))
        writer.put(number, body(number, "done"))
        if number % 3:
            writer.free_place(place)


def check(found: Array, kind: str) -> None:
    for one in found:
        number = int(one["number"])
        assert layout.sealed(body(number, kind), number) == one.tobytes(), f"record {number} is not what was written"


def main() -> None:
    folder, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    path = os.path.join(folder, "killed.ring")
    rings.create(path, writer="hook", capacity=CAPACITY, table=TABLE)
    holes = unused = places = 0
    head, followed = 0, 0
    with Reader(path) as reader, Reader(path) as follower:
        for _ in range(count):
            writer = rings.open_writer(path)
            pid = os.fork()
            if not pid:
                try:
                    write_for_ever(writer)
                finally:
                    os._exit(3)
            del writer
            if chance.random() < 0.9:
                began = time.monotonic()
                while reader.head() == head and time.monotonic() < began + 10:
                    os.sched_yield()
            time.sleep(chance.random() * LONGEST_LIFE_S)
            if chance.random() < 0.2:  # a reader of a living writer
                check(reader.since(0).operations, "done")
                check(reader.table(), "state")
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            assert os.WIFSIGNALED(status), f"the writer ended by itself: {status:#x}"

            before, head = head, reader.head()
            assert head >= before, "the ring went back"
            unused += head == before
            oldest = max(0, head - CAPACITY) + 1
            found = reader.window(0, 1 << 63).operations
            check(found, "done")
            missing = set(range(oldest, head + 1)) - {int(number) for number in found["number"]}
            # a writer dies in one record; it is the next one's first, or lies where the oldest was
            assert len(missing) <= 1, f"{missing} are missing up to {head}"
            holes += len(missing)
            at, said = reader.places()
            check(said, "state")
            assert all(number % TABLE == place for place, number in zip(at, said["number"].tolist(), strict=True))
            places += len(at)
            news = follower.since(followed)
            check(news.operations, "done")
            assert news.last >= followed
            followed = news.last
    print(json.dumps({"kills": count, "records": head, "holes": holes, "unused": unused, "places": places}))


if __name__ == "__main__":
    main()
