"""`python -m evertrain.agent SPEC`: serve one node."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

import msgspec

from evertrain.agent.agent import Agent
from evertrain.model.spec import AgentSpec

_log = logging.getLogger("evertrain.agent")

# after `evertrain run` is gone the controller has the grace to stop the job; this much later we leave in any case
_AFTER_GRACE_S = 15.0


def main(argv: list[str]) -> int:
    logging.basicConfig(
        level=os.environ.get("EVERTRAIN_LOG_LEVEL", "INFO"), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # Ctrl-C reaches the whole terminal's group; only `evertrain run` answers it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec = msgspec.json.decode(Path(argv[1]).read_bytes(), type=AgentSpec)
    token = Path(spec.token_file).read_text().strip()
    try:
        asyncio.run(_serve(spec, token))
    except Exception:
        _log.exception("the agent ends; it will be started again and adopt what runs")
        return 1
    return 0


async def _serve(spec: AgentSpec, token: str) -> None:
    agent = Agent(spec, token)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, agent.over.set)
    loop.add_signal_handler(signal.SIGUSR1, agent.leave_alone, "stopped, and the first node cannot be told")
    if spec.owner_fd is not None:
        loop.add_reader(spec.owner_fd, _owner_gone, loop, spec, agent)
    await agent.run()


def _owner_gone(loop: asyncio.AbstractEventLoop, spec: AgentSpec, agent: Agent) -> None:
    assert spec.owner_fd is not None
    loop.remove_reader(spec.owner_fd)
    loop.call_later(spec.grace_s + _AFTER_GRACE_S, agent.over.set)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
