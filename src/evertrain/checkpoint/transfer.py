"""How does a piece of a checkpoint get from one node to another? HTTP between agents, checked as it arrives.

    GET /v1/copies/<attempt>/<step>/heads/<rank>
    GET /v1/copies/<attempt>/<step>/parts/<digest>?nth=0        Range: bytes=<from>-        X-Evertrain-Paced: 1

Every request carries the token, the job and the term; another job's and an older term's are refused. What is `nth` of
several places where a part with this digest should lie, so that a damaged one can be passed over.

Backups are paced: a chunk at a time, under a rate, and preferably while the rank whose state it is communicates
nothing. What a rank waits for is sent as fast as it goes. The client writes straight into memory that is mapped, and
trusts nothing: whatever does not come to its digest has not arrived.
"""

from __future__ import annotations

import asyncio
import hmac
import http.client
import logging
import socket
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Protocol

from aiohttp import web

from evertrain.checkpoint import heads, sums
from evertrain.checkpoint.backups import Found
from evertrain.checkpoint.heads import Damaged, Gone, Head
from evertrain.model.copies import Part, Peer, Save
from evertrain.worker.slots import CHUNK_BYTES, pack_sums

_log = logging.getLogger(__name__)

JOB, TERM, PACED = "X-Evertrain-Job", "X-Evertrain-Term", "X-Evertrain-Paced"
STALL_S = 10.0
"""A peer that brings no further chunk for so long has failed."""
_QUIET_S, _LOOK_S = 0.05, 0.002
"""So long a chunk waits for a rank to be quiet: one that always communicates is backed up all the same."""
_PIECE_BYTES = 256 << 10


class Refused(Exception):
    """A peer that will not give what it was asked for; the text says why."""


class Lost(Refused):
    """A peer that cannot be reached, or no longer."""


class Stopped(Exception):
    """The one who asked no longer wants it."""


class Stop(threading.Event):
    """Ends what a thread brings from peers, also where it is waiting for one of them at this moment."""

    def __init__(self) -> None:
        super().__init__()
        self._sockets = weakref.WeakSet[socket.socket]()

    def watch(self, connection: socket.socket) -> None:
        """Wake whoever waits for this connection when the stop comes."""
        self._sockets.add(connection)
        if self.is_set():
            self.set()

    def set(self) -> None:
        super().set()
        for connection in tuple(self._sockets):
            with suppress(OSError):  # it is closed, or its peer has gone
                connection.shutdown(socket.SHUT_RDWR)


class Source(Protocol):
    """What a server gives out. Called in threads."""

    def head(self, save: Save, rank: int) -> bytes: ...

    def part(self, save: Save, digest: str) -> Iterator[Found]: ...


# -- the one who gives ---------------------------------------------------------------------------------------------


