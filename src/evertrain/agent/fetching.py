"""How does a rank's state come to a node that has no copy of it? Piece by piece from others, into an ordinary slot.

The slot is `writing` until every part has come to its digest, so an agent that is killed in between leaves nothing that
anybody takes for a checkpoint. Where memory has no room, the copy goes to the node's disk.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from evertrain.checkpoint.heads import Damaged, Head
from evertrain.checkpoint.transfer import Arriving, Client, Refused, Stop, Stopped
from evertrain.model.copies import Fetch, Peer
from evertrain.worker import mapping, pins, room
from evertrain.worker import slots as layout

_PATIENCE_S, _NEW_TRY_S = 15.0, 0.5
"""So long, and so often, all are asked again: an agent is started again, a controller takes over."""
_SLACK_BYTES = 64 << 10
"""As a rank leaves it: what it saves next fits without a new file."""

_AHEAD_BYTES = 16 << 20

Ask = Callable[[Peer, Stop], Client]
Got = TypeVar("Got")


class Ground:
    """A file that is mapped, and allocated ahead of whoever fills it: zeroed pages take as long as what comes."""

    def __init__(self, path: str, size: int) -> None:
        self._size = size
        self._ready = 0
        self._failure: OSError | None = None
        self._stop = False
        self._moved = threading.Condition()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._descriptor, max(size, os.fstat(self._descriptor).st_size))
        # unmapped when nothing refers to it any more: an exception on its way still does
        self.whole = mmap.mmap(self._descriptor, size)
        self.view = memoryview(self.whole)
        self._thread = threading.Thread(target=self._allocate, daemon=True)

    def __enter__(self) -> Ground:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()
        os.close(self._descriptor)

    def wait(self, end: int) -> None:
        """Until the file may be written to up to there: before, a full memory would end the process."""
        with self._moved:
            self._moved.wait_for(lambda: self._ready >= end or self._failure is not None)
            if self._failure is not None:
                raise self._failure

    def _allocate(self) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.whole))
        for begin in range(0, self._size, _AHEAD_BYTES):
            if self._stop:
                return
            length = min(_AHEAD_BYTES, self._size - begin)
            failure: OSError | None = None
            try:
                os.posix_fallocate(self._descriptor, begin, length)
                mapping.prefault(address + begin, length)
            except OSError as error:
                failure = error
            with self._moved:
                self._ready, self._failure = begin + length, failure
                self._moved.notify_all()
            if failure is not None:
                return


def _wait_beyond(ground: Ground, begin: int, end: int) -> None:
    ground.wait(begin + end)


class Fetching:
    """One fetch, for a thread. `bring` raises Refused or Damaged with what went wrong, OSError, or Stopped."""

    def __init__(self, fetch: Fetch, slots_dir: str, disk_dir: str, ask: Ask, stop: Stop) -> None:
        self._fetch = fetch
        self._slots_dir = slots_dir
        self._disk_dir = disk_dir
        self._stop = stop
        self._clients = [ask(peer, stop) for peer in fetch.peers]
        self._deadline = time.monotonic() + fetch.within_s

    def bring(self) -> str:
        """Get the copy; returns the path at which it lies whole."""
        try:
            head = self._from_any(lambda client: client.head(self._fetch.save, self._fetch.rank))
            size = head.header.size + _SLACK_BYTES
            path = self._slot(size)
            if path is not None:
                self._fill(head, path, size)
                return path
            final = layout.flushed_path(self._disk_dir, self._fetch.step, self._fetch.rank)
            os.makedirs(os.path.dirname(final), mode=0o700, exist_ok=True)
            self._fill(head, f"{final}.partial", head.header.size, sync=True)
            os.replace(f"{final}.partial", final)
            return final
        finally:
            for client in self._clients:
                client.close()

    def _slot(self, size: int) -> str | None:
        """The slot whose content is needed least; None: there is no room in memory."""
        folder = os.path.join(self._slots_dir, f"r{self._fetch.rank}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        paths = [os.path.join(folder, str(index)) for index in range(layout.MOST_SLOTS)]
        paths = [path for index, path in enumerate(paths) if index < layout.SLOTS or os.path.exists(path)]
        headers = [layout.read(path) for path in paths]
        pinned = (pins.read(self._slots_dir) or pins.NOTHING).of(filter(None, map(layout.save_in, headers)))
        index = layout.slot_to_overwrite(headers, pinned=pinned)
        path = paths[index] if index is not None else os.path.join(folder, str(len(paths)))
        there = os.stat(path).st_size if os.path.exists(path) else 0
        return path if size - there <= room.FRACTION * room.free_bytes(self._slots_dir) else None

    def _fill(self, head: Head, path: str, size: int, *, sync: bool = False) -> None:
        header = head.header
        with Ground(path, size) as ground:
            ground.wait(layout.HEADER_BYTES)
            ground.view[: layout.PACKED_BYTES] = layout.pack(header._replace(state=layout.WRITING))
            for place in head.places:
                begin = layout.HEADER_BYTES + place.offset
                into = ground.view[begin : begin + place.part.bytes]
                arriving = Arriving(place.part, into, partial(_wait_beyond, ground, begin))
                self._from_any(lambda client, one=arriving: client.part(self._fetch.save, one))  # type: ignore[misc]
            ground.wait(size)
            ground.view[header.metadata_at : header.size] = head.metadata + head.directory + head.sums
            if sync:
                ground.whole.flush()
            ground.view[: layout.PACKED_BYTES] = layout.pack(header)
            if sync:
                ground.whole.flush()

    def _from_any(self, get: Callable[[Client], Got]) -> Got:
        """Ask one peer after the other, and all of them again while somebody may have an answer yet."""
        last: Refused | Damaged = Refused("nobody to ask")
        latest = time.monotonic() + _PATIENCE_S
        while True:
            hopeless = True
            for client in self._clients:
                if time.monotonic() > self._deadline:
                    raise Refused(f"not whole after {self._fetch.within_s:g} s")
                try:
                    return get(client)
                except Damaged as error:
                    last = error
                except Refused as error:
                    last = last if isinstance(last, Damaged) else error
                    hopeless = False
            if hopeless or time.monotonic() > latest:
                raise last
            if self._stop.wait(_NEW_TRY_S):
                raise Stopped
