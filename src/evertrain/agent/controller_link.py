"""How does the agent talk to the controller? One WebSocket; reports go up, orders come down.

A controller that is dead, hung or unreachable changes nothing on this node: the link retries with jitter, and after
reconnecting one report says everything.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

import aiohttp
import msgspec

from evertrain.model.report import DISMISSED, Desired, Report

_log = logging.getLogger(__name__)

_decoder = msgspec.msgpack.Decoder(Desired)
_encoder = msgspec.msgpack.Encoder()

_PING_S = 10.0
"""A machine that vanished says nothing; half of this without an answer, and the connection is given up."""
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 2.0
_MAX_FRAME_BYTES = 16 << 20


class ControllerLink:
    """The agent's end. An order of an older term than one already obeyed is refused."""

    def __init__(self, url: str, token: str, job: str, on_order: Callable[[Desired], None]) -> None:
        self._url = f"{url}/v1/agent"
        self._token = token
        self._job = job
        self._on_order = on_order
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._report: Callable[[], Report] | None = None
        self.term = 0
        self.dismissed = False
        """The controller serves another run of the job by now, or this one without us."""
        self._left_time = time.monotonic()

    @property
    def away_s(self) -> float:
        """For so long there has been no connection."""
        return 0.0 if self._socket is not None else time.monotonic() - self._left_time

    async def run(self, report: Callable[[], Report]) -> None:
        """Stay connected, and say hello with a report each time; never returns."""
        retry_s = _FIRST_RETRY_S
        headers = {"Authorization": f"Bearer {self._token}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            while True:
                try:
                    async with session.ws_connect(
                        self._url, heartbeat=_PING_S, max_msg_size=_MAX_FRAME_BYTES, compress=0
                    ) as socket:
                        self._socket = socket
                        retry_s = _FIRST_RETRY_S
                        await socket.send_bytes(_encoder.encode(report()))
                        await self._listen(socket)
                except (TimeoutError, aiohttp.ClientError, OSError) as error:
                    _log.debug("no controller: %s", error)
                finally:
                    if self._socket is not None:
                        self._left_time = time.monotonic()
                    self._socket = None
                # many agents must not come back in the same instant
                await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
                retry_s = min(retry_s * 2, _LAST_RETRY_S)

    async def send(self, report: Report) -> None:
        """Send a report if there is a connection; a lost one is made good by the next."""
        if self._socket is None:
            return
        try:
            await self._socket.send_bytes(_encoder.encode(report))
        except (ConnectionError, RuntimeError, aiohttp.ClientError) as error:
            _log.debug("a report was lost: %s", error)

    async def _listen(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.BINARY:
                continue
            try:
                order = _decoder.decode(message.data)
            except msgspec.DecodeError as error:
                _log.error("a frame was not an order: %s", error)
                continue
            if order.job != self._job or order.term < self.term:
                _log.error("order of %s term %d refused; obeying term %d", order.job, order.term, self.term)
                continue
            self.term = order.term
            self._on_order(order)
        self.dismissed = socket.close_code == DISMISSED
