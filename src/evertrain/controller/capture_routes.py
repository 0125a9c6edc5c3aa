"""How do captures come and go? Agents bring what they have seen; whoever looks at the job asks for one, and fetches it.

PUT  /v1/captures/{number}/{node}             an agent: MessagePack of a `NodeCapture`
PUT  /v1/captures/{number}/{node}/recorders   ... and of `RecorderDumps`, where they were asked for
POST /v1/captures                             look now: 202 with the number; {"dumps": true}: and keep recorders' dumps
GET  /v1/captures/{number}                    202 while it is not over, then the capture with what it has shown
GET  /v1/captures/{number}/recorders          the nodes whose recorders' dumps are there
GET  /v1/captures/{number}/recorders/{node}   what that node has sent
GET  /v1/captures                             which there are
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from evertrain.agent.aside import aside
from evertrain.controller import captures
from evertrain.controller.bodies import body_of, wish_of, wrong
from evertrain.controller.capture_files import MOST
from evertrain.controller.conductor import Conductor

Json = dict[str, Any]


class _Wish(msgspec.Struct, forbid_unknown_fields=True):
    dumps: bool = False


def routes(conductor: Conductor) -> list[web.RouteDef]:
    async def take(request: web.Request) -> web.Response:
        number, node = int(request.match_info["number"]), request.match_info["node"]
        refusal = conductor.captures.refusal(number, node)
        if refusal is None:
            body = await body_of(request, captures.MOST_BYTES)
            if body is None:
                return wrong(413, f"a capture has at most {captures.MOST_BYTES:,} bytes")
            refusal = conductor.captures.take(number, node, body)
        if refusal is not None:
            return wrong(refusal.status, refusal.line)
        return web.json_response({"capture": number, "node": node})

    async def take_dumps(request: web.Request) -> web.Response:
        number, node = int(request.match_info["number"]), request.match_info["node"]
        if node not in conductor.state.known_nodes():
            return wrong(403, f"the job has no node {node}")
        body = await body_of(request, captures.MOST_DUMP_BYTES)
        if body is None:
            return wrong(413, f"recorders' dumps of a node have at most {captures.MOST_DUMP_BYTES:,} bytes")
        refusal = await conductor.captures.take_dumps(number, node, body)
        if refusal is not None:
            return wrong(refusal.status, refusal.line)
        return web.json_response({"capture": number, "node": node})

    async def list_dumps(request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        return web.json_response(await conductor.captures.dumped(number))

    async def give_dumps(request: web.Request) -> web.Response:
        number, node = int(request.match_info["number"]), request.match_info["node"]
        if node not in await conductor.captures.dumped(number):
            return wrong(404, f"capture {number} has no recorders' dumps of {node}")
        try:
            content = await conductor.captures.dumps(number, node)
        except OSError as error:
            return wrong(500, f"they cannot be read: {error.strerror or error}")
        return web.Response(body=content, content_type="application/msgpack")

    async def ask(request: web.Request) -> web.Response:
        wish = await wish_of(request, _Wish)
        if isinstance(wish, web.Response):
            return wish
        number = conductor.request_capture(dumps=wish.dumps)
        if number is None:
            return wrong(409, "no rank runs now")
        return web.json_response({"capture": number}, status=202)

    async def give(request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        waits = conductor.captures.waits_for(number)
        if waits is not None:
            return web.json_response({"capture": number, "over": False, "waits_for": list(waits)}, status=202)
        try:
            kept = await conductor.captures.kept(number)
        except ValueError as error:
            return wrong(500, str(error))
        if kept is not None:
            # of ten thousand ranks that takes its time
            return web.json_response(body=await aside("captures", msgspec.json.encode, kept))
        may_come = conductor.awaits_capture(number)
        if may_come and not conductor.captures.is_over(number):
            return web.json_response({"capture": number, "over": False, "waits_for": []}, status=202)
        if may_come is not None:
            return wrong(410, f"capture {number} was lost: its attempt ended, or the controller that collected it")
        return wrong(404, f"there is no capture {number}, or no more: the newest {MOST} of each kind are kept")

    async def listed(request: web.Request) -> web.Response:
        there = await conductor.captures.numbers()
        known = {one.asked.capture: one for one in conductor.state.captures}
        found: list[Json] = []
        for number in sorted({*there, *known}):
            one = known.get(number)
            located = one.located.located.kind if one is not None and one.located is not None else ""
            about = {"attempt": one.asked.attempt, "reason": one.asked.reason, "time": one.asked.time} if one else {}
            found.append({"capture": number, "kept": number in there, "located": located, **about})
        return web.json_response(found)

    return [
        web.get("/v1/captures", listed),
        web.post("/v1/captures", ask),
        web.get(r"/v1/captures/{number:\d{1,9}}", give, allow_head=False),
        web.get(r"/v1/captures/{number:\d{1,9}}/recorders", list_dumps),
        web.get(r"/v1/captures/{number:\d{1,9}}/recorders/{node}", give_dumps),
        web.put(r"/v1/captures/{number:\d{1,9}}/{node}", take),
        web.put(r"/v1/captures/{number:\d{1,9}}/{node}/recorders", take_dumps),
    ]
