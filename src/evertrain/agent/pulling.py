"""How does a copy for another node's rank come here? Into a file of its own; under its name only when it is whole."""

from __future__ import annotations

import mmap
import os

from evertrain.checkpoint.backups import PARTIAL, Shelf
from evertrain.checkpoint.transfer import Arriving, Client
from evertrain.model.copies import Part, Pull
from evertrain.worker import mapping, room


class NoRoom(Exception):
    """This node cannot keep what it should; the text says how much that is."""


def pull(wanted: Pull, shelf: Shelf, client: Client, all_bytes: int) -> None:
    """Bring one head or part; `all_bytes` of the round are missing here. Raises NoRoom, Refused, Damaged, Stopped."""
    target = shelf.path(wanted.save, rank=wanted.rank, digest=wanted.digest)
    folder = os.path.dirname(target)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if wanted.digest and shelf.reuse(wanted.save, wanted.digest):
        return
    partial = target + PARTIAL
    free = room.free_bytes(folder)
    there = os.stat(partial).st_size if os.path.exists(partial) else 0
    if all_bytes - there > room.FRACTION * free:
        raise NoRoom(f"no room to keep copies for other nodes: {all_bytes:,} bytes are needed, {free:,} are free")
    if not wanted.digest:
        head = client.head(wanted.save, wanted.rank)
        with open(partial, "wb", opener=_private) as file:
            file.write(head.pack())
    else:
        mapping.allocate(partial, wanted.bytes)
        with open(partial, "r+b") as file:
            whole = mmap.mmap(file.fileno(), wanted.bytes)
        client.part(wanted.save, Arriving(Part(wanted.digest, wanted.bytes), memoryview(whole)))
    os.replace(partial, target)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
