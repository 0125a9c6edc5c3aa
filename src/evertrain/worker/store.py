"""Which process serves an attempt's TCPStore? One that does nothing else, on a socket that the keeper has opened.

The keeper knows the port before this process runs, and ranks may connect meanwhile: they are served when it is ready.
It ends with its line to the keeper.
"""

from __future__ import annotations

import os
import socket
from typing import NoReturn

from evertrain.worker import disguise
from evertrain.worker.launch import Given


def main(given: Given, _: frozenset[str]) -> None:
    """Without a zygote: import what it takes, and serve."""
    disguise.take_stdin(given["stdin"])
    disguise.die_with_parent(given["keeper"])
    serve(given["channel"], given["listener"])


def serve(channel: int, listener: int) -> NoReturn:
    disguise.name_process("evertrain-store")
    from torch._C._distributed_c10d import TCPStore

    bound = socket.socket(fileno=listener)
    port = bound.getsockname()[1]
    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=bound.detach())
    while os.read(channel, 1 << 10):
        pass
    del store
    os._exit(0)
