"""Is NCCL given our profiler plugin, and does it use it?

Only on a node with NVIDIA GPUs, unless the user has a plugin of their own. It is compiled beside everything else when
the agent starts, the first time on a machine; ranks of an attempt that starts before that is over have none. Whatever
is missing makes us blind, and fails nothing.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from evertrain.agent.rings import Rings
from evertrain.model.spec import AgentSpec
from evertrain.trace import layout, plugin, rings

_log = logging.getLogger(__name__)

VARIABLE = "NCCL_PROFILER_PLUGIN"
DEVICES = "/dev/nvidia[0-9]*"
_LOOK_EVERY_S = 2.0
_WITHOUT = "the inside of NCCL's collectives is not traced"


class NcclTrace:
    def __init__(
        self,
        spec: AgentSpec,
        of_node: Rings,
        *,
        environ: Mapping[str, str] = os.environ,
        devices: str = DEVICES,
        config_files: tuple[str, ...] = ("/etc/nccl.conf", "~/.nccl.conf"),
    ) -> None:
        self._spec = spec
        self._rings = of_node
        self._environ = environ
        self._config_files = config_files
        self._wanted = spec.trace.enabled and spec.trace.nccl and bool(glob.glob(devices))
        self._library: Path | None = None
        self._blind = ""
        self._users = ""
        self._late = ""
        self._heard: dict[Path, str] = {}
        self._next_look = 0.0
        self._said = ""
        self._thread: threading.Thread | None = None

    @property
    def blind(self) -> tuple[str, ...]:
        return tuple(filter(None, (self._blind, self._users, self._late)))

    def start(self) -> None:
        """Have the plugin, in a thread of its own: a compiler may take seconds."""
        if self._wanted:
            self._thread = threading.Thread(target=self._find, name="evertrain-nccl-plugin", daemon=True)
            self._thread.start()

    def wait(self, limit_s: float) -> None:
        """Until that is over."""
        if self._thread is not None:
            self._thread.join(limit_s)

    def _find(self) -> None:
        try:
            self._library = plugin.find(Path(self._spec.disk_dir).parent / "nccl", self._environ)
        except plugin.Unavailable as error:
            self._blind = f"{_WITHOUT}: {error}"
        except Exception:  # a bug of ours; ranks train on
            _log.exception("the plugin for NCCL")
            self._blind = f"{_WITHOUT}; see the agent's log"

    def environment(self, attempt: int, rank: int, term: int, inherited: Mapping[str, str]) -> dict[str, str]:
        """What a rank is told, beside RANK and LOCAL_RANK; nothing where there is no plugin, or the user has one."""
        if not self._wanted:
            return {}
        if self._library is None:
            if not self._blind:
                self._late = f"{_WITHOUT} in attempt {attempt}: the plugin was not compiled yet"
            return {}
        self._late = ""
        if theirs := self._of_the_user(inherited):
            self._users = f"{_WITHOUT}: {theirs} is the user's own; without it NCCL is given ours"
            return {}
        self._users = ""
        return {
            VARIABLE: str(self._library),
            "EVERTRAIN_TRACE_RING": str(self._rings.prefix(attempt, rank)),
            "EVERTRAIN_TRACE_BYTES": str(self._spec.trace.writer_mib << 20),
            "EVERTRAIN_TRACE_NODE": self._spec.node,
            "EVERTRAIN_TRACE_JOB": self._spec.job,
            "EVERTRAIN_TRACE_TERM": str(term),
            "EVERTRAIN_TRACE_ATTEMPT": str(attempt),
        }

    def _of_the_user(self, inherited: Mapping[str, str]) -> str:
        """Where the user names a plugin; empty: nowhere."""
        if inherited.get(VARIABLE):
            return f"{VARIABLE}={inherited[VARIABLE]}"
        for name in (*self._config_files, inherited.get("NCCL_CONF_FILE", "")):
            try:
                text = Path(os.path.expanduser(name)).read_text(errors="replace") if name else ""
            except OSError:
                continue
            if found := re.search(rf"^\s*{VARIABLE}\s*=\s*(\S+)", text, re.MULTILINE):
                return f"{VARIABLE}={found[1]} in {name}"
        return ""

    def said(self, attempt: int | None) -> str:
        """What the plugins of this attempt's ranks have written about themselves."""
        if not self._wanted or (now := time.monotonic()) < self._next_look:
            return self._said
        self._next_look = now + _LOOK_EVERY_S
        here = {
            path: name.rank
            for path, name in self._rings.files()
            if name.writer == "nccl" and name.kind == "ring" and name.attempt == attempt
        }
        self._heard = {path: line for path, line in self._heard.items() if path in here}
        for path in here.keys() - self._heard.keys():
            if line := _introduction(path):
                self._heard[path] = line
        ranks = len({here[path] for path in self._heard})
        lines = "; ".join(sorted(set(self._heard.values())))
        self._said = f"{ranks} rank{'s' if ranks > 1 else ''}, {lines}" if ranks else ""
        return self._said


def _introduction(path: Path) -> str:
    """Interface, NCCL's version and the events that are asked for, by one of its communicators; empty: none yet."""
    try:
        with path.open("rb") as file:
            header = rings.header_of(file.read(layout.HEADER_BYTES), path.stat().st_size)
            table = file.read(header.table * layout.RECORD_BYTES)
    except (OSError, ValueError):
        return ""
    kind_at = 8
    for at in range(0, len(table), layout.RECORD_BYTES):
        record = table[at : at + layout.RECORD_BYTES]
        if record[kind_at] == layout.KINDS["communicator"] and rings.number_of(record):
            names = (name for name, _ in (*layout.COMMON, *layout.COMMUNICATOR))
            values = dict(zip(names, layout.COMMUNICATOR_STRUCT.unpack_from(record), strict=True))
            return f"{_release(values['version'])}interface v{values['api']}, events {values['mask']:#x}"
    return ""


def _release(version: int) -> str:
    return f"NCCL {version // 10000}.{version // 100 % 100}.{version % 100}, " if version else ""
