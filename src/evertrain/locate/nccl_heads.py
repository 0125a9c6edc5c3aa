"""Which rank holds a collective up, by what the oldest open chunk of each flow waits for?

Each rank's own flows either explain it (`Local`) or point to the rank that it sends to or receives from; the walk along
these ends at the first rank that is explained locally. In the order in which they are believed:

    its proxy thread does not run                                  proxy
    its kernel has not begun, others' have                         host: not launched, or the operation before it
    receives: data is on its way to the GPU                        pcie
    receives: the GPU does not take it; sends: the GPU gives none  gpu
    sends its first chunk of a ring: the GPU gives none            gpu
    sends: in the network, and the receiver waits for it           network, between these two
    sends: the receiver is not ready, or does not get on           ──▶ the receiver
    receives: nothing comes                                        ──▶ the sender

One picture of a healthy job shows somebody, too: where the data just is. So pictures of some seconds vote (`judge`);
who is stuck or slow holds the others up in most of them. Of several links that are held up the rank is named that they
have in common.

With InfiniBand `done` says that the data has arrived; a socket's says only that the kernel has it, so what the receiver
lacks may be in the network although nothing of the sender's is open, and a receiver that is not ready shows as data
that does not get away.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from evertrain.model.tracing import FlowState, HeadCause, HeadComponent, OperationState, Picture

IDLE = 0.05
"""A proxy thread that runs, or wants to, for less than this part of the time does not serve its flows."""
WINDOW = 8
"""Chunks of a flow that NCCL keeps open."""
FEWEST = 2
"""Pictures; one alone says where the data just is."""
SHARE, LEAD = 0.4, 2.0
"""Of the pictures: in so many a suspect must hold the others up, and in so many times as many as the next one."""
COMMON = 0.75
"""... and so many must have one rank in common, where several links are held up."""
STILL_S = 0.25
"""Counters of two ranks are read at moments that may lie so far apart; what differs for longer does differ."""
_OFTEN = 0.2
"""A link that is held up in fewer of them than this part of all links' is by chance among them."""
_LESS_SURE = 0.85
"""Of a link it is not known which end it is; of two suspects both may be right, or one."""
_MOST_LINES = 6
_WALK = 64


class Local(NamedTuple):
    """A rank that is explained by what it shows itself."""

    component: HeadComponent
    link: tuple[int, int] | None
    channels: tuple[int, ...]
    all_channels: bool
    evidence: str


class Vote(NamedTuple):
    """What one walk has come to."""

    rank: int
    local: Local
    path: tuple[int, ...]
    t_s: float
    weight: float
    """All votes of a picture together have 1."""


class _Suspects(NamedTuple):
    ranks: tuple[int, ...]
    link: tuple[int, int] | None
    component: HeadComponent
    share: float
    votes: list[Vote]


def judge(pictures: Sequence[Picture]) -> HeadCause:
    """What the pictures of some seconds have in common."""
    votes = [vote for picture in pictures for vote in walk(picture)]
    if len({vote.t_s for vote in votes}) < FEWEST:
        return HeadCause(component="none", evidence=("no operation was seen to wait for anybody",))
    found = _one_rank(votes) or _one_link(votes) or _two_links(votes)
    if found is None:
        return HeadCause(component="none", evidence=("the pictures agree on nobody", *_lines(votes)))
    channels = {channel for vote in found.votes for channel in vote.local.channels}
    whole = any(vote.local.all_channels for vote in found.votes)
    return HeadCause(
        component=found.component,
        ranks=found.ranks,
        link=found.link,
        channels=() if whole else tuple(sorted(channels)),
        confidence=round(min(0.95, found.share) * (1.0 if len(found.ranks) == 1 else _LESS_SURE), 2),
        first_s=min(vote.t_s for vote in found.votes),
        evidence=(f"{found.share:.0%} of the pictures end here", *_lines(found.votes)),
        path=max((vote.path for vote in found.votes), key=len),
    )


