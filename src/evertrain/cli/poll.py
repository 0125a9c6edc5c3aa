"""How does the job do? A thread asks the controller a few times a second and keeps the newest answer.

A controller that is away says nothing about the job; the last answer stands until it is back. For how long there has
been none is counted in requests that failed, so that a pause of this process itself does not read as silence.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from evertrain.cli import client

PERIOD_S = 0.25
LONGEST_LOOK_S = 3.0

Json = dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """One look at the job."""

    status: Json
    incidents: tuple[Json, ...] = ()


class Poller(threading.Thread):
    def __init__(self, url: str, token: str) -> None:
        super().__init__(name="poller", daemon=True)
        self._url, self._token = url, token
        self._client = client.Client(url, token)
        self._over = threading.Event()
        self._newest: Seen | None = None
        self.silent_s = 0.0
        """Waited in vain for an answer since the last one."""

    @property
    def newest(self) -> Seen | None:
        return self._newest

    def client(self, timeout_s: float) -> client.Client:
        """Another connection, for whoever is not this thread."""
        return client.Client(self._url, self._token, timeout_s)

    def stop(self) -> None:
        self._over.set()

    def run(self) -> None:
        while not self._over.wait(PERIOD_S):
            began = time.monotonic()
            try:
                self._newest = self._look(self._newest)
                self.silent_s = 0.0
            except client.Refused:
                self.silent_s = 0.0
            except client.Unreachable:
                self.silent_s += PERIOD_S + min(time.monotonic() - began, LONGEST_LOOK_S)

    def _look(self, before: Seen | None) -> Seen:
        status = self._client.get("/v1/status")
        if before is not None and _settled(before) and not _differs(before.status, status):
            return Seen(status, before.incidents)
        incidents = self._client.get("/v1/incidents")
        # those of earlier runs of the job are history
        return Seen(status, tuple(incident for incident in incidents if incident["this_run"]))


def _settled(seen: Seen) -> bool:
    return not any(incident.get("open") for incident in seen.incidents)


def _differs(before: Json, now: Json) -> bool:
    """Whether there may be an incident that we do not know yet."""
    return any(before.get(key) != now.get(key) for key in ("attempt", "state", "message", "incidents"))
