"""What do the routes of the controller read and say alike? A body up to a limit, what is asked for, and a refusal."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from aiohttp import web

_PIECE_BYTES = 256 << 10

Wish = TypeVar("Wish")


async def body_of(request: web.Request, most_bytes: int) -> bytes | None:
    """As it comes, for the limit of other requests is lower; None: it is more than that."""
    body = bytearray()
    async for piece in request.content.iter_chunked(_PIECE_BYTES):
        body += piece
        if len(body) > most_bytes:
            return None
    return bytes(body)


async def wish_of(request: web.Request, kind: type[Wish]) -> Wish | web.Response:
    """What the JSON of a request asks for, by default where there is none; or what is wrong with it."""
    try:
        return msgspec.json.decode(await request.read() or b"{}", type=kind)
    except msgspec.MsgspecError as error:
        return wrong(400, str(error))


def wrong(status: int, line: str) -> web.Response:
    return web.json_response({"error": " ".join(line.split())}, status=status)