def _one_rank(votes: Sequence[Vote]) -> _Suspects | None:
    """By what it shows itself; or the one that all links that are held up have in common."""
    total = sum(vote.weight for vote in votes)
    own: dict[tuple[int, HeadComponent], float] = defaultdict(float)
    touched: dict[int, float] = defaultdict(float)
    for vote in votes:
        if vote.local.link is None:
            own[vote.rank, vote.local.component] += vote.weight
        for rank in vote.local.link or (vote.rank,):
            touched[rank] += vote.weight
    links = _links(votes)
    for (rank, component), weight in _largest(own, 1):
        others = [other for (one, _), other in own.items() if one != rank]
        others += [other for link, other in links.items() if rank not in link]
        if weight >= max(SHARE * total, LEAD * max(others, default=0.0)):
            chosen = [vote for vote in votes if (vote.rank, vote.local.component) == (rank, component)]
            return _Suspects((rank,), None, component, weight / total, chosen)
    for rank, weight in _largest(touched, 1):
        if weight >= COMMON * total and sum(rank in link for link in links) > 1:
            chosen = [vote for vote in votes if vote.local.link is not None and rank in vote.local.link]
            return _Suspects((rank,), None, "network", weight / total, chosen)
    return None


def _one_link(votes: Sequence[Vote]) -> _Suspects | None:
    """Both of its ends: it cannot be told which of them it is."""
    total = sum(vote.weight for vote in votes)
    links = _links(votes)
    own = [
        sum(vote.weight for vote in votes if vote.local.link is None and vote.rank == rank) for rank in _ranks(votes)
    ]
    for link, weight in _largest(links, 1):
        others = [*own, *(other for two, other in links.items() if two != link)]
        if weight >= max(SHARE * total, LEAD * max(others, default=0.0)):
            chosen = [vote for vote in votes if vote.local.link == link]
            return _Suspects(link, link, "network", weight / total, chosen)
    return None


def _two_links(votes: Sequence[Vote]) -> _Suspects | None:
    """As where the interfaces of two nodes are busy with something else: those who send."""
    total = sum(vote.weight for vote in votes)
    first = dict(_largest(_links(votes), 2))
    weight = sum(first.values())
    if len(first) < 2 or weight < COMMON * total:
        return None
    chosen = [vote for vote in votes if vote.local.link in first]
    return _Suspects(tuple(source for source, _ in first), None, "network", weight / total, chosen)


def _ranks(votes: Iterable[Vote]) -> set[int]:
    return {vote.rank for vote in votes}


def _links(votes: Iterable[Vote]) -> dict[tuple[int, int], float]:
    """Those that are held up again and again."""
    weights: dict[tuple[int, int], float] = defaultdict(float)
    for vote in votes:
        if vote.local.link is not None:
            weights[vote.local.link] += vote.weight
    least = _OFTEN * sum(weights.values())
    return {link: weight for link, weight in weights.items() if weight >= least}


Key = TypeVar("Key")


def _largest(weights: Mapping[Key, float], count: int) -> list[tuple[Key, float]]:
    return sorted(weights.items(), key=lambda item: -item[1])[:count]


def _lines(votes: Sequence[Vote]) -> tuple[str, ...]:
    common = Counter(vote.local.evidence for vote in votes).most_common(_MOST_LINES)
    return tuple(f"{line} ({times} times)" if times > 1 else line for line, times in common)


# --- one picture


def walk(picture: Picture) -> list[Vote]:
    """From each rank that waits to the rank that holds it up; nothing where that cannot be found."""
    scene = _Scene(picture)
    ends: list[tuple[Local, tuple[int, ...]]] = []
    for rank in scene.waiting:
        path = [rank]
        while len(path) < _WALK:
            local, following = scene.explain(path[-1])
            if local is not None:
                ends.append((local, tuple(path)))
                break
            onward = next((one for one in following if one not in path), None)
            if onward is None:
                break
            path.append(onward)
    return [Vote(path[-1], local, path, picture.t_s, 1 / len(ends)) for local, path in ends]


