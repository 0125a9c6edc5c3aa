"""What does the controller answer about single nodes? `GET /v1/nodes`, `POST /v1/nodes/{node}/allow` and `…/drain`.

A wish is written down and decided like everything else that happens to a job: 202 says that it was noted, not that it
was done. 409 with the reason where it cannot be done now.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from evertrain.controller import node_views
from evertrain.controller.bodies import wish_of, wrong
from evertrain.controller.conductor import Conductor
from evertrain.model.records import AllowAsked, DrainAsked


class _Wish(msgspec.Struct, forbid_unknown_fields=True):
    because: str = "asked for by the user"


def routes(conductor: Conductor) -> list[web.RouteDef]:
    async def listed(request: web.Request) -> web.Response:
        return web.json_response(node_views.nodes(conductor.state, conductor.picture, conductor.now()))

    async def allow(request: web.Request) -> web.Response:
        return await ask(request, AllowAsked)

    async def drain(request: web.Request) -> web.Response:
        return await ask(request, DrainAsked)

    async def ask(request: web.Request, kind: type[AllowAsked] | type[DrainAsked]) -> web.Response:
        wish = await wish_of(request, _Wish)
        if isinstance(wish, web.Response):
            return wish
        node = request.match_info["node"]
        # when: the conductor knows
        if refusal := conductor.ask(kind(time=0.0, node=node, because=wish.because)):
            return wrong(409, refusal)
        return web.json_response({"node": node, "time": conductor.now()}, status=202)

    return [
        web.get("/v1/nodes", listed),
        web.post("/v1/nodes/{node}/allow", allow),
        web.post("/v1/nodes/{node}/drain", drain),
    ]