class Server:
    """Gives out what lies on a node's shelf."""

    def __init__(
        self, source: Source, job: str, token: str, is_quiet: Callable[[int], bool] = lambda rank: True
    ) -> None:
        self._source = source
        self._job = job
        self._token = token
        self._is_quiet = is_quiet
        self._runner: web.AppRunner | None = None
        self._next_chunk = 0.0
        self.term = 0
        """Of the newest order that this node obeys."""
        self.bytes_per_s = 1 << 30

    async def start(self, address: str) -> int:
        """Listen on a free port of this address, or of all where this machine knows it by another; returns it."""
        app = web.Application(middlewares=[self._authorise])
        app.router.add_get(r"/v1/copies/{attempt:\d+}/{step:\d+}/heads/{rank:\d+}", self._head)
        app.router.add_get(r"/v1/copies/{attempt:\d+}/{step:\d+}/parts/{digest:[0-9a-f]+}", self._part)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        try:
            site = web.TCPSite(self._runner, address, 0)
            await site.start()
        except OSError:
            site = web.TCPSite(self._runner, None, 0)
            await site.start()
        port: int = self._runner.addresses[0][1]
        return port

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _authorise(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), self._token.encode()):
            return web.Response(status=401, text="wrong or missing token")
        if request.headers.get(JOB) != self._job:
            return web.Response(status=409, text=f"this node works for {self._job}")
        term = request.headers.get(TERM, "")
        if not term.isdigit() or int(term) < self.term:
            return web.Response(status=409, text=f"term {term or '?'} is over, this is term {self.term}")
        return await handler(request)

    async def _head(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await asyncio.to_thread(self._source.head, _save(request), int(request.match_info["rank"]))
        except Gone as gone:
            return web.Response(status=404, text=str(gone))
        return web.Response(body=body)

    async def _part(self, request: web.Request) -> web.StreamResponse:
        nth = request.query.get("nth", "0")
        index = int(nth) if nth.isdigit() else 0
        digest = request.match_info["digest"]
        found = await asyncio.to_thread(self._nth, _save(request), digest, index)
        if found is None:
            return web.Response(status=404, text=f"part {digest} of step {request.match_info['step']} is not here")
        begin = request.http_range.start or 0
        if not 0 <= begin < found.bytes:
            return web.Response(status=416)
        response = web.StreamResponse(status=206 if begin else 200)
        response.content_length = found.bytes - begin
        try:
            with open(found.path, "rb") as file:
                await response.prepare(request)
                await self._send(request, file, found, begin, paced=PACED in request.headers)
        except (OSError, RuntimeError) as error:
            # who asked sees a connection that ends too early, and asks again or elsewhere
            _log.info("%s was not given out: %s", found.path, error)
            if request.transport is not None:
                request.transport.abort()
        return response

    def _nth(self, save: Save, digest: str, index: int) -> Found | None:
        return next(islice(self._source.part(save, digest), index, None), None)

    async def _send(self, request: web.Request, file: object, found: Found, begin: int, *, paced: bool) -> None:
        loop, transport = asyncio.get_running_loop(), request.transport
        at, end = found.offset + begin, found.offset + found.bytes
        while at < end:
            length = min(CHUNK_BYTES, end - at) if paced else end - at
            if paced:
                await self._wait_for_turn(length, found.rank)
            if transport is None or transport.is_closing():
                raise OSError("the connection is gone")
            if await loop.sendfile(transport, file, at, length) != length:  # type: ignore[arg-type]
                raise OSError("the file has become shorter")
            at += length

    async def _wait_for_turn(self, length: int, rank: int | None) -> None:
        """Until the rate allows another chunk, and a little longer where the rank is about to communicate."""
        now = time.monotonic()
        turn = max(now, self._next_chunk)
        self._next_chunk = turn + length / self.bytes_per_s
        await asyncio.sleep(turn - now)
        latest = time.monotonic() + _QUIET_S
        while rank is not None and not self._is_quiet(rank) and time.monotonic() < latest:
            await asyncio.sleep(_LOOK_S)


def _save(request: web.Request) -> Save:
    return int(request.match_info["attempt"]), int(request.match_info["step"])


# -- the one who asks ----------------------------------------------------------------------------------------------


class Arriving:
    """A part on its way into memory; what has arrived outlasts a connection."""

    def __init__(self, part: Part, into: memoryview, ready: Callable[[int], None] = lambda end: None) -> None:
        """`ready` returns when memory may be written to up to this end."""
        self.part = part
        self.into = into
        self.ready = ready
        self.sums: list[int] = []
        """Of the chunks that are there."""

    @property
    def done(self) -> int:
        return min(len(self.sums) * CHUNK_BYTES, self.part.bytes)


class Client:
    """One peer as seen by a thread of a node that needs something. Errors: Refused, Damaged, Stopped."""

    def __init__(
        self,
        peer: Peer,
        *,
        job: str,
        term: Callable[[], int],
        token: str,
        paced: bool = False,
        stall_s: float = STALL_S,
        stop: Stop | None = None,
    ) -> None:
        self._peer = peer
        self._headers = {"Authorization": f"Bearer {token}", JOB: job}
        self._term = term
        self._paced = paced
        self._stall_s = stall_s
        self._stop = stop or Stop()
        self._connection: http.client.HTTPConnection | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def head(self, save: Save, rank: int) -> Head:
        """The head of a rank's copy."""
        response = self._ask(f"/v1/copies/{save[0]}/{save[1]}/heads/{rank}")
        try:
            raw = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(error) from error
        where = f"head of rank {rank} from {self._peer.node}"
        head = heads.parse(raw, where)
        if (head.header.attempt, head.header.step, head.header.rank) != (*save, rank):
            raise Damaged(f"{where}: it is another one's")
        return head

    def part(self, save: Save, arriving: Arriving) -> None:
        """Bring a part, all that is missing of it. Damaged: nowhere on that node is it what it should be."""
        nth = 0
        damage: Damaged | None = None
        while True:
            before = arriving.done
            try:
                self._part(save, arriving, nth)
            except Damaged as found:
                damage, nth = found, nth + 1
            except Lost:
                if arriving.done == before:
                    raise
            except Refused:
                if damage is None:
                    raise
                raise damage from None
            else:
                return

    def _part(self, save: Save, arriving: Arriving, nth: int) -> None:
        digest, size = arriving.part.digest, arriving.part.bytes
        path = f"/v1/copies/{save[0]}/{save[1]}/parts/{digest}?nth={nth}"
        if arriving.done < size:
            response = self._ask(path, {"Range": f"bytes={arriving.done}-"} if arriving.done else {})
            if response.length != size - arriving.done:
                self.close()
                raise Damaged(f"part {digest} from {self._peer.node}: {response.length} bytes, not {size}")
            try:
                while arriving.done < size:
                    begin = arriving.done
                    end = min(begin + CHUNK_BYTES, size)
                    arriving.ready(end)
                    chunk = arriving.into[begin:end]
                    self._receive(response, chunk)
                    arriving.sums.append(sums.of_chunk(chunk))
                response.read()
            except (OSError, http.client.HTTPException) as error:
                raise self._failed(error) from error
            except Stopped:
                self.close()
                raise
        if sums.digest(pack_sums(arriving.sums)) != digest:
            arriving.sums.clear()
            raise Damaged(f"part {digest} from {self._peer.node} does not match its checksums")

    def _receive(self, response: http.client.HTTPResponse, chunk: memoryview) -> None:
        """Fill a chunk; a peer that only trickles stalls as one that is silent."""
        latest = time.monotonic() + self._stall_s
        at = 0
        while at < len(chunk):
            if self._stop.is_set():
                raise Stopped
            count = response.readinto(chunk[at : at + _PIECE_BYTES])
            if not count:
                raise OSError("the connection ended too early")
            at += count
            if time.monotonic() > latest:
                raise TimeoutError(f"less than a chunk in {self._stall_s:g} s")

    def _ask(self, path: str, more: dict[str, str] | None = None) -> http.client.HTTPResponse:
        if self._stop.is_set():
            raise Stopped
        headers = {**self._headers, TERM: str(self._term()), **(more or {}), **({PACED: "1"} if self._paced else {})}
        for fresh in (False, True):
            if fresh or self._connection is None:
                self.close()
                self._connection = http.client.HTTPConnection(
                    self._peer.address, self._peer.port, timeout=self._stall_s
                )
                fresh = True
            try:
                if fresh:
                    self._connection.connect()
                    self._stop.watch(self._connection.sock)
                self._connection.request("GET", path, headers=headers)
                response = self._connection.getresponse()
                break
            except (OSError, http.client.HTTPException) as error:
                # one that was kept open may have been closed by the other side meanwhile
                if fresh or isinstance(error, TimeoutError):
                    raise self._failed(error) from error
        if response.status >= 300:
            text = response.read().decode(errors="replace")[:200]
            raise Refused(f"{self._peer.node}: {text or response.status}")
        return response

    def _failed(self, error: Exception) -> Lost | Stopped:
        self.close()
        if self._stop.is_set():
            return Stopped()
        why = "it does not answer" if isinstance(error, TimeoutError | socket.gaierror) else str(error)
        return Lost(f"{self._peer.node} ({self._peer.address}:{self._peer.port}): {why}")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
