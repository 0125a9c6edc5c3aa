"""How does whoever looks at a job get the last seconds of its trace rings?

POST /v1/windows                  {"seconds": 10}: 202 with the number; {"brief": true}: only how far each rank has
                                  come;
                                  {"now_s": 5}: what that comes to, of so long and of `seconds` before
GET  /v1/windows/{number}         202 while nodes are waited for, then MessagePack of a `JobWindow`
PUT  /v1/windows/{number}/{node}  an agent: its part, packed
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from evertrain.agent.aside import aside
from evertrain.controller import windows
from evertrain.controller.bodies import body_of, wish_of, wrong
from evertrain.controller.conductor import Conductor
from evertrain.model.windows import encode


class _Wish(msgspec.Struct, forbid_unknown_fields=True):
    seconds: float = 10.0
    brief: bool = False
    now_s: float = 0.0
    writers: tuple[str, ...] = ()


def routes(conductor: Conductor) -> list[web.RouteDef]:
    async def ask(request: web.Request) -> web.Response:
        wish = await wish_of(request, _Wish)
        if isinstance(wish, web.Response):
            return wish
        if not 0 < wish.seconds <= windows.MOST_SECONDS:
            return wrong(400, f"seconds: {wish.seconds:g} is not above 0 and at most {windows.MOST_SECONDS:g}")
        if not 0 <= wish.now_s <= windows.MOST_SECONDS:
            return wrong(400, f"now_s: {wish.now_s:g} is below 0 or above {windows.MOST_SECONDS:g}")
        number = conductor.request_window(wish.seconds, brief=wish.brief, now_s=wish.now_s, writers=wish.writers)
        if number is None:
            return wrong(503, "no attempt has begun yet, or others look at the trace just now")
        return web.json_response({"window": number}, status=202)

    async def give(request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        waits = conductor.windows.waits_for(number)
        if waits is not None:
            return web.json_response({"window": number, "over": False, "waits_for": list(waits)}, status=202)
        found = conductor.windows.result(number)
        if found is None:
            return wrong(404, f"there is no window {number}, or no more; ask for another one")
        return web.Response(body=await aside("windows", encode, found), content_type="application/msgpack")

    async def take(request: web.Request) -> web.Response:
        number, node = int(request.match_info["number"]), request.match_info["node"]
        body = await body_of(request, windows.MOST_BYTES)
        if body is None:
            return wrong(413, f"a node's part of a window has at most {windows.MOST_BYTES:,} bytes")
        refusal = conductor.windows.take(number, node, body)
        if refusal is not None:
            return wrong(refusal.status, refusal.line)
        return web.json_response({"window": number, "node": node})

    return [
        web.post("/v1/windows", ask),
        web.get(r"/v1/windows/{number:\d{1,16}}", give, allow_head=False),
        web.put(r"/v1/windows/{number:\d{1,16}}/{node}", take),
    ]
