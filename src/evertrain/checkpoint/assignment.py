"""Which node takes which piece, when some nodes suit a piece better and no node may take much more than its share?

Sets of nodes are bit masks, since jobs have thousands of nodes: bit `i` stands for node `i`. Pieces of one size are
assigned as well as can be: as many as possible in their best tier, found by augmenting paths. Pieces of unequal sizes
are a packing problem: the largest go first, paths repair what does not fit, and small cases are searched through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

import msgspec

Cost = tuple[int, int]
"""What a node costs a piece, the lower the better; the second number counts only between equals in the first."""

_SEARCHED_PIECES = 64
_SEARCHED_STATES = 20_000
_REPAIR_VISITS = 1_000_000
"""About a second: beyond it, pieces of unequal sizes that fit nowhere directly take a worse tier without a search."""


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

    def within(self, cost: tuple[float, float]) -> int:
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
        table.begin_round()
        waiting = [index for index in waiting if not table.settle(index, cost)]
    if not table.is_best() and (found := _searched(pieces, nodes)):
        return found
    for index in waiting:
        if pieces[index].needed:
            table.put(index, table.least_loaded(index))
    return table.place


class _Table:
    """Who has what so far."""

    def __init__(self, pieces: Sequence[Piece], nodes: int) -> None:
        self.pieces = pieces
        self.place: list[int | None] = [None] * len(pieces)
        self._nodes = nodes
        self._bound = bound_of(pieces, nodes)
        self._total = sum(piece.bytes for piece in pieces)
        self._smallest = min((piece.bytes for piece in pieces), default=0)
        self._equal = all(piece.bytes == self._smallest for piece in pieces)
        self._load = [0] * nodes
        self._on: list[list[int]] = [[] for _ in range(nodes)]
        self._cost: list[Cost] = [(0, 0)] * len(pieces)
        self._hold = [0] * len(pieces)
        """Where a placed piece may be moved to."""
        self._below_share = (1 << nodes) - 1 if self._total else 0
        self._not_full = (1 << nodes) - 1
        self._visits_left = _REPAIR_VISITS
        self._exhausted = [0, 0]
        self._exhausted_for = 0

    def begin_round(self) -> None:
        self._exhausted = [0, 0]

    def settle(self, index: int, cost: Cost) -> bool:
        """Place a piece at no more than this cost, moving others within their own cost if that makes room."""
        piece = self.pieces[index]
        nodes = piece.within(cost)
        if not nodes:
            return False
        self._cost[index], self._hold[index] = cost, nodes
        node = self._choose(piece, nodes)
        if node is not None:
            self.put(index, node)
            return True
        # what has been placed gives up the second number of its cost only where it saves another the first number
        return self._repair(index, nodes, loosely=False) or (cost > (0, 0) and self._repair(index, nodes, loosely=True))

    def put(self, index: int, node: int) -> None:
        self.place[index] = node
        self._on[node].append(index)
        self._weigh(node, self.pieces[index].bytes)

    def least_loaded(self, index: int) -> int:
        piece = self.pieces[index]
        nodes = _around(piece.within((len(self.pieces), inf)) | piece.tiers[-1][1], piece.start)
        return min(nodes, key=lambda node: self._load[node])

    def is_best(self) -> bool:
        """Whether nothing better can be found: by search, if sizes differ and the case is small."""
        if self._equal or len(self.pieces) > _SEARCHED_PIECES:
            return True
        return all(
            node is not None and piece.tiers[0][1] >> node & 1
            for piece, node in zip(self.pieces, self.place, strict=True)
        )

    def _weigh(self, node: int, more: int) -> None:
        bit = 1 << node
        load = self._load[node] = self._load[node] + more
        self._below_share = self._below_share & ~bit | (bit if load * self._nodes < self._total else 0)
        self._not_full = self._not_full & ~bit | (bit if load + self._smallest <= self._bound else 0)

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
        for node in _around(nodes & self._not_full, piece.start):
            if self._load[node] + piece.bytes <= self._bound:
                return node
        return None

    def _repair(self, index: int, nodes: int, *, loosely: bool) -> bool:
        """Move one piece to make room for the next, and so on, along the shortest such path there is."""
        if self._exhausted_for != self.pieces[index].bytes:
            self._exhausted, self._exhausted_for = [0, 0], self.pieces[index].bytes
        seen = nodes | self._exhausted[loosely]
        # a piece, the full nodes it could go to and that no earlier entry has, where it is, the entry that comes there
        paths = [(index, nodes & ~self._exhausted[loosely], -1, -1)]
        for entry, (comes, full_nodes, _, _) in enumerate(paths):
            for node in _around(full_nodes, 0):
                for moves in self._on[node]:
                    if not self._equal:
                        self._visits_left -= 1
                        room = self._bound - self._load[node] + self.pieces[moves].bytes
                        if room < self.pieces[comes].bytes or self._visits_left < 0:
                            continue
                    reached = self._reach(moves, loosely) & ~seen
                    if not reached:
                        continue
                    free = self._with_room(self.pieces[moves], reached)
                    if free is not None:
                        self._shift(paths, moves, free, node, entry)
                        return True
                    seen |= reached
                    paths.append((moves, reached, node, entry))
        # nothing placed on these nodes can leave them: the next search need not look there again
        self._exhausted[loosely] = seen
        return False

    def _reach(self, index: int, loosely: bool) -> int:
        return self.pieces[index].within((self._cost[index][0], inf)) if loosely else self._hold[index]

    def _shift(self, paths: list[tuple[int, int, int, int]], moves: int, free: int, node: int, entry: int) -> None:
        self._move(moves, free)
        while True:
            comes, _, origin, entry_before = paths[entry]
            self._move(comes, node)
            if origin < 0:
                return
            node, entry = origin, entry_before

    def _move(self, index: int, node: int) -> None:
        before = self.place[index]
        if before is not None:
            self._on[before].remove(index)
            self._weigh(before, -self.pieces[index].bytes)
        self.put(index, node)
        piece = self.pieces[index]
        cost = next(cost for cost, members in piece.tiers if members >> node & 1)
        if cost > self._cost[index]:
            self._cost[index], self._hold[index] = cost, piece.within(cost)


def _searched(pieces: Sequence[Piece], nodes: int) -> list[int | None] | None:
    """All pieces in their best tier, if the search finds it; else as good in the first number of the cost."""
    for choices in (
        [piece.tiers[0][1] for piece in pieces],
        [piece.within((piece.tiers[0][0][0], inf)) for piece in pieces],
    ):
        if found := _search(pieces, choices, nodes):
            return found
    return None


def _search(pieces: Sequence[Piece], choices: Sequence[int], nodes: int) -> list[int | None] | None:
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
