"""What goes wrong in jobs in virtual time: the faults, as their traces look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from evertrain.model.collectives import Component
from support.collectives import FOREVER, Do, Fault, Job, training

START = 14.0


@dataclass(frozen=True)
class Case:
    name: str
    fault: Callable[[int], Fault]
    """Of a rank."""
    component: tuple[Component, ...]
    others: tuple[int, ...] = ()
    """Ranks that have it as well, as offsets."""


def _fault(rank: int, **what: object) -> Fault:
    return Fault(start=START, ranks=(rank,), **what)  # type: ignore[arg-type]


_STOPPED = {"state": ord("T"), "cpu_us": 0, "delay_us": 0}


def sigstop(rank: int) -> Fault:
    # what has come to it stays unread; its peers' data is taken by its kernel until that is full
    return _fault(rank, own=lambda *_: FOREVER, host=_STOPPED, flow={"rqueue": 1_000_048})


def frozen(rank: int) -> Fault:
    return _fault(rank, own=lambda *_: FOREVER, host={"state": ord("D"), "frozen": 1})


def link_down(rank: int) -> Fault:
    return _fault(
        rank, transfer=lambda _: FOREVER, flow_to={"backoff": 3, "notsent": 200_000, "acked": 0, "busy_us": 100_000}
    )


def narrow(rank: int) -> Fault:
    return _fault(rank, transfer=lambda usual: usual * 25, flow={"notsent": 750_000, "busy_us": 60_000})


def asleep(rank: int) -> Fault:
    return _fault(rank, own=lambda *_: FOREVER)


def compute(rank: int) -> Fault:
    return _fault(rank, own=lambda _now, usual, _tag: usual * 3, host={"cpu_us": 60_000})


def copy(rank: int) -> Fault:
    """A copy before each collective."""
    return _fault(rank, own=lambda _now, usual, tag: usual + (0.03 if tag != "load" else 0.0))


def quota(rank: int) -> Fault:
    # by durations alone the network would be slow as well
    return _fault(
        rank,
        own=lambda _now, usual, _tag: usual * 2,
        transfer=lambda usual: usual * 20,
        host={"delay_us": 562_000, "throttled_us": 97_000, "throttled": 1},
        flow={"rqueue": 3_000},
    )


def burner(rank: int) -> Fault:
    return _fault(
        rank,
        own=lambda _now, usual, _tag: usual * 2,
        transfer=lambda usual: usual * 10,
        host={"delay_us": 90_000, "throttled_us": 45_000, "throttled": 1},
    )


def bursts(rank: int) -> Fault:
    def own(now: float, usual: float, _tag: str) -> float:
        return usual + (0.6 if now % 1.0 < 0.6 else 0.0)

    return _fault(rank, own=own, host={"state": lambda at: ord("T") if at % 10 < 6 else ord("S")})


def loss(rank: int) -> Fault:
    return _fault(
        rank,
        transfer=lambda usual: usual * 30,
        flow={"sent": 250_000, "acked": 212_000, "resent": 26, "backoff": lambda at: at % 2},
    )


def loss_one_way(rank: int) -> Fault:
    return _fault(rank, transfer=lambda usual: usual * 30, flow_to={"sent": 250_000, "acked": 212_000, "resent": 26})


def loader_stuck(rank: int) -> Fault:
    return _fault(rank, own=lambda _now, usual, tag: FOREVER if tag == "load" else usual)


def loader_slow(rank: int) -> Fault:
    return _fault(rank, own=lambda _now, usual, tag: usual + 0.4 if tag == "load" else usual)


def traffic(rank: int) -> Fault:
    """Of others on the links of two ranks, far from each other."""
    return Fault(
        start=START,
        ranks=(rank, (rank + 3) % 8),
        transfer=lambda usual: usual * 15,
        flow={"notsent": 500_000, "busy_us": 70_000},
        host={"wire_bytes": 12_000_000},
    )


def unread(rank: int) -> Fault:
    return _fault(rank, transfer=lambda usual: usual * 25, flow_to={"rwnd_us": 70_000, "busy_us": 90_000})


CASES = (
    Case("sigstop", sigstop, ("host",)),
    Case("frozen", frozen, ("host",)),
    Case("link down", link_down, ("network",)),
    Case("40 Mbit", narrow, ("sender",)),
    Case("sleep before a collective", asleep, ("outside",)),
    Case("compute x 3", compute, ("compute",)),
    Case("slow copy", copy, ("compute", "host")),
    Case("quota", quota, ("host",)),
    Case("burner", burner, ("host",)),
    Case("stop and go", bursts, ("host",)),
    Case("loss", loss, ("network",)),
    Case("loss one way", loss_one_way, ("network",)),
    Case("loader stuck", loader_stuck, ("storage",)),
    Case("loader slow", loader_slow, ("storage",)),
    Case("traffic on two links", traffic, ("network",), others=(3,)),
    Case("receiver does not read", unread, ("receiver",)),
)


def prefetching(job: Job, rank: int, step: int) -> list[Do]:
    """Posts its receives ahead of its work and waits for them when it needs them."""
    found: list[Do] = []
    for one in training(job, rank, step):
        if one.what == "recv":
            found.append(Do("wait", peer=one.peer))
        else:
            found.append(one)
    receives = [Do("irecv", "pp", peer, size=1 << 17) for peer in _sources(job, rank)]
    # one in flight a time: posted at once after the last was waited for
    out: list[Do] = [*receives[:1]]
    left = receives[1:]
    for one in found:
        out.append(one)
        if one.what == "wait" and left:
            out.append(left.pop(0))
    return out


def _sources(job: Job, rank: int) -> list[int]:
    return [one.peer for one in training(job, rank, 0) if one.what == "recv"]
