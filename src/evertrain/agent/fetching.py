"""How does a rank's state come to a node that has no copy of it? Piece by piece from others, into an ordinary slot.

The slot is `writing` until every part has come to its digest, so an agent that is killed in between leaves nothing that
anybody takes for a checkpoint. Where memory has no room, the copy goes to the node's disk.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from evertrain.checkpoint.heads import Damaged, Head
from evertrain.checkpoint.transfer import Arriving, Client, Refused, Stopped
from evertrain.model.report import Fetch, Peer
from evertrain.worker import mapping, pins, room
from evertrain.worker import slots as layout

_PATIENCE_S, _NEW_TRY_S = 15.0, 0.5
"""So long, and so often, all are asked again: an agent is started again, a controller takes over."""
_SLACK_BYTES = 64 << 10
"""As a rank leaves it: what it saves next fits without a new file."""

Ask = Callable[[Peer, threading.Event], Client]
Got = TypeVar("Got")


class Fetching:
    """One fetch, for a thread. `bring` raises Refused or Damaged with what went wrong, OSError, or Stopped."""

    def __init__(self, fetch: Fetch, slots_dir: str, disk_dir: str, ask: Ask, stop: threading.Event) -> None:
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
                mapping.allocate(path, size)
                self._fill(head, path)
                return path
            final = layout.flushed_path(self._disk_dir, self._fetch.step, self._fetch.rank)
            os.makedirs(os.path.dirname(final), mode=0o700, exist_ok=True)
            mapping.allocate(f"{final}.partial", head.header.size)
            self._fill(head, f"{final}.partial", sync=True)
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

    def _fill(self, head: Head, path: str, *, sync: bool = False) -> None:
        header = head.header
        with open(path, "r+b") as file:
            whole = mmap.mmap(file.fileno(), header.size)
        # unmapped when nothing refers to it any more: an exception on its way still does
        view = memoryview(whole)
        view[: layout.PACKED_BYTES] = layout.pack(header._replace(state=layout.WRITING))
        view[header.metadata_at : header.size] = head.metadata + head.directory + head.sums
        for place in head.places:
            begin = layout.HEADER_BYTES + place.offset
            arriving = Arriving(place.part, view[begin : begin + place.part.bytes])
            self._from_any(lambda client, one=arriving: client.part(self._fetch.save, one))  # type: ignore[misc]
        if sync:
            whole.flush()
        view[: layout.PACKED_BYTES] = layout.pack(header)
        if sync:
            whole.flush()

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
