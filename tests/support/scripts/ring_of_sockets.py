"""One rank of a ring without torch: sends a block to the next one and takes one from the one before, again and again.

    ring_of_sockets.py RANK OWN_ADDRESS NEXT_ADDRESS BLOCK_BYTES PAUSE_S

It goes on until its standard input ends; `ready` is said once both connections are there.
"""

from __future__ import annotations

import socket
import sys
import threading
import time

PORT = 5000


def main() -> None:
    _, own, following = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    size, pause_s = int(sys.argv[4]), float(sys.argv[5])
    server = socket.create_server((own, PORT))
    outgoing = _connected(following)
    incoming, _ = server.accept()
    for one in (outgoing, incoming):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    print("ready", flush=True)
    threading.Thread(target=_until_the_end, daemon=True).start()
    block, room = bytes(size), bytearray(size)
    while True:
        sending = threading.Thread(target=outgoing.sendall, args=(block,), daemon=True)
        sending.start()
        view = memoryview(room)
        while view:
            count = incoming.recv_into(view)
            if not count:
                return
            view = view[count:]
        sending.join()
        time.sleep(pause_s)


def _connected(address: str) -> socket.socket:
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _until_the_end() -> None:
    import os

    sys.stdin.read()
    os._exit(0)


main()
