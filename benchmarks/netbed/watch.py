"""What is said of a job while it runs: every change of every incident, and when it was seen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from netbed import bed as beds
from netbed.job import Cluster
from netbed.score import Seen

POLL_S = 0.1


@contextmanager
def watching(cluster: Cluster, looks: Callable[[Any], object] = lambda status: None) -> Iterator[list[Seen]]:
    """From another thread, in the network of the switch; what `looks` at the status once a second is for checks."""
    seen: list[Seen] = []
    over = threading.Event()

    def watch() -> None:
        beds.enter(cluster.bed.switch)
        known: dict[int, Any] = {}
        due = 0.0
        while not over.wait(POLL_S):
            for incident in cluster.ask("incidents") or ():
                if known.get(incident["id"]) != incident:
                    known[incident["id"]] = incident
                    seen.append(Seen(time.time(), incident))
            if time.monotonic() >= due:
                due = time.monotonic() + 1.0
                if (status := cluster.ask("status")) is not None:
                    looks(status)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
