"""How does one thread wait for everything at once? Readable descriptors and deadlines call functions.

The keeper never blocks elsewhere: a death on a node is news within a millisecond, whatever else goes on.
"""

from __future__ import annotations

import heapq
import itertools
import selectors
import time
from collections.abc import Callable

Act = Callable[[], None]


class Deadline:
    """An appointment that can be called off."""

    def __init__(self, when: float, act: Act) -> None:
        self.when = when
        self.act: Act | None = act

    def cancel(self) -> None:
        self.act = None


class Loop:
    """One epoll and one heap of deadlines.

    Descriptors are reported in the order in which they became ready, so deaths are seen in the order in which they
    happened even when several wait for the same turn.
    """

    def __init__(self) -> None:
        self._selector = selectors.EpollSelector()
        self._deadlines: list[tuple[float, int, Deadline]] = []
        self._numbers = itertools.count()

    def watch(self, descriptor: int, readable: Act | None = None, writable: Act | None = None) -> None:
        """Call `readable` or `writable` whenever the descriptor is. Replaces what was watched for before."""
        events = (selectors.EVENT_READ if readable else 0) | (selectors.EVENT_WRITE if writable else 0)
        acts = (readable, writable)
        if descriptor in self._selector.get_map():
            self._selector.modify(descriptor, events, acts)
        else:
            self._selector.register(descriptor, events, acts)

    def unwatch(self, descriptor: int) -> None:
        if descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)

    def after(self, delay_s: float, act: Act) -> Deadline:
        deadline = Deadline(time.monotonic() + delay_s, act)
        heapq.heappush(self._deadlines, (deadline.when, next(self._numbers), deadline))
        return deadline

    def turn(self, at_most_s: float) -> None:
        """Wait for the next thing to happen, and let it happen."""
        if self._deadlines:
            at_most_s = min(at_most_s, self._deadlines[0][0] - time.monotonic())
        for key, events in self._selector.select(max(0.0, at_most_s)):
            readable, writable = key.data
            # an earlier act of this turn may have closed it, and its number may be another one's by now
            if events & selectors.EVENT_READ and readable and self._is_current(key):
                readable()
            if events & selectors.EVENT_WRITE and writable and self._is_current(key):
                writable()
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            deadline = heapq.heappop(self._deadlines)[2]
            if deadline.act:
                deadline.act()

    def _is_current(self, key: selectors.SelectorKey) -> bool:
        return self._selector.get_map().get(key.fd) is key
