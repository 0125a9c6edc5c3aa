"""`python -m evertrain.controller SPEC`: serve one job until it has ended."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path

import msgspec
from aiohttp import web

from evertrain.controller import ledger, scopes, server, views
from evertrain.controller.clocks import clock_of_term
from evertrain.controller.conductor import Conductor
from evertrain.controller.store import EventStore, read_log
from evertrain.decide import inspection, ladder
from evertrain.decide.applying import apply, fold
from evertrain.decide.state import JobState
from evertrain.keeper.children import boot_id
from evertrain.model.records import AnyRecord, PolicyAdopted, RunStarted, TermStarted
from evertrain.model.spec import ControllerSpec

_log = logging.getLogger("evertrain.controller")

# so long may agents take to fetch the order to shut down
_FAREWELL_S = 3.0


def main(argv: list[str]) -> int:
    logging.basicConfig(
        level=os.environ.get("EVERTRAIN_LOG_LEVEL", "INFO"), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # aiohttp's request lines would drown the log at one heartbeat a second and node
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    # Ctrl-C reaches the whole terminal's group; only `evertrain run` answers it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec = msgspec.json.decode(Path(argv[1]).read_bytes(), type=ControllerSpec)
    # collecting the oldest generation is what limits the number of agents, not the protocol
    gc.set_threshold(50_000, 50, 1_000)
    try:
        asyncio.run(_serve(spec))
    except Exception:
        _log.exception("the controller ends; it will be started again and rebuilt from its log")
        return 1
    return 0


async def _serve(spec: ControllerSpec) -> None:
    store = EventStore(Path(spec.database))
    state = await _take_over(spec, store)
    conductor = Conductor(spec, state, store)
    token = Path(spec.token_file).read_text().strip()
    runner = web.AppRunner(server.build(spec, conductor, token, scopes.code_token(spec)), access_log=None)
    await runner.setup()
    listener = socket.socket(fileno=spec.listen_fd)
    await web.SockSite(runner, listener, shutdown_timeout=1.0).start()
    _write_json(Path(spec.run_dir) / "controller.json", {"url": spec.url, "pid": os.getpid(), "term": state.term})
    gc.freeze()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, conductor.request_stop, signal.SIGTERM, "the controller got SIGTERM")
    if spec.owner_fd is not None:
        loop.add_reader(spec.owner_fd, _owner_gone, loop, spec.owner_fd, conductor)
    conducting = asyncio.create_task(conductor.run())
    over = asyncio.create_task(conductor.ended.wait())
    await asyncio.wait({conducting, over}, return_when=asyncio.FIRST_COMPLETED)
    if conducting.done():
        over.cancel()
        conducting.result()  # raises: a bug in the conductor is the end of this process
    _write_result(spec, conductor)
    await _farewell(conductor)
    conducting.cancel()
    conductor.close()
    await runner.cleanup()
    store.close()


async def _take_over(spec: ControllerSpec, store: EventStore) -> JobState:
    """Rebuild the job from its log and open a new term; the first controller of a run opens the run as well."""
    log = read_log(Path(spec.database))
    state = fold(log)
    same_run = state.run is not None and state.run.run_id == spec.run_id
    monotonic = time.monotonic()
    clock = clock_of_term(
        state.clock if same_run else None,
        log[-1].time if log else 0.0,
        wall=time.time(),
        monotonic=monotonic,
        boot_id=boot_id(),
    )
    now = clock.at(monotonic)
    records: list[AnyRecord] = []
    if not same_run:
        completed = state.ended is not None and state.ended.state == "done"
        records.append(
            RunStarted(
                time=now,
                run_id=spec.run_id,
                nodes=spec.nodes,
                standby=spec.standby,
                nproc_per_node=spec.nproc_per_node,
                fresh=spec.fresh or completed,
                forgets=spec.fresh,
                start=spec.start,
                command=" ".join((spec.command.target, *spec.command.args)),
                mesh=spec.mesh,
                max_restarts=spec.max_restarts,
                observe_only=spec.observe_only,
                least=spec.least,
                seats=spec.seats,
                node_rank=spec.node_rank,
                # it may have waited for the run before it to end
                began_time=max(spec.began_time or now, log[-1].time if log else 0.0),
            )
        )
    records.append(TermStarted(time=now, term=state.term + 1, clock=clock))
    policy = ladder.policy_of(spec.config, inspection.sources(spec.config))
    if (name := ladder.policy_hash(policy)) != state.policy:
        records.append(PolicyAdopted(time=now, hash=name, policy=policy))
    await store.append(records)
    for record in records:
        state = apply(state, record)
    return state


def _owner_gone(loop: asyncio.AbstractEventLoop, fd: int, conductor: Conductor) -> None:
    loop.remove_reader(fd)
    conductor.request_stop(signal.SIGTERM, "`evertrain run` is gone")


async def _farewell(conductor: Conductor) -> None:
    """Agents have been sent the order to shut down; leave when they have hung up, or soon."""
    deadline = time.monotonic() + _FAREWELL_S
    while time.monotonic() < deadline:
        if not any(seen.connected for seen in conductor.picture.nodes.values()):
            return
        await asyncio.sleep(0.02)


def _write_result(spec: ControllerSpec, conductor: Conductor) -> None:
    ended = conductor.state.ended
    assert ended is not None
    known = views.incidents(conductor.state)
    last = known[-1] if known and ended.state == "failed" else None
    failure = None
    if last is not None and last["ranks"]:
        failure = {
            "rank": last["ranks"][0],
            "node": last["nodes"][0],
            "status": last["status"],
            "traceback": last["traceback"],
        }
    result = {
        "state": ended.state,
        "exit_code": ended.exit_code,
        "message": ended.message,
        "first_failure": failure,
        "status": conductor.status(),
        "attempts": ledger.attempts(conductor.state),
        "incidents": [seen for seen in known if any(seen["attempt"] == a.number for a in conductor.state.attempts)],
    }
    # `run` reads either; the second one is there when the disk is full or the folder gone
    for folder in filter(None, (spec.run_dir, spec.run_folder)):
        _write_json(Path(folder) / "result.json", result)


def _write_json(path: Path, value: object) -> None:
    """Replace the file in one step; a disk that is full costs the file, not the job."""
    fresh = path.with_suffix(".new")
    try:
        fresh.write_text(json.dumps(value))
        fresh.replace(path)
    except OSError as error:
        _log.error("%s cannot be written: %s", path, error)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
