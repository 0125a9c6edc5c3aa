"""How does a command bring nodes? `platform.request_command` of the config, run on the controller's host by `/bin/sh`.

It finds EVERTRAIN_JOB, EVERTRAIN_NODES_WANTED and EVERTRAIN_ENDPOINT in its environment, and has to return: what it
asks for (`sbatch standby.sh`) runs `evertrain run` on the new machine, which joins. Its output goes into the log.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading

from evertrain.model.config import PlatformConfig
from evertrain.model.words import counted
from evertrain.platforms.base import Platform

_log = logging.getLogger(__name__)

_MOST_LINES = 200
_LAST_WORDS_S = 2.0


class Command:
    """Runs in a thread of its own, one request at a time; what it says is logged, what goes wrong is a `problem`."""

    def __init__(self, config: PlatformConfig, job: str, endpoint: str, otherwise: Platform | None) -> None:
        self._config = config
        self._environ = {"EVERTRAIN_JOB": job, "EVERTRAIN_ENDPOINT": endpoint}
        self._otherwise = otherwise
        self._turn = threading.Lock()
        self._state = threading.Lock()
        self._running: subprocess.Popen[str] | None = None
        self._closed = False
        self._problem = ""

    @property
    def problem(self) -> str:
        return self._problem

    def request(self, nodes: int, because: str) -> str:
        threading.Thread(target=self._run, args=(nodes,), name="platform", daemon=True).start()
        asked = f"{counted(nodes, 'node')} asked for by `{self._config.request_command}`"
        return (
            f"{asked} ({because})"
            if self._otherwise is None
            else f"{asked}; or {self._otherwise.request(nodes, because)}"
        )

    def close(self) -> None:
        with self._state:
            self._closed = True
            if self._running is not None:
                _kill(self._running)

    def _run(self, nodes: int) -> None:
        with self._turn:
            self._problem = self._outcome({**os.environ, **self._environ, "EVERTRAIN_NODES_WANTED": str(nodes)})
        if self._problem:
            _log.error("%s", self._problem)

    def _outcome(self, environ: dict[str, str]) -> str:
        """Run the command to its end, or to its limit; what went wrong."""
        named = f"platform.request_command `{self._config.request_command}`"
        with self._state:
            if self._closed:
                return ""
            try:
                self._running = process = subprocess.Popen(
                    ["/bin/sh", "-c", self._config.request_command],
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                )
            except OSError as error:
                return f"{named} cannot be run: {error.strerror}"
        too_long = False
        try:
            said, _ = process.communicate(timeout=self._config.limit_s)
        except subprocess.TimeoutExpired:
            too_long = True
            _kill(process)
            said = _last_words(process)
        with self._state:
            self._running = None
        lines = said.splitlines()[-_MOST_LINES:]
        for line in lines:
            _log.info("%s: %s", named, line)
        if too_long:
            return f"{named} had not ended after {self._config.limit_s:g} s (platform.limit_s) and was ended"
        if process.returncode and not self._closed:
            last = f": {lines[-1]}" if lines else ""
            return f"{named} failed with exit code {process.returncode}{last}"
        return ""


def _last_words(process: subprocess.Popen[str]) -> str:
    """What it had said; a child in a session of its own may hold the pipe open for ever, and is not waited for."""
    try:
        return process.communicate(timeout=_LAST_WORDS_S)[0]
    except subprocess.TimeoutExpired as silent:
        assert process.stdout is not None
        process.stdout.close()
        process.wait()  # the shell itself is dead
        said = silent.output or b""
        return said.decode(errors="replace") if isinstance(said, bytes) else str(said)


def _kill(process: subprocess.Popen[str]) -> None:
    """All of it: a shell's children as well, which would keep the pipe open."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
