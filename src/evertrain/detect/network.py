"""Is there trouble with a port of this node? A port that is down, one that comes and goes, and one that loses packets.

    nic_down      no carrier in two looks one after the other
    link_flap     the carrier has changed three times or more within a minute
    packet_loss   more than one packet in a thousand was lost within a minute, of at least a thousand
    tcp_resends   TCP had to send more than one segment in a hundred again within a minute, of at least a thousand

What is lost in the fabric shows in no counter of a port, and in TCP's on whoever sends: it is told, and accuses nobody.
Counters that have become smaller were reset or have wrapped: what lies between two such looks says nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from evertrain.model.sensing import PortReading, Sign

RESENT_FRACTION = 0.01
"""A machine that has other work to do answers late, and some segments are sent again for nothing."""
LEAST_SEGMENTS, LEAST_RESENT = 1_000, 50
WINDOW_S = 60.0
DOWN_LOOKS = 2
FLAPS = 3
LOST_FRACTION = 0.001
LEAST_PACKETS = 1_000
LEAST_LOST = 20
"""A few that were lost while a link came up are no trouble."""
UNCLAIMED_PER_S = 10.0
"""So many packets that nobody here asked for (of protocols that this machine does not speak) are usual."""
_IMPLAUSIBLE = 1 << 31
"""No counter of packets grows by that within a look; one of 32 bits that has wrapped seems to."""


class Ports:
    """What the ports of one node have been doing."""

    def __init__(self) -> None:
        self._ports: dict[str, _Port] = {}

    def judge(self, readings: Sequence[PortReading], now: float) -> tuple[Sign, ...]:
        """All that holds now. `readings` are those of the ports that matter, the same ones in every look."""
        signs: list[Sign] = []
        for reading in readings:
            port = self._ports.setdefault(reading.name, _Port(reading.name))
            signs += port.judge(reading, now)
        return tuple(signs)


class Resends:
    """What TCP of one node had to send twice, to whomever."""

    def __init__(self) -> None:
        self._before: tuple[int, int, float] | None = None
        self._sent: deque[tuple[float, int, int]] = deque()
        """Begin of what lies between two looks, segments, those of them that were sent again."""
        self._sign: Sign | None = None

    def judge(self, sent: int, again: int, now: float) -> tuple[Sign, ...]:
        """Counters since the machine was started; one event for as long as it goes on."""
        before, self._before = self._before, (sent, again, now)
        if before is not None and sent >= before[0] and again >= before[1]:
            self._sent.append((before[2], sent - before[0], again - before[1]))
        while self._sent and self._sent[0][0] < now - WINDOW_S:
            self._sent.popleft()
        segments, resent = (sum(one[index] for one in self._sent) for index in (1, 2))
        if segments < LEAST_SEGMENTS or resent < LEAST_RESENT or resent <= RESENT_FRACTION * segments:
            self._sign = None
        elif self._sign is None:
            began = self._sent[0][0]
            what = f"TCP has sent {resent:,} of {segments:,} segments again within {now - began:.0f} s"
            self._sign = Sign(
                key=f"tcp:resends:{began:.0f}",
                kind="tcp_resends",
                evidence=f"{what} ({resent / segments:.1%}; the limit is {RESENT_FRACTION:.0%}): some way from here "
                "to other nodes loses packets",
                time=began,
            )
        return (self._sign,) if self._sign is not None else ()


class _Port:
    def __init__(self, name: str) -> None:
        self._name = name
        self._before: tuple[PortReading, float] | None = None
        self._down: list[float] = []
        """Times of the looks since it was up."""
        self._changes: deque[tuple[float, int]] = deque()
        """Of the carrier, with the time when they were seen."""
        self._traffic: deque[tuple[float, float, int, int]] = deque()
        """Begin and end of what lies between two looks, packets, lost ones."""
        self._flapping: Sign | None = None
        self._losing: Sign | None = None

    def judge(self, reading: PortReading, now: float) -> list[Sign]:
        before, self._before = self._before, (reading, now)
        if before is not None:
            self._count(*before, reading, now)
        while self._changes and self._changes[0][0] <= now - WINDOW_S:
            self._changes.popleft()
        while self._traffic and self._traffic[0][0] < now - WINDOW_S:
            self._traffic.popleft()
        self._flapping, self._losing = self._flap(now), self._loss()
        found = (self._is_down(reading, now), self._flapping, self._losing)
        return [sign for sign in found if sign is not None]

    def _count(self, before: PortReading, then: float, after: PortReading, now: float) -> None:
        changes = int(before.is_up != after.is_up)
        if before.carrier_changes is not None and after.carrier_changes is not None:
            changes = max(changes, after.carrier_changes - before.carrier_changes)
        if 0 < changes < _IMPLAUSIBLE:
            self._changes.append((now, changes))
        if not (before.is_up and after.is_up):
            return  # one that is gone counts nothing, and seems to begin anew when it is back
        grown = [
            getattr(after, name) - getattr(before, name)
            for name in ("received_packets", "sent_packets", "errors", "dropped", "unclaimed")
        ]
        if all(0 <= one < _IMPLAUSIBLE for one in grown):
            received, sent, errors, dropped, unclaimed = grown
            more = max(0, unclaimed - int(UNCLAIMED_PER_S * (now - then)))
            self._traffic.append((then, now, received + sent, errors + dropped + more))

    def _is_down(self, reading: PortReading, now: float) -> Sign | None:
        if reading.is_up:
            self._down = []
            return None
        self._down.append(now)
        if len(self._down) < DOWN_LOOKS:
            return None
        first = self._down[0]
        self._down = self._down[:DOWN_LOOKS]
        return self._sign("nic_down", "down", first, f"no carrier since {DOWN_LOOKS} looks; it had one before")

    def _flap(self, now: float) -> Sign | None:
        """One event for as long as it goes on."""
        changes = sum(number for _, number in self._changes)
        if changes < FLAPS:
            return None
        if self._flapping is not None:
            return self._flapping
        what = f"its carrier has changed {changes} times within {WINDOW_S:.0f} s; {FLAPS} are too many"
        return self._sign("link_flap", "flap", self._changes[0][0], what)

    def _loss(self) -> Sign | None:
        packets, lost = (sum(one[index] for one in self._traffic) for index in (2, 3))
        if packets < LEAST_PACKETS or lost < LEAST_LOST or lost <= LOST_FRACTION * packets:
            return None
        if self._losing is not None:
            return self._losing
        lasted_s = self._traffic[-1][1] - self._traffic[0][0]
        what = (
            f"{lost:,} packets of {packets:,} were lost or damaged within {lasted_s:.0f} s "
            f"({lost / packets:.2%}; the limit is {LOST_FRACTION:.1%})"
        )
        return self._sign("packet_loss", "loss", self._traffic[0][0], what)

    def _sign(self, kind: str, word: str, first: float, what: str) -> Sign:
        return Sign(
            key=f"port:{self._name}:{word}:{first:.0f}",
            kind=kind,
            device=self._name,
            evidence=f"{self._name}: {what}",
            time=first,
        )
