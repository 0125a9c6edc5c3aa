"""How does a user change what ranks run? `POST /v1/changes`, and what has come of it.

202 says that the change was noted, not that it was carried out; 409 with the reason where it cannot be (`wrong_usage`:
nor later), 503 where that is not known yet. Each try is written down with who says to have asked (`GET /v1/audit`).
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Callable
from typing import Literal

import msgspec
from aiohttp import web

from evertrain.agent.aside import aside
from evertrain.controller import code_views, scopes
from evertrain.controller.bodies import wish_of
from evertrain.controller.code_store import CodeStore
from evertrain.controller.conductor import Conductor
from evertrain.decide import changes, rollback
from evertrain.model.code import Code, Diff
from evertrain.model.config import CodeConfig
from evertrain.versions import names
from evertrain.versions.errors import ArchiveError

_log = logging.getLogger(__name__)

_LONGEST = 2000
_DIFF_S = 4.0
"""So long whoever asks waits for what is different, which is nothing but good to know."""


class _ChangeRequest(msgspec.Struct, forbid_unknown_fields=True):
    change: str
    kind: Literal["update", "rollback"]
    digest: str = ""
    source: str = ""
    version: int | None = None
    urgent: bool = False
    within_s: float | None = None
    keep_progress: bool = False
    reason: str = ""
    author: str = ""


def routes(conductor: Conductor, config: CodeConfig) -> list[web.RouteDef]:
    async def ask(request: web.Request) -> web.Response:
        wanted = await wish_of(request, _ChangeRequest)
        if isinstance(wanted, web.Response):
            return wanted
        within_s = config.within_s if wanted.within_s is None else wanted.within_s
        wish = changes.Wish(
            change=wanted.change[:100],
            act=wanted.kind,
            source=wanted.source[:_LONGEST],
            version=wanted.version,
            within_s=0.0 if wanted.urgent or wanted.kind == "rollback" else max(0.0, within_s),
            goes_back=wanted.kind == "rollback" and not wanted.keep_progress,
            reason=wanted.reason[:_LONGEST],
            author=wanted.author[:100],
        )
        if wanted.kind == "update" and not wanted.digest:
            refusal: changes.Refusal | None = changes.Refusal(
                "an update needs the digest of its code", wrong_usage=True
            )
        else:
            refusal = await submit(conductor, request, wish, wanted.digest, conductor.request_change)
        return answer(refusal, {"change": wish.change})

    async def one(request: web.Request) -> web.Response:
        found = code_views.change(conductor.state, request.match_info["name"])
        return web.json_response(found) if found is not None else web.json_response({"error": "unknown"}, status=404)

    async def versions(request: web.Request) -> web.Response:
        return web.json_response(code_views.versions(conductor.state))

    async def audit(request: web.Request) -> web.Response:
        return web.json_response(code_views.audit(conductor.state))

    return [
        web.post("/v1/changes", ask),
        web.get("/v1/changes/{name}", one),
        web.get("/v1/versions", versions),
        web.get("/v1/audit", audit),
    ]


async def submit(
    conductor: Conductor,
    request: web.Request,
    wish: changes.Wish,
    digest: str,
    ask: Callable[[changes.Wish], changes.Refusal | None],
) -> changes.Refusal | None:
    """Complete a wish, `ask` for it, and write down who did. One that has been asked for already is as it was."""
    if conductor.knows_change(wish.change):
        return None
    whole = await with_code(conductor, wish, digest)
    if conductor.knows_change(wish.change):
        return None
    # as it is when it is asked for: afterwards another one would be gone back to
    target = rollback.target(conductor.state) if wish.act == "rollback" else None
    refusal = whole if isinstance(whole, changes.Refusal) else ask(whole)
    if isinstance(whole, changes.Wish) and refusal is None:
        scopes.audit(conductor, request, wish.act, "done", told(whole, target), wish.author)
    elif refusal is not None and not refusal.soon:
        scopes.audit(conductor, request, wish.act, "refused", refusal.line, wish.author)
    return refusal


async def with_code(conductor: Conductor, wish: changes.Wish, digest: str) -> changes.Wish | changes.Refusal:
    """The wish with the code that was sent before, and what it changes in what runs; `digest` empty: as it is."""
    code = conductor.code
    state = conductor.state
    runs = state.versions.get(changes.in_force(state) or 0)
    base = state.versions.get(changes.next_version(state) or 0)
    number = rollback.target(state) if wish.act == "rollback" and wish.version is None else wish.version
    target = state.versions.get(number or 0)
    found: Code | None = None
    if digest:
        found = await aside("code", code.known, digest)
        if found is None:
            return changes.Refusal(f"no code with the digest {digest[:12]} has been sent", wrong_usage=True)
        if (refusal := await _without_script(conductor, wish, digest)) is not None:
            return refusal
    after = found or (target.code if target is not None else None) or (base.code if base is not None else None)
    diff = Diff()
    if runs is not None and runs.code is not None and after is not None and runs.code != after:
        diff = await _diff(code, runs.code.digest, after.digest)
    if runs is not None and base is not None:
        given = target.args if target is not None else base.args if wish.args is None else wish.args
        added = target.env if target is not None else {**base.env, **wish.env}
        names = tuple(sorted(name for name in {*added, *runs.env} if added.get(name) != runs.env.get(name)))
        diff = msgspec.structs.replace(diff, args=given != runs.args, env=names)
    return msgspec.structs.replace(wish, code=found, diff=diff)


async def _without_script(conductor: Conductor, wish: changes.Wish, digest: str) -> changes.Refusal | None:
    """Where the user's own code has the script in it and the new one has not: no rank could begin with that."""
    own = conductor.state.versions.get(conductor.state.own or 0)
    if own is None or own.code is None:
        return None
    try:
        script = await aside("code", conductor.code.script_in, own.code.digest)
        if script is None or await aside("code", conductor.code.script_in, digest) is not None:
            return None
    except (ArchiveError, OSError) as error:
        _log.warning("whether the new code has the script cannot be said: %s", error)
        return None
    line = f"{wish.source or 'the new code'} has no {names.shown(script)}, which is the script that the job runs"
    return changes.Refusal(f"{line}; give a folder that can take the place of {own.source}", wrong_usage=True)


async def _diff(code: CodeStore, before: str, after: str) -> Diff:
    """What is different; nobody's change waits for an archive that is gone."""
    try:
        return await asyncio.wait_for(code.difference(before, after), _DIFF_S)
    except TimeoutError:
        _log.warning("what is different between %s and %s is not known in time", before[:12], after[:12])
        return Diff()
    except (ArchiveError, OSError) as error:
        _log.warning("what is different between %s and %s cannot be said: %s", before[:12], after[:12], error)
        return Diff()


def told(wish: changes.Wish, target: int | None) -> str:
    """For the record of what was tried; `target`: what is gone back to where no version was named."""
    number = target if wish.version is None else wish.version
    parts = [f"version {number}"] if number is not None else [wish.code.digest] if wish.code is not None else []
    if wish.args is not None:
        parts.append(f"arguments: {shlex.join(wish.args) or 'none'}")
    if wish.env:
        # values may be secrets
        parts.append(f"environment: {', '.join(sorted(wish.env))}")
    return ": ".join(filter(None, ("; ".join(parts), wish.reason)))


def answer(refusal: changes.Refusal | None, done: dict[str, object]) -> web.Response:
    if refusal is None:
        return web.json_response(done, status=202)
    if refusal.soon:
        return web.json_response({"error": refusal.line}, status=503)
    return web.json_response({"error": refusal.line, "wrong_usage": refusal.wrong_usage}, status=409)
