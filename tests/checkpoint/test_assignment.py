"""Pieces go where they cost least, within a bound; what is in the way moves."""

from __future__ import annotations

from collections import Counter

from evertrain.checkpoint.assignment import Piece, assign, bound_of


def piece(*tiers: set[int], size: int = 10, start: int = 0, first: int | None = None, needed: bool = True) -> Piece:
    costs = [((at, 0), sum(1 << node for node in nodes)) for at, nodes in enumerate(tiers) if nodes]
    return Piece(bytes=size, tiers=tuple(costs), start=start, first=first, needed=needed)


def test_the_walk_goes_around_and_the_first_choice_comes_first() -> None:
    assert assign([piece({0, 1, 2}, start=at) for at in (1, 2, 0)], 3) == [1, 2, 0]
    assert assign([piece({0, 1, 2}, start=1, first=at) for at in (2, 1, 0)], 3) == [2, 1, 0]
    assert assign([piece({0, 1}, {2}, start=1, first=2)], 3) == [1]


def test_what_is_in_the_way_moves_as_far_as_it_must() -> None:
    # two a node: the first four would fill 0 and 1, where alone the last ones can go
    pieces = [piece({0, 1, 2}) for _ in range(2)] + [piece({1, 2, 3}) for _ in range(2)] + [piece({0}), piece({0})]
    assert bound_of(pieces, 4) == 25
    places = assign(pieces, 4)
    assert places[4:] == [0, 0]
    assert max(Counter(places).values()) <= 2


def test_a_dearer_node_where_the_cheap_ones_are_full() -> None:
    places = assign([piece({0}, {1, 2}) for _ in range(6)], 3)
    assert Counter(places) == {0: 3, 1: 3} or Counter(places) == {0: 3, 1: 2, 2: 1}


def test_over_the_bound_only_what_is_needed_and_on_the_emptiest_node() -> None:
    pieces = [piece({0, 1}) for _ in range(10)]
    assert bound_of(pieces, 5) == 30
    assert Counter(assign(pieces, 5)) == {0: 5, 1: 5}
    optional = [piece({0, 1}, needed=False) for _ in range(10)]
    assert Counter(assign(optional, 5)) == {0: 3, 1: 3, None: 4}


def test_small_packings_are_searched_through() -> None:
    # largest first would put 9 on 0 and then 8 on 1, so that the other 8 has lost its only cheap node
    pieces = [
        piece({0, 1}, {2, 3}, size=9),
        piece({0, 1}, {2, 3}, size=8),
        piece({3}, {0, 1, 2}, size=3),
        piece({0}, {1, 2, 3}, size=8),
    ]
    assert bound_of(pieces, 4) == 16
    assert assign(pieces, 4) == [1, 0, 3, 0]


def test_moves_stay_within_the_bound_too() -> None:
    choices = [({2, 3}, 7), ({2}, 8), ({0, 2}, 9), ({0}, 4), ({0}, 4), ({0}, 9), ({0, 2}, 6)]
    pieces = [piece(nodes, size=size, needed=False) for nodes, size in choices]
    load: Counter[int | None] = Counter()
    for one, node in zip(pieces, assign(pieces, 4), strict=True):
        load[node] += one.bytes
    del load[None]
    assert max(load.values()) <= bound_of(pieces, 4) == 21


def test_what_had_to_move_for_nothing_goes_back() -> None:
    pieces = [piece({2}, {0, 1}, size=6), piece({2}, {0, 1}, size=6), piece({2}, size=3), piece({2}, {0, 1}, size=4)]
    assert bound_of(pieces, 3) == 13
    assert assign(pieces, 3) == [0, 2, 2, 2]


def test_what_is_dearer_makes_room_for_what_can_be_cheap() -> None:
    # two a node; five of these need nodes 1 to 3, and one has to go to 0, but not the one that 2 costs nothing
    pieces = [piece(set(), {3}, {1, 2}) for _ in range(5)] + [piece(set(), {2, 3}, {0}), piece({2}, {0, 3})]
    places = assign(pieces, 4)
    assert places[5:] == [0, 2]
    assert max(Counter(places).values()) == 2


def test_nothing_to_assign() -> None:
    assert assign([], 3) == []
    assert assign([piece({1}, size=0)], 2) == [1]
