"""What does the controller answer? One port: agents on a WebSocket, everybody else JSON over HTTP.

Every request carries a bearer token; `scopes` says what each may do. MessagePack frames carry `Report`s up and
`Desired`s down. A request that fails is that request's trouble; an unforeseen exception in the conductor is not, and
ends the process.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, Literal

import msgspec
from aiohttp import WSMsgType, web

from evertrain.agent import environment
from evertrain.controller import (
    accounts,
    capture_routes,
    change_routes,
    code_routes,
    exam_routes,
    ledger,
    node_routes,
    scopes,
    views,
    window_routes,
)
from evertrain.controller.bodies import wish_of
from evertrain.controller.clocks import AgentClock
from evertrain.controller.conductor import Conductor
from evertrain.decide import changes
from evertrain.decide.joining import Refusal, Wish
from evertrain.model.records import RestartRequested
from evertrain.model.report import DISMISSED, Desired, Report
from evertrain.model.spec import ControllerSpec

_log = logging.getLogger(__name__)

_report_decoder = msgspec.msgpack.Decoder(Report)
_encoder = msgspec.msgpack.Encoder()

_CONDUCTOR = web.AppKey("conductor", Conductor)
_SPEC = web.AppKey("spec", ControllerSpec)

_MAX_FRAME_BYTES = 16 << 20


def build(spec: ControllerSpec, conductor: Conductor, token: str, code_token: str = "") -> web.Application:
    """The application, ready for a runner. `code_token`: may change the code as well; empty: nobody may."""

    @web.middleware
    async def authorise(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path != "/healthz" and not scopes.admits(request, token):
            # where it lies is no secret, and what a user needs next
            return web.json_response(
                {"error": "wrong or missing token", "token_file": f"{spec.run_dir}/token"}, status=401
            )
        resource = request.match_info.route.resource
        # by what the router has found as well: a path can be written in more than one way
        path = resource.canonical if resource is not None else request.path
        if request.method == "POST" and path == "/v1/changes" and not scopes.may_change_code(request):
            return await _change_refused(request)
        response: web.StreamResponse = await handler(request)
        return response

    app = web.Application(middlewares=[authorise])
    app[_CONDUCTOR] = conductor
    app[_SPEC] = spec
    app[scopes.CODE_TOKEN] = code_token
    app.add_routes(
        [
            web.get("/healthz", _healthz),
            web.get("/v1/status", _status),
            web.get("/v1/incidents", _incidents),
            web.get("/v1/attempts", _attempts),
            web.get("/v1/report", _report),
            web.post("/v1/stop", _stop),
            web.post("/v1/restart", _restart),
            web.get("/v1/restart/{name}", _restarted),
            web.post("/v1/signals", _signals),
            web.post("/v1/join", _join),
            web.get("/v1/agent", _agent),
            *node_routes.routes(conductor),
            *exam_routes.routes(conductor),
            *capture_routes.routes(conductor),
            *window_routes.routes(conductor),
            *code_routes.routes(spec, conductor),
            *change_routes.routes(conductor, spec.config.code),
        ]
    )
    return app


async def _healthz(request: web.Request) -> web.Response:
    return web.json_response({"job": request.app[_SPEC].job, "state": views.job_state(request.app[_CONDUCTOR].state)})


async def _status(request: web.Request) -> web.Response:
    return web.json_response(request.app[_CONDUCTOR].status())


async def _incidents(request: web.Request) -> web.Response:
    return web.json_response(views.incidents(request.app[_CONDUCTOR].state))


async def _attempts(request: web.Request) -> web.Response:
    return web.json_response(ledger.attempts(request.app[_CONDUCTOR].state))


async def _report(request: web.Request) -> web.Response:
    """The ledger over all runs; the state knows the newest only, so the log is read, beside the event loop."""
    spec = request.app[_SPEC]
    return web.json_response(await asyncio.to_thread(accounts.of_database, Path(spec.database), spec.job, live=True))


class _StopRequest(msgspec.Struct, forbid_unknown_fields=True):
    signal: int = 15
    reason: str = "stop requested"


class _RestartRequest(msgspec.Struct, forbid_unknown_fields=True):
    restart: str
    from_step: int | None = None
    verify: int | None = None
    args: tuple[str, ...] | None = None
    env: dict[str, str] = {}
    digest: str = ""
    """Of the version that is to run; empty: the one that does."""
    source: str = ""
    reason: str = ""
    author: str = ""

    @property
    def changes_code(self) -> bool:
        return self.args is not None or bool(self.env) or bool(self.digest)


class _Change(msgspec.Struct):
    """As much of a request to change the code as says what was tried."""

    kind: Literal["update", "rollback"] = "update"
    author: str = ""


class _SignalRequest(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    node: str
    evidence: str


async def _stop(request: web.Request) -> web.Response:
    wanted = await wish_of(request, _StopRequest)
    if isinstance(wanted, web.Response):
        return wanted
    request.app[_CONDUCTOR].request_stop(wanted.signal, wanted.reason)
    return web.json_response({"stopping": True}, status=202)


async def _restart(request: web.Request) -> web.Response:
    """409 with the reason where it cannot be done (`wrong_usage`: nor later), 503 where that is not known yet."""
    wanted = await wish_of(request, _RestartRequest)
    if isinstance(wanted, web.Response):
        return wanted
    if wanted.changes_code and not scopes.may_change_code(request):
        conductor, spec = request.app[_CONDUCTOR], request.app[_SPEC]
        return scopes.refused(conductor, request, spec, "restart", wanted.author or None)
    if reason := next(filter(None, map(environment.why_not, wanted.env)), None):
        return web.json_response({"error": reason, "wrong_usage": True}, status=409)
    # the conductor knows which attempt is meant, and when
    asked = RestartRequested(
        time=0.0, attempt=0, restart=wanted.restart, from_step=wanted.from_step, verify=wanted.verify
    )
    conductor = request.app[_CONDUCTOR]
    if not wanted.changes_code:
        return change_routes.answer(conductor.request_restart(asked), {"restart": wanted.restart})
    wish = changes.Wish(
        change=wanted.restart,
        act="restart",
        source=wanted.source,
        args=wanted.args,
        env=wanted.env,
        reason=wanted.reason,
        author=wanted.author,
    )
    refusal = await change_routes.submit(
        conductor, request, wish, wanted.digest, lambda whole: conductor.request_restart(asked, whole)
    )
    return change_routes.answer(refusal, {"restart": wanted.restart})


async def _change_refused(request: web.Request) -> web.Response:
    try:
        change = msgspec.json.decode(await request.read(), type=_Change)
    except (msgspec.DecodeError, web.HTTPRequestEntityTooLarge):
        change = _Change()
    return scopes.refused(request.app[_CONDUCTOR], request, request.app[_SPEC], change.kind, change.author or None)


async def _restarted(request: web.Request) -> web.Response:
    found = views.restart(request.app[_CONDUCTOR].state, request.match_info["name"])
    return web.json_response(found) if found is not None else web.json_response({"error": "unknown"}, status=404)


async def _signals(request: web.Request) -> web.Response:
    raised = await wish_of(request, _SignalRequest)
    if isinstance(raised, web.Response):
        return raised
    if raised.node not in request.app[_CONDUCTOR].state.known_nodes():
        return web.json_response({"error": f"no node {raised.node!r} in this job"}, status=404)
    request.app[_CONDUCTOR].raise_signal(raised.node, raised.kind, raised.evidence)
    return web.json_response({"noted": True}, status=202)


async def _join(request: web.Request) -> web.Response:
    """A seat for a node of a job on several machines, and what its processes need to know."""
    wish = await wish_of(request, Wish)
    if isinstance(wish, web.Response):
        return wish
    spec = request.app[_SPEC]
    admitted = await request.app[_CONDUCTOR].admit(wish)
    if isinstance(admitted, Refusal):
        return web.json_response({"error": admitted.because}, status=409)
    seat = {"job": spec.job, "run_id": spec.run_id, "node": admitted.node}
    return web.json_response({**seat, "next_attempt": request.app[_CONDUCTOR].state.next_attempt})


async def _agent(request: web.Request) -> web.WebSocketResponse:
    """Serve one agent for as long as its connection lasts."""
    spec, conductor = request.app[_SPEC], request.app[_CONDUCTOR]
    socket = web.WebSocketResponse(max_msg_size=_MAX_FRAME_BYTES, heartbeat=30.0, compress=False)
    await socket.prepare(request)
    outbox: asyncio.Queue[Desired] = asyncio.Queue()
    send = outbox.put_nowait
    writer = asyncio.create_task(_write(socket, outbox))
    node: str | None = None
    clock = AgentClock()
    try:
        async for message in socket:
            if message.type is not WSMsgType.BINARY:
                continue
            try:
                report = _report_decoder.decode(message.data)
            except msgspec.DecodeError as error:
                _log.error("a frame from %s was not a report: %s", request.remote, error)
                break
            if refusal := _refusal(report, spec, conductor):
                _log.error("report refused: %s", refusal)
                if report.run_id != spec.run_id or report.report.node not in conductor.state.known_nodes():
                    await socket.close(code=DISMISSED, message=refusal.encode()[:120])
                break
            if node is None:
                node = report.report.node
                conductor.connect(node, send)
            conductor.hear(clock.corrected(report, conductor.now()))
            conductor.windows.note_offset(node, clock.difference_s)
    finally:
        writer.cancel()
        if node is not None:
            conductor.disconnect(node, send)
    return socket


def _refusal(report: Report, spec: ControllerSpec, conductor: Conductor) -> str:
    """Why this report must not be heard; empty when it may."""
    if report.job != spec.job or report.run_id != spec.run_id:
        return f"it belongs to {report.job} ({report.run_id}), this is {spec.job} ({spec.run_id})"
    if report.report.node not in conductor.state.known_nodes():
        return f"node {report.report.node!r} is not part of this job"
    if report.term > conductor.state.term:
        return f"{report.report.node} obeys term {report.term}, this controller is of term {conductor.state.term}"
    return ""


async def _write(socket: web.WebSocketResponse, outbox: asyncio.Queue[Desired]) -> None:
    while True:
        order = await outbox.get()
        try:
            await socket.send_bytes(_encoder.encode(order))
        except (ConnectionError, RuntimeError) as error:
            _log.warning("an order could not be sent: %s", error)
            return
