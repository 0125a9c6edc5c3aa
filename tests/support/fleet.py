"""Nodes for tests: each is a process that serves test programs, forked from one that has imported torch.

node = fleet.node("node-1", ranks=2)
done = node.test("compute", size=64)

With `netns` (the name of a network namespace) it lives there.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

Line = dict[str, Any]
_CLONE_NEWNET = 0x40000000


class Done(NamedTuple):
    outcome: str
    because: str
    seconds: float
    readings: list[Line]

    def named(self, name: str) -> list[Line]:
        """By rank."""
        return sorted((one for one in self.readings if one["name"] == name), key=lambda one: one["rank"])


class Node:
    """The agent's end of one node."""

    def __init__(self, path: Path, given: Line) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(90)
        self._sock.connect(str(path))
        self._lines = self._sock.makefile("r")
        self._asked = 0
        self._say(given)
        self.ready = self.hear()
        self.name = given.get("node", "")

    def ask(self, program: str, *, budget_s: float = 60, **parameters: Any) -> None:
        self._asked += 1
        self._say({"id": self._asked, "program": program, "budget_s": budget_s, "parameters": parameters})

    def hear_done(self) -> Done:
        readings = []
        while (line := self.hear())["is"] == "reading":
            readings.append(line)
        return Done(line["outcome"], line["because"], line["seconds"], readings)

    def test(self, program: str, *, budget_s: float = 60, **parameters: Any) -> Done:
        self.ask(program, budget_s=budget_s, **parameters)
        return self.hear_done()

    def hear(self) -> Line:
        line: Line = json.loads(self._lines.readline())
        return line

    def _say(self, line: Line) -> None:
        self._sock.sendall(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        self._lines.close()
        self._sock.close()


class Fleet:
    def __init__(self, path: Path, folder: Path) -> None:
        self._path = path
        self._open: list[Node] = []
        self.folder = folder

    def node(self, name: str, *, ranks: int = 1, fault: str = "", **given: Any) -> Node:
        environ = {"EVERTRAIN_DIAGNOSE_FAULT": fault} if fault else {}
        told = {"node": name, "ranks": ranks, "device": "cpu", "folder": str(self.folder), "environ": environ, **given}
        self._open.append(Node(self._path, told))
        return self._open[-1]

    def store(self, host: str = "127.0.0.1", netns: str = "") -> dict[str, Any]:
        """Where somebody serves a TCPStore, until the fleet is closed."""
        self._open.append(Node(self._path, {"do": "store", "netns": netns}))
        return {"host": host, "port": self._open[-1].ready["port"]}

    def close(self) -> None:
        for one in self._open:
            one.close()


@contextmanager
def server(path: Path) -> Iterator[Path]:
    """Serves nodes at this socket."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    started = subprocess.Popen([sys.executable, __file__, str(path)], env=environ, stdout=subprocess.PIPE)
    assert started.stdout is not None
    try:
        assert started.stdout.readline() == b"ready\n"
        yield path
    finally:
        started.terminate()
        started.wait()
        started.stdout.close()


def _enter(netns: str) -> None:
    with open(f"/run/netns/{netns}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {netns}")


def _main(path: str) -> None:
    import torch.distributed
    from torch._C._distributed_c10d import TCPStore

    from evertrain.diagnose import alignment, compute, exchange, serve
    from evertrain.worker import disguise

    assert torch.distributed and alignment and compute and exchange
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        parent = os.getpid()
        if os.fork() == 0:
            disguise.die_with_parent(parent)
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            descriptor = connection.detach()
            given = json.loads(socket.socket(fileno=os.dup(descriptor)).recv(1 << 16, socket.MSG_PEEK))
            if given.get("netns"):
                _enter(given["netns"])
            if given.get("do") == "store":
                store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                os.write(descriptor, json.dumps({"port": store.port}).encode() + b"\n")
                while os.read(descriptor, 1000):
                    pass
                os._exit(0)
            serve.serve(descriptor, descriptor)
        connection.close()


if __name__ == "__main__":
    _main(sys.argv[1])
