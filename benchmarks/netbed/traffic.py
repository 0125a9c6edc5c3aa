"""What other jobs do to a network: TCP connections that send all they can, or take it, until this process is ended.

traffic.py sink ADDRESS PORT
traffic.py send ADDRESS PORT CONNECTIONS
"""

from __future__ import annotations

import selectors
import socket
import sys
import time

CHUNK = bytes(1 << 18)
CONNECT_LIMIT_S = 5.0


def sink(address: str, port: int) -> None:
    """Takes everything, and throws it away in the kernel."""
    server = socket.create_server((address, port), backlog=64)
    watched = selectors.DefaultSelector()
    watched.register(server, selectors.EVENT_READ)
    while True:
        for key, _ in watched.select():
            if key.fileobj is server:
                connection, _ = server.accept()
                connection.setblocking(False)
                watched.register(connection, selectors.EVENT_READ)
            else:
                connection = key.fileobj  # type: ignore[assignment]
                try:
                    if not connection.recv(1 << 20, socket.MSG_TRUNC):
                        raise ConnectionError
                except BlockingIOError:
                    pass
                except ConnectionError:
                    watched.unregister(connection)
                    connection.close()


def send(address: str, port: int, connections: int) -> None:
    watched = selectors.DefaultSelector()
    for _ in range(connections):
        connection = _connect(address, port)
        connection.setblocking(False)
        watched.register(connection, selectors.EVENT_WRITE)
    while True:
        for key, _ in watched.select():
            try:
                key.fileobj.send(CHUNK)  # type: ignore[union-attr]
            except BlockingIOError:
                pass


def _connect(address: str, port: int) -> socket.socket:
    deadline = time.monotonic() + CONNECT_LIMIT_S
    while True:
        try:
            return socket.create_connection((address, port), 1)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


if __name__ == "__main__":
    what, where, number, *more = sys.argv[1:]
    sink(where, int(number)) if what == "sink" else send(where, int(number), int(more[0]))
