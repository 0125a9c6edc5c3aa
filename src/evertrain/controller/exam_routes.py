"""What does the controller answer about tests by hand? `POST /v1/exams`, then `GET /v1/exams/{number}`.

202 with the number of the examination; 409 with the reason where it cannot be done now.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from aiohttp import web

from evertrain.controller import check_views
from evertrain.controller.bodies import wish_of, wrong
from evertrain.controller.conductor import Conductor
from evertrain.model.diagnosis import Symptom


class _Wish(msgspec.Struct, forbid_unknown_fields=True):
    nodes: tuple[str, ...] = ()
    """None named: all that take part."""
    suite: Symptom = "crash"
    budget_s: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 600.0


def routes(conductor: Conductor) -> list[web.RouteDef]:
    async def ask(request: web.Request) -> web.Response:
        wish = await wish_of(request, _Wish)
        if isinstance(wish, web.Response):
            return wish
        answer = conductor.examine(wish.nodes, wish.suite, wish.budget_s)
        if isinstance(answer, str):
            return wrong(409, answer)
        return web.json_response({"exam": answer}, status=202)

    async def look(request: web.Request) -> web.Response:
        found = check_views.exam(conductor.state, int(request.match_info["number"]))
        return web.json_response(found) if found is not None else web.json_response({"error": "unknown"}, status=404)

    return [web.post("/v1/exams", ask), web.get(r"/v1/exams/{number:\d{1,9}}", look)]