class _Scene:
    """One picture, by rank."""

    def __init__(self, picture: Picture) -> None:
        self._threads = {one.rank: one for one in sorted(picture.threads, key=lambda one: one.ran, reverse=True)}
        self._members = picture.members
        self._operations: dict[int, list[OperationState]] = defaultdict(list)
        self._newest: Counter[int] = Counter()
        """By communicator, the order of the newest operation that some kernel has begun."""
        for one in picture.operations:
            self._operations[one.rank].append(one)
            if one.begun:
                self._newest[one.comm] = max(self._newest[one.comm], one.order)
        flows = _current(picture.flows)
        self._sends: dict[int, list[FlowState]] = defaultdict(list)
        self._receives: dict[int, list[FlowState]] = defaultdict(list)
        for flow in flows:
            (self._sends if flow.side == "send" else self._receives)[flow.rank].append(flow)
        self._by_place = {(one.comm, one.channel, one.rank, one.peer, one.side): one for one in flows}
        self._known: dict[int, tuple[Local | None, tuple[int, ...]]] = {}

    @property
    def waiting(self) -> list[int]:
        """Ranks with something in flight."""
        begun = {rank for rank, several in self._operations.items() if any(one.begun for one in several)}
        return sorted({*self._sends, *self._receives, *begun})

    def explain(self, rank: int) -> tuple[Local | None, tuple[int, ...]]:
        """Why this rank does not get on by itself; or for whom it waits."""
        if rank not in self._known:
            self._known[rank] = self._explain(rank)
        return self._known[rank]

    def _explain(self, rank: int) -> tuple[Local | None, tuple[int, ...]]:
        for reason in (self._proxy(rank), self._launch(rank), self._device(rank)):
            if reason is not None:
                return reason, ()
        sends = [self._send(flow) for flow in self._sends[rank] if flow.head in ("send_peer", "send_wait")]
        links = [local for local, _ in sends if local is not None]
        if links and not any(onward is not None for _, onward in sends):
            return _joined(links, len(self._sends[rank])), ()
        onward = [peer for _, peer in sends if peer is not None]
        if not onward:
            received = [self._receive(flow) for flow in self._receives[rank] if flow.head == "recv_wait"]
            links += [local for local, _ in received if local is not None]
            if links:
                return _joined(links, len(self._receives[rank])), ()
            onward = [peer for _, peer in received if peer is not None]
        # without flows of its own it waits inside the node: for whoever has not begun
        return None, tuple(dict.fromkeys(onward or self._absent(rank)))

    def _proxy(self, rank: int) -> Local | None:
        thread = self._threads.get(rank)
        if thread is None or thread.ran + thread.delayed >= IDLE:
            return None
        what = {"T": "is stopped", "X": "is gone"}.get(thread.state, f"ran {thread.ran:.0%} of the time")
        return Local("proxy", None, (), True, f"rank {rank}: its proxy thread {what}, with flows open")

    def _launch(self, rank: int) -> Local | None:
        for one in self._operations[rank]:
            if one.begun == 0 and self._newest[one.comm] >= one.order:
                line = f"rank {rank}: has not begun the kernel of {one.op or 'an operation'} {one.order}, others have"
                return Local("host", None, (), True, line)
        for comm, order in self._newest.items():
            if rank in self._members.get(comm, ()) and not any(one.comm == comm for one in self._operations[rank]):
                return Local("host", None, (), True, f"rank {rank}: is in no operation, others in number {order}")
        return None

    def _device(self, rank: int) -> Local | None:
        """Its GPU, or the way to it."""
        receives = self._receives[rank]
        flushing = [flow for flow in receives if flow.head == "recv_flush"]
        if flushing:
            line = f"rank {rank}: data that has come is on its way to the GPU"
            return _local("pcie", flushing, len(receives), line)
        held = {flow.channel for flow in receives if flow.head == "recv_gpu"}
        ungiven = [flow for flow in self._sends[rank] if flow.head == "send_gpu"]
        slow = [flow for flow in ungiven if flow.channel in held]
        if slow:
            line = f"rank {rank}: the GPU neither takes what has come nor gives what is to be sent"
            return _local("gpu", slow, len(self._sends[rank]), line)
        first = [flow for flow in ungiven if flow.is_ring and flow.transmitted == 0]
        if first:
            line = f"rank {rank}: the GPU has not given its own first chunk"
            return _local("gpu", first, len(self._sends[rank]), line)
        return None

    def _send(self, flow: FlowState) -> tuple[Local | None, int | None]:
        """The network, or the receiver."""
        other = self._by_place.get((flow.comm, flow.channel, flow.peer, flow.rank, "receive"))
        if other is None or self._proxy(flow.peer) is not None:
            return None, flow.peer
        if other.head in ("recv_flush", "recv_gpu") and not _has_room(other):
            return None, flow.peer
        if flow.head == "send_peer":
            # asked for long ago by the receiver, as it says, and not known here: that word has gone missing
            asked = other.ready is not None and flow.transmitted is not None and other.ready > flow.transmitted
            return (self._link(flow), None) if asked else (None, flow.peer)
        if other.ready is not None and flow.done is not None and other.ready <= flow.done:
            return None, flow.peer
        return self._link(flow), None

    def _receive(self, flow: FlowState) -> tuple[Local | None, int | None]:
        """Whoever should have sent it; or what is between."""
        other = self._by_place.get((flow.comm, flow.channel, flow.peer, flow.rank, "send"))
        if other is None or other.head == "send_wait" or flow.received is None:
            return None, flow.peer
        # what follows in the same flow is sent when all of this operation has been
        sent = other.done if other.order == flow.order else flow.total if other.order > flow.order else None
        if sent is not None and sent > flow.received and min(flow.stuck_s, other.stuck_s) >= self._still_s(flow):
            if flow.transport == "socket":
                return self._link(other), None
            line = f"rank {flow.rank}: data is there that its proxy has not seen"
            return _local("proxy", [flow], len(self._receives[flow.rank]), line), None
        return None, flow.peer

    def _still_s(self, flow: FlowState) -> float:
        """A socket's data is on its way for a while, and that is what is looked for; InfiniBand's has arrived."""
        return STILL_S if flow.transport == "ib" else 0.0

    def _link(self, flow: FlowState) -> Local:
        way = "InfiniBand" if flow.transport == "ib" else "TCP"
        line = f"rank {flow.rank} to rank {flow.peer}: sent and not there ({way}), and the receiver waits for it"
        return Local("network", (flow.rank, flow.peer), (flow.channel,), False, line)

    def _absent(self, rank: int) -> tuple[int, ...]:
        """Members of its operations of which nothing is in flight there, or which have not begun it."""
        found = []
        for one in self._operations[rank]:
            for member in self._members.get(one.comm, ()):
                theirs = [two for two in self._operations[member] if two.comm == one.comm]
                if member != rank and not any(two.begun for two in theirs):
                    found.append(member)
        return tuple(found)


