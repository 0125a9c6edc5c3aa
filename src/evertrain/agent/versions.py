"""How does a version of the code come to this node? As an archive from the controller, unpacked beside those before it.

What runs goes on meanwhile; only what is prepared next is of the version that was ordered. Nothing is taken on trust:
an archive is compared with the digest that was ordered before it counts as being here, and a folder is verified
whenever it is ordered anew. Agents of one machine share the folder of archives and versions; each writes under names of
its own and renames what is whole.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import re
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path

import aiohttp

from evertrain.agent.aside import append, aside
from evertrain.agent.commands import NOT_READY, Code
from evertrain.model.code import CodeOrder
from evertrain.model.spec import AgentSpec
from evertrain.versions import archive, folder
from evertrain.versions.errors import ArchiveError

_log = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""What may heal by itself, as a network or a controller that is started again, is a problem only after so long."""
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 5.0
_CONNECT_S, _SILENCE_S = 10.0, 30.0
_CHUNK_BYTES = 1 << 20
_HOPELESS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS})
"""No room, no permission: whoever tries again at once finds the same."""


class _Refused(Exception):
    """There is no archive to be had, whoever asks."""


class _Unreachable(Exception):
    """The archive has not come, or not all of it."""


class _Outdated(Exception):
    """Another order has come meanwhile."""


class Versions:
    """Has the version here that was ordered last: `code` is what the keeper is to know of it."""

    def __init__(self, spec: AgentSpec, token: str, wake: Callable[[], None]) -> None:
        self._spec = spec
        self._headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
        self._wake = wake
        self._order: CodeOrder | None = None
        self._task: asyncio.Task[None] | None = None
        self._folder: Path | None = None
        self._turn = threading.Lock()
        """One of our threads builds at a time, also where the order of the one before is outdated."""
        self.problem = ""
        """Why it is not here, where that will not change by itself soon; it is tried again all the same."""

    @property
    def code(self) -> Code:
        if self._order is None:
            return None
        if self._folder is None:
            return NOT_READY
        return {
            "version": self._order.version,
            "digest": self._order.digest,
            "root": self._spec.code_root,
            "folder": str(self._folder),
        }

    @property
    def failed(self) -> str:
        """Digest of the version that `problem` is about; empty: there is none."""
        return self._order.digest if self._order is not None and self.problem else ""

    def obey(self, order: CodeOrder | None) -> None:
        """Bring this version here, and none that was ordered before. The same order again changes nothing."""
        if order == self._order:
            return
        if self._task is not None:
            self._task.cancel()
        self._order, self._task, self._folder, self.problem = order, None, None, ""
        if order is not None:
            self._task = asyncio.create_task(self._bring(order))

    async def _bring(self, order: CodeOrder) -> None:
        """Try until it is here."""
        trouble_time: float | None = None
        spoilt, retry_s, said = 0, _FIRST_RETRY_S, ""
        while True:
            lasts = False
            try:
                self._folder = await self._here(order, anew=spoilt > 0)
                break
            except (ArchiveError, _Refused) as error:
                # once more: it may have been damaged here, or on its way
                spoilt, because, lasts = spoilt + 1, str(error), spoilt > 0
            except _Unreachable as error:
                because = str(error)
            except OSError as error:
                because = f"{error.filename or self._spec.code_dir}: {error.strerror or error}"
                lasts = error.errno in _HOPELESS
            except Exception as error:  # a bug of ours; the agent lives on
                _log.exception("version %d", order.version)
                because, lasts = f"{type(error).__name__}: {error}; see the agent's log", True
            now = time.monotonic()
            trouble_time = now if trouble_time is None else trouble_time
            line = f"{self._spec.node} cannot have version {order.version} of the code: {because}"
            if line != said:
                _log.warning("%s", line)
                said = line
            if (lasts or now - trouble_time >= PATIENCE_S) and line != self.problem:
                self.problem = line
                self._wake()
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
            retry_s = min(2 * retry_s, _LAST_RETRY_S)
        _log.info("version %d of the code is here: %s", order.version, self._folder)
        self.problem = ""
        self._wake()

    async def _here(self, order: CodeOrder, *, anew: bool) -> Path:
        """The version's folder, verified. `anew`: the archive that lies here is not to be relied upon."""
        if not self._spec.code_root or not self._spec.code_dir:
            raise _Refused("it was started without a folder of code; name one with --code DIR")
        kept = Path(self._spec.code_dir) / f"{order.digest}.tar.gz"
        if anew or not await aside("code", kept.exists):
            await self._fetch(order, kept)
        return await aside("code", self._build, order, kept)

    def _build(self, order: CodeOrder, kept: Path) -> Path:
        with self._turn:
            if order is not self._order:
                raise _Outdated
            root, code_dir = Path(self._spec.code_root), Path(self._spec.code_dir)
            return folder.build(kept, order.digest, root, code_dir, order.config, self._spec.node)

    async def _fetch(self, order: CodeOrder, kept: Path) -> None:
        """Get the archive; under its own name it lies whole and verified, or not at all."""
        partial = kept.with_name(f".{order.digest}.{self._spec.node}.{secrets.token_hex(4)}.partial")
        await aside("code", self._make_room, kept.parent)
        try:
            await self._download(order, partial)
            await aside("code", _verify_and_keep, partial, kept, order)
        finally:
            aside("code", _discard, partial)

    def _make_room(self, code_dir: Path) -> None:
        """Remove what an agent of this node has left that was killed in the middle."""
        code_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        ours = re.compile(rf"\.[0-9a-f]{{64}}\.{re.escape(self._spec.node)}\.[0-9a-f]{{8}}\.partial")
        for left in code_dir.iterdir():
            if ours.fullmatch(left.name):
                _discard(left)

    async def _download(self, order: CodeOrder, partial: Path) -> None:
        most, came = order.config.most_archive_bytes, 0
        most = min(most, order.archive_bytes) if order.archive_bytes else most
        await aside("code", partial.touch, 0o600, False)
        async with aclosing(self._pieces(order.digest)) as pieces:
            async for piece in pieces:
                came += len(piece)
                if came > most:
                    raise ArchiveError(f"its archive is larger than the {most:,} bytes that it may have")
                await aside("code", append, partial, piece)

    async def _pieces(self, digest: str) -> AsyncGenerator[bytes, None]:
        """The archive as it comes; whatever is wrong with the network is `_Unreachable`."""
        url = f"{self._spec.controller_url}/v1/code/{digest}"
        patience = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers, timeout=patience, auto_decompress=False) as session,
                session.get(url, allow_redirects=False) as answer,
            ):
                if answer.status != 200:
                    trouble = _Unreachable if answer.status >= 500 else _Refused
                    raise trouble(f"the controller does not give out its archive (HTTP {answer.status})")
                async for piece in answer.content.iter_chunked(_CHUNK_BYTES):
                    yield piece
        except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
            raise _Unreachable(f"its archive has not come: {error or type(error).__name__}") from None


def _verify_and_keep(partial: Path, kept: Path, order: CodeOrder) -> None:
    archive.check(partial, order.digest, order.config)
    os.replace(partial, kept)


def _discard(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s cannot be removed: %s", path, error)
