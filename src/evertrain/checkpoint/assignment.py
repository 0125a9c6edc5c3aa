"""Which node takes which piece, when some nodes suit a piece better and no node may take much more than its share?

Sets of nodes are bit masks, since jobs have thousands of nodes: bit `i` stands for node `i`. Pieces of one size are
assigned as well as can be: as many as possible in their best tier, found by augmenting paths. Pieces of unequal sizes
are a packing problem: the largest go first, paths repair what does not fit, and small cases are searched through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from math import inf

import msgspec

Cost = tuple[float, float]
"""What a node costs a piece, the lower the better; the second number counts only between equals in the first."""
ANY: Cost = (inf, inf)

_ROOM_LEVELS = 32
_SEARCHED_PIECES = 64
_SEARCHED_STATES = 20_000
_CIRCLED_NODES = 64
"""With more of them a second is not enough to look for exchanges among several that save one a step."""
_REPAIR_VISITS = 1_000_000
"""A second or two: beyond it, pieces that fit nowhere directly take a worse tier without a search for room."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    bytes: int
    tiers: tuple[tuple[Cost, int], ...]
    """The nodes of each cost, cheapest first. Nodes in no tier are out of the question."""
    start: int
    """Where the walk around the nodes begins: of equal nodes the next one is taken."""
    first: int | None = None
    """The node to take if it is in the first tier and has not got its share."""
    shunned: int = 0
    """Nodes to take only where others that are as good have got their share."""
    needed: bool
    """Better on a node that is over the bound than nowhere."""

    def cost_of(self, node: int) -> Cost:
        return next(cost for cost, members in self.tiers if members >> node & 1)

    def within(self, cost: Cost) -> int:
        """The nodes that cost at most this."""
        nodes = 0
        for tier, members in self.tiers:
            if tier <= cost:
                nodes |= members
        return nodes


