"""What each fault of a network or a machine looks like, in what the agent writes down about connections and processes.

Three ranks in namespaces of their own, each sends to the next one.
"""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from evertrain.trace import layout
from evertrain.trace.flows import Flows, paired
from evertrain.trace.hosts import Host
from support import bridge, cgroups
from support.waiting import eventually

needs = bridge.why_not("tc", "nft")
pytestmark = [pytest.mark.skipif(bool(needs), reason=needs), pytest.mark.xdist_group("bridge")]

STEP_S = 0.1


class Watch:
    """Looks as the agent does."""

    def __init__(self, ring: bridge.Ring) -> None:
        self.ring = ring
        self.flows = Flows()
        self.hosts = {rank: Host(rank, pid) for rank, pid in ring.pids.items()}

    def close(self) -> None:
        self.flows.close()
        for host in self.hosts.values():
            host.close()

    def look(self) -> tuple[list[Any], list[Any]]:
        now_ns = time.monotonic_ns()
        told = self.flows.look(now_ns, self.ring.pids, self.ring.pids)
        hosts = [host.look(now_ns, self.flows.carrier(rank)) for rank, host in self.hosts.items()]
        return _read([one for each in told.values() for one in each], "flow"), _read(list(filter(None, hosts)), "host")

    def over(self, seconds: float) -> tuple[dict[tuple[int, int], dict[str, int]], dict[int, list[Any]]]:
        """By sender and receiver, what came of this time; and the records of each rank's process."""
        self.look()
        links: dict[tuple[int, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
        hosts: dict[int, list[Any]] = defaultdict(list)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(STEP_S)
            flows, seen = self.look()
            for one in flows:
                link = links[int(one["rank"]), int(one["peer"])]
                for name in ("sent", "acked", "busy_us", "resent", "dt_us"):
                    link[name] += int(one[name])
                for name in ("notsent", "rqueue", "backoff", "unacked"):
                    link[name] = max(link[name], int(one[name]))
            for one in seen:
                hosts[int(one["rank"])].append(one)
        return links, hosts


def _read(records: list[bytes], body: str) -> list[Any]:
    whole = b"".join(bytes(8) + one + bytes(8) for one in records)
    return list(np.frombuffer(whole, layout.dtype(body)))


@pytest.fixture(scope="module")
def watch() -> Iterator[Watch]:
    with bridge.ring(3) as ring:
        made = Watch(ring)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(autouse=True)
def healthy(watch: Watch) -> None:
    """All three links carry data before each test: the one before may have left TCP waiting."""
    links = [(0, 1), (1, 2), (2, 0)]

    def flowing() -> bool:
        seen, _ = watch.over(0.3)
        return all(seen[link]["sent"] > bridge.BLOCK_BYTES for link in links)

    eventually(flowing, "data on all links", within_s=30.0)


def test_each_connection_leads_to_the_rank_at_its_other_end(watch: Watch) -> None:
    links, hosts = watch.over(0.5)
    assert set(links) == {(0, 1), (1, 2), (2, 0), (1, 0), (2, 1), (0, 2)}
    for sender in range(3):
        link = links[sender, (sender + 1) % 3]
        # what was lost or waits is little beside what has arrived
        assert abs(link["sent"] - link["acked"]) < 0.1 * link["sent"] and link["backoff"] == 0
        assert links[(sender + 1) % 3, sender]["sent"] == 0
        assert {int(one["carrier"]) for one in hosts[sender]} == {1}


def test_addresses_alone_tell_the_same(watch: Watch) -> None:
    with_addresses = Flows()
    try:
        with_addresses.look(time.monotonic_ns(), watch.ring.pids, ())
        pairs = with_addresses.take_pairs()
        assert with_addresses.take_pairs() == []
    finally:
        with_addresses.close()
    assert sorted((rank, peer) for (rank, _), peer in paired(pairs).items()) == [
        (0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1),
    ]  # fmt: skip


def test_a_stopped_process_does_not_read(watch: Watch) -> None:
    os.kill(watch.ring.pids[1], signal.SIGSTOP)
    try:
        eventually(lambda: watch.over(0.3)[0][0, 1]["sent"] == 0, "nothing sent")
        links, hosts = watch.over(0.5)
    finally:
        os.kill(watch.ring.pids[1], signal.SIGCONT)
    assert {link for link, seen in links.items() if seen["rqueue"]} == {(1, 0)}
    assert {chr(one["state"]) for one in hosts[1]} == {"T"}
    assert not any(chr(one["state"]) == "T" for rank in (0, 2) for one in hosts[rank])


def test_a_slow_way_out_is_busy_and_has_not_sent(watch: Watch) -> None:
    with watch.ring.slowed(2, megabits_per_s=40):
        time.sleep(0.3)
        links, _ = watch.over(1.5)
    busy = {link: seen["busy_us"] / seen["dt_us"] for link, seen in links.items()}
    notsent = {link: seen["notsent"] for link, seen in links.items()}
    assert busy[2, 0] > 0.8 and notsent[2, 0] > 200_000
    assert all(busy[link] < 0.5 for link in busy if link != (2, 0))
    assert max((size for link, size in notsent.items() if link != (2, 0)), default=0) < notsent[2, 0]


def test_a_link_that_is_down_backs_off_at_both_ends_of_it_alone(watch: Watch) -> None:
    with watch.ring.unplugged(2):
        eventually(lambda: watch.over(0.3)[0][1, 2]["backoff"] >= 2, "backoff towards it")
        links, hosts = watch.over(0.5)
    backing = {link for link, seen in links.items() if seen["backoff"]}
    assert (1, 2) in backing and backing <= {(1, 2), (2, 0)}
    assert {int(one["carrier"]) for one in hosts[2]} == {0}
    assert {int(one["carrier"]) for rank in (0, 1) for one in hosts[rank]} == {1}


def test_loss_is_what_was_sent_and_never_acknowledged(watch: Watch) -> None:
    with watch.ring.lossy(2, 0, percent=10):
        time.sleep(0.3)
        links, _ = watch.over(2.0)
    lost = {link: 1 - seen["acked"] / seen["sent"] for link, seen in links.items() if seen["sent"] > 1 << 18}
    assert 0.04 < lost[2, 0] < 0.3
    assert all(part < 0.03 for link, part in lost.items() if link != (2, 0))


@pytest.mark.skipif(bool(cgroups.why_not()), reason=cgroups.why_not())
def test_a_quota_of_processor_time_throttles(watch: Watch) -> None:
    with cgroups.quota(watch.ring.pids[1], fraction=0.03):
        time.sleep(1.1)  # the group is looked for again after a second
        _, hosts = watch.over(2.0)
    throttled = {rank: sum(int(one["throttled"]) for one in seen) for rank, seen in hosts.items()}
    held_us = {rank: sum(int(one["throttled_us"]) for one in seen) for rank, seen in hosts.items()}
    assert throttled[1] >= 5 and held_us[1] > 300_000
    assert throttled[0] == throttled[2] == 0


@pytest.mark.skipif(bool(cgroups.why_not_frozen()), reason=cgroups.why_not_frozen())
def test_a_frozen_group_is_told_apart_from_sleep(watch: Watch) -> None:
    with cgroups.frozen(watch.ring.pids[0]):
        time.sleep(1.1)
        _, hosts = watch.over(0.3)
    assert all(one["frozen"] for one in hosts[0]) and not any(one["frozen"] for one in hosts[1])
