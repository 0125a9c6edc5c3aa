"""How does code travel? `PUT /v1/code/{digest}` takes in an archive, `GET` gives it to the nodes.

An archive runs with the user's rights on every node, so who brings one needs the token that may change the code, and
each that is taken in or refused is written down. Its digest says what it is; what it is not never gets that name.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web

from evertrain.agent.aside import aside
from evertrain.controller import scopes
from evertrain.controller.bodies import wrong
from evertrain.controller.conductor import Conductor
from evertrain.model.spec import ControllerSpec
from evertrain.versions.errors import ArchiveError

_DIGEST = re.compile(r"[0-9a-f]{64}")
_PIECE_BYTES = 256 << 10

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def routes(spec: ControllerSpec, conductor: Conductor) -> list[web.RouteDef]:
    async def give(request: web.Request) -> web.StreamResponse:
        digest = request.match_info["digest"]
        path = conductor.code.path(digest)
        if not await aside("code", path.is_file):
            return wrong(404, f"no version with the digest {digest} is kept here")
        return web.FileResponse(path, headers={"Content-Type": "application/gzip"})

    async def take(request: web.Request) -> web.StreamResponse:
        digest = request.match_info["digest"]
        if not scopes.may_change_code(request):
            return scopes.refused(conductor, request, spec, "upload")
        try:
            # as it comes: the limit of other requests is far below what an archive may have
            code = await conductor.code.put(digest, request.content.iter_chunked(_PIECE_BYTES))
        except ArchiveError as error:
            scopes.audit(conductor, request, "upload", "refused", f"{digest}: {error}")
            return wrong(400, str(error))
        except (aiohttp.ClientPayloadError, web.RequestPayloadError, ConnectionError) as error:
            return wrong(400, f"the archive has not come to its end: {error}")
        except OSError as error:
            where = error.filename or conductor.code.path(digest)
            return wrong(507, f"the archive cannot be kept: {where}: {error.strerror or error}")
        scopes.audit(conductor, request, "upload", "done", f"{digest}: {code.files} files, {code.bytes:,} bytes")
        return web.json_response({"digest": digest, "files": code.files, "bytes": code.bytes}, status=201)

    def checked(handler: _Handler) -> _Handler:
        async def check(request: web.Request) -> web.StreamResponse:
            if not _DIGEST.fullmatch(request.match_info["digest"]):
                return wrong(400, "a digest has 64 digits of 0-9 and a-f")
            return await handler(request)

        return check

    # without HEAD: nobody asks for it
    return [
        web.get("/v1/code/{digest}", checked(give), allow_head=False),
        web.put("/v1/code/{digest}", checked(take)),
    ]