def bound_of(pieces: Sequence[Piece], nodes: int) -> int:
    """No node takes more bytes than this: an even share, and one piece."""
    return -(-sum(piece.bytes for piece in pieces) // nodes) + max((piece.bytes for piece in pieces), default=0)


def assign(pieces: Sequence[Piece], nodes: int) -> list[int | None]:
    """A node for each piece, None where it would be over the bound and the piece is not needed."""
    table = _Table(pieces, nodes)
    waiting = sorted(range(len(pieces)), key=lambda index: -pieces[index].bytes)
    for cost in sorted({tier for piece in pieces for tier, _ in piece.tiers}):
        # what has been placed gives up the second number of its cost only where it saves another the first number
        freedoms = (_Freedom.NONE, _Freedom.SECOND_NUMBER) if cost > (0, 0) else (_Freedom.NONE,)
        table.begin_round()
        waiting = [index for index in waiting if not table.settle(index, cost, freedoms)]

    best = [piece.tiers[0][1] for piece in pieces]
    best_in_first_number = [piece.within((piece.tiers[0][0][0], inf)) for piece in pieces]
    for choices in (best, best_in_first_number):
        if not table.is_settled(choices) and (found := _search(pieces, choices, nodes)):
            return found

    table.begin_round()
    needed = [index for index in waiting if pieces[index].needed]
    stuck = [index for index in needed if not table.settle(index, ANY, (_Freedom.ALL,))]
    if stuck and (found := _search(pieces, [piece.within(ANY) for piece in pieces], nodes)):
        return found
    for index in stuck:
        table.put(index, table.least_loaded(index))
    if needed:
        table.improve()
    return table.place


class _Freedom(IntEnum):
    """What a placed piece may lose when it has to make room."""

    NONE = 0
    SECOND_NUMBER = 1
    ALL_IF_DEARER = 2
    """Those that cost more than what makes them move may end up anywhere."""
    ALL = 3


class _Table:
    """Who has what so far."""

    def __init__(self, pieces: Sequence[Piece], nodes: int) -> None:
        self.pieces = pieces
        self.place: list[int | None] = [None] * len(pieces)
        self._nodes = nodes
        self._bound = bound_of(pieces, nodes)
        self._total = sum(piece.bytes for piece in pieces)
        self._largest = max((piece.bytes for piece in pieces), default=0) or 1
        self._load = [0] * nodes
        self._on: list[list[int]] = [[] for _ in range(nodes)]
        self._cost: list[Cost] = [(0, 0)] * len(pieces)
        self._hold = [0] * len(pieces)
        """Where a placed piece may be moved to."""
        self._below_share = (1 << nodes) - 1 if self._total else 0
        self._with_room_for = [0] * _ROOM_LEVELS + [(1 << nodes) - 1]
        """Nodes by how much of the largest piece they could take still, in equal steps."""
        self._visits_left = _REPAIR_VISITS
        self._exhausted = [0] * len(_Freedom)
        self._exhausted_for = 0

    def begin_round(self) -> None:
        """Forget which nodes searches for room have been through: pieces may go to others now."""
        self._exhausted = [0] * len(_Freedom)

    def settle(self, index: int, cost: Cost, freedoms: Sequence[_Freedom]) -> bool:
        """Place a piece at no more than this cost, moving others if that makes room."""
        piece = self.pieces[index]
        nodes = piece.within(cost)
        if not nodes:
            return False
        self._bind(index, cost)
        node = self._choose(piece, nodes)
        if node is not None:
            self.put(index, node)
            return True
        return any(self._repair(index, nodes, freedom) for freedom in freedoms)

    def put(self, index: int, node: int) -> None:
        self.place[index] = node
        self._on[node].append(index)
        self._weigh(node, self.pieces[index].bytes)

    def least_loaded(self, index: int) -> int:
        piece = self.pieces[index]
        nodes = _around(piece.within(ANY), piece.start)
        return min(nodes, key=lambda node: self._load[node])

    def is_settled(self, choices: Sequence[int]) -> bool:
        """Whether every piece is on one of its nodes."""
        return all(node is not None and nodes >> node & 1 for nodes, node in zip(choices, self.place, strict=True))

    def improve(self) -> None:
        """Take pieces back to cheaper nodes where that costs none anything that is as cheap then."""
        placed = [(index, node) for index, node in enumerate(self.place) if node is not None]
        for index, node in placed:
            self._bind(index, self.pieces[index].cost_of(node))
        for index, _ in placed:
            self._take_back(index)
        if self._nodes <= _CIRCLED_NODES and len({piece.bytes for piece in self.pieces}) == 1:
            while circle := self._cheaper_circle():
                for index, node in circle:
                    self._take(index)
                    self.put(index, node)
                    self._bind(index, self.pieces[index].cost_of(node))

    def _cheaper_circle(self) -> list[tuple[int, int]]:
        """Pieces that each go where the next one leaves, or where there is room, and cost less in all; empty: none do.

        A circle of negative length in the graph of nodes (Bellman-Ford). Pieces are of one size, so loads stay.
        """
        room = self._nodes
        leaves: dict[tuple[int, int], tuple[Cost, int]] = {}
        for index, node in enumerate(self.place):
            if node is None:
                continue
            now = self.pieces[index].cost_of(node)
            leaves[room, node] = ((0, 0), -1)
            for cost, members in self.pieces[index].tiers:
                more = (cost[0] - now[0], cost[1] - now[1])
                for other in _around(members & ~(1 << node), 0):
                    if (node, other) not in leaves or more < leaves[node, other][0]:
                        leaves[node, other] = (more, index)
        for node in range(self._nodes):
            if self._load[node] + self._largest <= self._bound:
                leaves[node, room] = ((0, 0), -1)

        length: list[Cost] = [(0, 0)] * (room + 1)
        before = [-1] * (room + 1)
        last = -1
        for _ in range(room + 1):
            last = -1
            for (start, end), (more, _) in leaves.items():
                longer = (length[start][0] + more[0], length[start][1] + more[1])
                if longer < length[end]:
                    length[end], before[end], last = longer, start, end
            if last < 0:
                return []
        for _ in range(room + 1):  # back into the circle
            last = before[last]
        circle, end = [], last
        while True:
            start = before[end]
            if (index := leaves[start, end][1]) >= 0:
                circle.append((index, end))
            if start == last:
                return circle
            end = start

    def _take_back(self, index: int) -> None:
        cost = self._cost[index]
        for cheaper, _ in self.pieces[index].tiers:
            if cheaper == cost:
                return
            before = self._take(index)
            self.begin_round()
            if self.settle(index, cheaper, (_Freedom.NONE, _Freedom.ALL_IF_DEARER)):
                return
            self._bind(index, cost)
            self.put(index, before)

    def _bind(self, index: int, cost: Cost) -> None:
        self._cost[index], self._hold[index] = cost, self.pieces[index].within(cost)

    def _take(self, index: int) -> int:
        node = self.place[index]
        assert node is not None
        self.place[index] = None
        self._on[node].remove(index)
        self._weigh(node, -self.pieces[index].bytes)
        return node

    def _weigh(self, node: int, more: int) -> None:
        bit = 1 << node
        self._with_room_for[self._room_level(node)] &= ~bit
        load = self._load[node] = self._load[node] + more
        self._with_room_for[self._room_level(node)] |= bit
        self._below_share = self._below_share & ~bit | (bit if load * self._nodes < self._total else 0)

    def _room_level(self, node: int) -> int:
        return max(0, min(_ROOM_LEVELS, (self._bound - self._load[node]) * _ROOM_LEVELS // self._largest))

    def _choose(self, piece: Piece, nodes: int) -> int | None:
        # a node below its share can take any piece and stay within the bound
        if piece.first is not None and piece.tiers[0][1] & self._below_share & 1 << piece.first:
            return piece.first
        below_share = nodes & self._below_share
        node = _next(below_share & ~piece.shunned, piece.start)
        if node is None:
            node = _next(below_share, piece.start)
        return self._with_room(piece, nodes) if node is None else node

    def _with_room(self, piece: Piece, nodes: int) -> int | None:
        level, between = divmod(piece.bytes * _ROOM_LEVELS, self._largest)
        certain = 0
        for members in self._with_room_for[level + 1 if between else level :]:
            certain |= members
        node = _next(nodes & certain, piece.start)
        if node is None and between:
            for near in _around(nodes & self._with_room_for[level], piece.start):
                if self._load[near] + piece.bytes <= self._bound:
                    return near
        return node

    def _repair(self, index: int, nodes: int, freedom: _Freedom) -> bool:
        """Move one piece to make room for the next, and so on, along the shortest such path there is."""
        if self._exhausted_for != self.pieces[index].bytes:
            self.begin_round()
            self._exhausted_for = self.pieces[index].bytes
        seen = nodes | self._exhausted[freedom]
        # a piece, the full nodes it could go to and that no earlier entry has, where it is, the entry that comes there
        paths = [(index, nodes & ~self._exhausted[freedom], -1, -1)]
        for entry, (comes, full_nodes, _, _) in enumerate(paths):
            for node in _around(full_nodes, 0):
                if self._visits_left < 0:
                    return False
                self._visits_left -= len(self._on[node])
                for moves in self._on[node]:
                    if self._load[node] - self.pieces[moves].bytes + self.pieces[comes].bytes > self._bound:
                        continue
                    reached = self._reach(moves, freedom, self._cost[index]) & ~seen
                    if not reached:
                        continue
                    free = self._with_room(self.pieces[moves], reached)
                    if free is not None:
                        self._shift(paths, moves, free, node, entry)
                        return True
                    seen |= reached
                    paths.append((moves, reached, node, entry))
        # nothing placed on these nodes can leave them: the next search need not look there again
        self._exhausted[freedom] = seen
        return False

    def _reach(self, index: int, freedom: _Freedom, cost: Cost) -> int:
        if freedom == _Freedom.ALL or (freedom == _Freedom.ALL_IF_DEARER and self._cost[index] > cost):
            return self.pieces[index].within(ANY)
        if freedom == _Freedom.SECOND_NUMBER:
            return self.pieces[index].within((self._cost[index][0], inf))
        return self._hold[index]

    def _shift(self, paths: list[tuple[int, int, int, int]], moves: int, free: int, node: int, entry: int) -> None:
        self._move(moves, free)
        while True:
            comes, _, origin, entry_before = paths[entry]
            self._move(comes, node)
            if origin < 0:
                return
            node, entry = origin, entry_before

    def _move(self, index: int, node: int) -> None:
        if self.place[index] is not None:
            self._take(index)
        self.put(index, node)
        self._bind(index, max(self._cost[index], self.pieces[index].cost_of(node)))


def _search(pieces: Sequence[Piece], choices: Sequence[int], nodes: int) -> list[int | None] | None:
    """Give every piece one of its nodes: all ways are tried, if pieces are few and no two ways look the same."""
    if len(pieces) > _SEARCHED_PIECES or len({piece.bytes for piece in pieces}) == 1:
        return None  # paths have found whatever there is for pieces of one size
    bound = bound_of(pieces, nodes)
    order = sorted(range(len(pieces)), key=lambda index: (-pieces[index].bytes, choices[index].bit_count()))
    place: list[int | None] = [None] * len(pieces)
    load = [0] * nodes
    hopeless: set[tuple[int, ...]] = set()

    def extend(depth: int) -> bool:
        if depth == len(order):
            return True
        state = (depth, *load)
        if state in hopeless or len(hopeless) > _SEARCHED_STATES:
            return False
        index = order[depth]
        size = pieces[index].bytes
        for node in _around(choices[index], pieces[index].start):
            if load[node] + size <= bound:
                load[node] += size
                place[index] = node
                if extend(depth + 1):
                    return True
                load[node] -= size
        hopeless.add(state)
        return False

    return place if extend(0) else None


def _next(nodes: int, start: int) -> int | None:
    """The first of these nodes from `start` on, around."""
    after = nodes >> start
    if after:
        return start + (after & -after).bit_length() - 1
    return (nodes & -nodes).bit_length() - 1 if nodes else None


def _around(nodes: int, start: int) -> Iterator[int]:
    """All of these nodes from `start` on, around."""
    while (node := _next(nodes, start)) is not None:
        yield node
        nodes &= ~(1 << node)
