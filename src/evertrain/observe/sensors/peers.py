"""Do other nodes answer? A TCP connection to where they give out copies, to those few that the controller names.

A connection that is refused is an answer, too: whether an agent lives is another question. What is seen accuses neither
end: it is told as it is, and the controller puts together what several nodes say. A look costs a fraction of a
millisecond for each peer.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Callable, Sequence

from evertrain.model.copies import Peer
from evertrain.model.sensing import PingReading, Seen

Rules = Callable[[Sequence[PingReading]], tuple[str, ...]]

DEADLINE_S = 2.0
_ANSWERS = (0, errno.EISCONN, errno.ECONNREFUSED, errno.ECONNRESET)


class PeersSensor:
    """`rules` say from the readings who cannot be reached."""

    name = "peers"
    period_s = 5.0
    limit_s = 10.0

    def __init__(
        self, rules: Rules, *, deadline_s: float = DEADLINE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rules = rules
        self._deadline_s = deadline_s
        self._clock = clock
        self._peers: tuple[Peer, ...] = ()
        self._unreachable: tuple[str, ...] = ()
        self._looked = 0.0

    @property
    def unreachable(self) -> tuple[str, ...]:
        """Names of peers, as of the last look; nobody once that is long ago: who cannot look accuses nobody."""
        return self._unreachable if self._clock() - self._looked <= self.period_s + self.limit_s else ()

    def obey(self, peers: tuple[Peer, ...]) -> None:
        self._peers = peers

    def look(self, now: float) -> Seen:
        if not self._peers:
            self._unreachable = self._rules(())
            return Seen(last="nobody to try")
        readings = ping(self._peers, self._deadline_s)
        self._looked, self._unreachable = self._clock(), self._rules(readings)
        answered = [one.seconds for one in readings if one.seconds is not None]
        within = f" within {max(answered) * 1e3:.1f} ms" if answered else ""
        missing = f"; {', '.join(self._unreachable)} cannot be reached" if self._unreachable else ""
        return Seen(last=f"{len(answered)} of {len(readings)} peers answer{within}{missing}")


def ping(peers: Sequence[Peer], deadline_s: float) -> list[PingReading]:
    """All beside each other."""
    seconds: dict[str, float | None] = {peer.node: None for peer in peers}
    began = time.monotonic()
    with selectors.DefaultSelector() as waiting:
        try:
            for peer in peers:
                _begin(peer, waiting, seconds)
            while waiting.get_map() and (left_s := began + deadline_s - time.monotonic()) > 0:
                for key, _ in waiting.select(left_s):
                    connection, node = key.fileobj, key.data
                    assert isinstance(connection, socket.socket)
                    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWERS:
                        seconds[node] = time.monotonic() - began
                    waiting.unregister(connection)
                    connection.close()
        finally:
            for key in list((waiting.get_map() or {}).values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()
    return [PingReading(peer=node, seconds=took) for node, took in seconds.items()]


def _begin(peer: Peer, waiting: selectors.BaseSelector, seconds: dict[str, float | None]) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(peer.address, peer.port, type=socket.SOCK_STREAM)[0]
        connection = socket.socket(family, kind, protocol)
    except OSError:
        return
    connection.setblocking(False)
    result = connection.connect_ex(address)
    if result == errno.EINPROGRESS:
        waiting.register(connection, selectors.EVENT_WRITE, peer.node)
        return
    connection.close()
    if result in _ANSWERS:
        seconds[peer.node] = 0.0
