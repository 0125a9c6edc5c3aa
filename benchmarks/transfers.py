"""How fast does a rank's state come back from another node? Against a plain TCP connection that carries as many bytes.

Ours is what an agent does to restore a rank: it asks for the head and takes every part, each chunk compared with its
checksum. The plain connection is `sendall` from a mapped file to `recv_into` another one. Both write into memory that
is there; `whole` adds the slot, allocated beside what arrives. Both ends are processes of this machine, so they share
its cores and the speed of its memory.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import multiprocessing
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from evertrain.agent.fetching import Fetching
from evertrain.checkpoint import sums, transfer
from evertrain.checkpoint.backups import Shelf
from evertrain.model.copies import Fetch, Peer
from evertrain.worker import slots

MEMORY = Path("/dev/shm")
_PIECE = 4 << 20


class Times(NamedTuple):
    """Seconds, one a round; the first round, in which everything is cold, is left out."""

    ours: list[float]
    plain: list[float]
    whole: list[float]


def peer_restore(mib: int, rounds: int) -> Times:
    folder = Path(tempfile.mkdtemp(prefix="evertrain-benchmark-", dir=MEMORY))
    size = mib << 20
    try:
        _save(folder / "far", size)
        ours, plain, whole = [], [], []
        with _process(_give_out, folder / "far") as port, _process(_send, folder / "far") as plain_port:
            for _ in range(rounds + 1):
                into = _memory(folder / "into", size)
                plain.append(_receive(into, plain_port))
                ours.append(_take(into, port))
                whole.append(_fetch(folder / "near", port))
        return Times(ours[1:], plain[1:], whole[1:])
    finally:
        shutil.rmtree(folder)


def _save(folder: Path, size: int) -> None:
    """A slot of rank 0 with one part of so many bytes."""
    path = folder / "slots/r0/0"
    path.parent.mkdir(parents=True)
    chunk = os.urandom(slots.CHUNK_BYTES)
    parts = (slots.Part("model", 0, size),)
    directory = json.dumps({"parts": [{**part._asdict(), "tensors": []} for part in parts]}).encode()
    found = slots.pack_sums([sums.of_chunk(chunk)] * (size // slots.CHUNK_BYTES))
    header = slots.SlotHeader(
        slots.COMPLETE, "job", 1, 1, 0, 1, 1, 0.0, size, 0, crc32(b""), len(directory), crc32(directory), len(found),
        crc32(found),
    )  # fmt: skip
    with path.open("wb") as file:
        file.write(slots.pack(header).ljust(slots.HEADER_BYTES, b"\0"))
        for _ in range(size // slots.CHUNK_BYTES):
            file.write(chunk)
        file.write(directory + found)


def _ask(peer: Peer, stop: threading.Event) -> transfer.Client:
    return transfer.Client(peer, job="job", term=lambda: 1, token="token", stop=stop)


def _take(into: memoryview, port: int) -> float:
    began = time.perf_counter()
    with _ask(Peer("far", "127.0.0.1", port), threading.Event()) as client:
        for place in client.head((1, 1), 0).places:
            client.part((1, 1), transfer.Arriving(place.part, into[: place.part.bytes]))
    return time.perf_counter() - began


def _fetch(folder: Path, port: int) -> float:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "slots").mkdir(parents=True)
    wanted = Fetch(rank=0, attempt=1, step=1, peers=(Peer("far", "127.0.0.1", port),), within_s=600.0)
    began = time.perf_counter()
    Fetching(wanted, str(folder / "slots"), str(folder / "disk"), _ask, threading.Event()).bring()
    return time.perf_counter() - began


def _memory(path: Path, size: int) -> memoryview:
    """A mapped file whose pages are there."""
    with path.open("a+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        whole = mmap.mmap(file.fileno(), size)
    for at in range(0, size, mmap.PAGESIZE):
        whole[at] = 1
    return memoryview(whole)


def _receive(into: memoryview, port: int) -> float:
    began = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        done = 0
        while done < len(into):
            done += connection.recv_into(into[done : done + _PIECE])
    return time.perf_counter() - began


# -- the other end


@contextmanager
def _process(target: object, folder: Path) -> Iterator[int]:
    """Runs beside us for as long as the block does; the port that it listens on."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(folder, there), daemon=True)  # type: ignore[arg-type]
    process.start()
    try:
        yield here.recv()
    finally:
        process.kill()
        process.join()


def _give_out(folder: Path, ready: Connection) -> None:
    async def serve() -> None:
        shelf = Shelf(str(folder / "slots"), str(folder / "disk"), str(folder / "backups"))
        ready.send(await transfer.Server(shelf, "job", "token").start("127.0.0.1"))
        await asyncio.Event().wait()

    asyncio.run(serve())


def _send(folder: Path, ready: Connection) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    ready.send(listener.getsockname()[1])
    with (folder / "slots/r0/0").open("rb") as file:
        whole = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    size = len(whole) // slots.CHUNK_BYTES * slots.CHUNK_BYTES
    while True:
        connection, _ = listener.accept()
        with connection:
            for at in range(0, size, _PIECE):
                connection.sendall(whole[at : min(at + _PIECE, size)])