def _current(flows: Iterable[FlowState]) -> list[FlowState]:
    """Of each flow the oldest operation: what follows cannot move before it has."""
    first: dict[tuple[object, ...], FlowState] = {}
    for flow in flows:
        place = (flow.comm, flow.channel, flow.rank, flow.peer, flow.side)
        if place not in first or flow.order < first[place].order:
            first[place] = flow
    return list(first.values())


def _has_room(flow: FlowState) -> bool:
    """Whether a receiver whose GPU lags behind still asks for more."""
    if flow.ready is None or flow.received is None or flow.consumed is None:
        return False
    return flow.ready > flow.received and flow.received - flow.consumed < WINDOW


def _local(component: HeadComponent, flows: Sequence[FlowState], of: int, line: str) -> Local:
    channels = tuple(sorted({flow.channel for flow in flows}))
    return Local(component, None, channels, len(flows) >= of, line)


def _joined(links: Sequence[Local], flows: int) -> Local:
    """Several channels between the same two ranks are one link."""
    by_link: Mapping[object, list[Local]] = defaultdict(list)
    for one in links:
        by_link[one.link or one.component].append(one)
    most = max(by_link.values(), key=len)
    channels = tuple(sorted({channel for one in most for channel in one.channels}))
    return Local(most[0].component, most[0].link, channels, len(channels) >= flows, most[0].evidence)
