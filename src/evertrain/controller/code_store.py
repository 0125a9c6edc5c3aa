"""Where does the controller keep the versions of the code? As archives, each under its digest, in the run directory.

It captures the user's own files once and takes in what commands upload; nothing lies under a digest that has not been
compared with it. Disks may be slow, full or gone, so all of it happens in threads, and what goes wrong is the trouble
of whoever asked; training goes on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from evertrain.agent.aside import append, aside
from evertrain.controller.capture import Asked, capture
from evertrain.model.code import Code, Diff
from evertrain.model.spec import ControllerSpec
from evertrain.versions import archive
from evertrain.versions import diff as differences
from evertrain.versions.errors import ArchiveError

_log = logging.getLogger(__name__)

_ARRIVING = re.compile(r"\.[0-9a-f]{16}\.arriving")


class CodeStore:
    """The archives of one job."""

    def __init__(self, spec: ControllerSpec, wake: Callable[[], None]) -> None:
        """`wake` is called when `captured` has come to be known."""
        self._spec = spec
        self._config = spec.config.code
        self._wake = wake
        self._folder = Path(spec.code_dir or f"{spec.run_dir}/code")
        self._verified: dict[str, tuple[tuple[int, ...], Code]] = {}
        """By digest: what it is, and which file it was found in."""
        self._scripts: dict[str, str | None] = {}
        """By digest: where the job's script lies in it."""
        self._differences: dict[tuple[str, str], asyncio.Future[Diff]] = {}
        self._own: set[str] = set()
        """Names of what is arriving; other such files were left behind."""
        self._capturing: asyncio.Task[None] | None = None
        self.captured: tuple[Code | None, str] | None = None
        """The user's own files, or why they are not kept; None: not known yet."""

    def begin(self) -> None:
        """Capture the user's own files, once."""
        if self._capturing is None:
            self._capturing = asyncio.create_task(self._capture())

    def path(self, digest: str) -> Path:
        """Where the archive is, if it is here."""
        return self._folder / f"{digest}.tar.gz"

    def known(self, digest: str) -> Code | None:
        """What lies under this digest, verified; None: nothing, or nothing good. The first time it is read: for a
        thread."""
        path = self.path(digest)
        try:
            seen = _identity(path)
            known = self._verified.get(digest)
            if known is None or known[0] != seen:
                known = self._verified[digest] = (seen, self._verify(path, digest))
            return known[1]
        except FileNotFoundError:
            return None
        except (ArchiveError, OSError) as error:
            _log.warning("%s cannot be used: %s", path, error)
            return None

    def script_in(self, digest: str) -> str | None:
        """Where the job's script lies in a version that is here; None: not in it. The first time: for a thread.

        Raises ArchiveError, OSError.
        """
        if digest not in self._scripts:
            self._verify(self.path(digest), digest)
        return self._scripts[digest]

    async def put(self, digest: str, pieces: AsyncIterator[bytes]) -> Code:
        """Take in an archive. Raises ArchiveError, with one line, for what is not what it should be; OSError."""
        partial = self._partial()
        most, came = self._config.most_archive_bytes, 0
        try:
            await aside("code", self._make_room)
            await aside("code", partial.touch, 0o600, False)
            async for piece in pieces:
                came += len(piece)
                if came > most:
                    raise ArchiveError(f"the archive is larger than {most:,} bytes (code.most_bytes of the config)")
                await aside("code", append, partial, piece)
            return await aside("code", self._take_in, partial, digest)
        finally:
            aside("code", self._discard, partial)

    async def difference(self, before: str, after: str) -> Diff:
        """`diff`, once for all who ask for it: who has no answer yet asks again, and large archives take a while."""
        pair = before, after
        if pair not in self._differences:
            self._differences[pair] = asyncio.ensure_future(aside("code", self.diff, before, after))
        try:
            return await asyncio.shield(self._differences[pair])
        except (ArchiveError, OSError):
            self._differences.pop(pair, None)
            raise

    def diff(self, before: str, after: str) -> Diff:
        """What is different between two versions that are here; for a thread. Raises ArchiveError."""
        return differences.between(self.path(before), self.path(after), self._config, before, after)

    def _take_in(self, partial: Path, digest: str) -> Code:
        code = self._verify(partial, digest)
        return self._keep(partial, code)

    def _keep(self, partial: Path, code: Code) -> Code:
        """Under its digest, for good. One that is there already stays, as its size may have been announced."""
        if (known := self.known(code.digest)) is not None:
            return known
        path = self.path(code.digest)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        seen = _identity(partial)
        os.replace(partial, path)
        _sync_folder(self._folder)
        self._verified[code.digest] = (seen, code)
        return code

    def _verify(self, path: Path, digest: str) -> Code:
        found = archive.check(path, digest, self._config)
        held = {one.path for one in (*found.files, *found.links)}
        self._scripts[digest] = next((path for path in _script(self._spec) if path in held), None)
        return found.code

    async def _capture(self) -> None:
        try:
            self.captured = await self._captured()
        except OSError as error:
            where = error.filename or self._folder
            self.captured = None, f"the code is not captured: {where}: {error.strerror or error}"
        except Exception as error:  # a bug of ours: training needs no versions
            _log.exception("the code cannot be captured")
            self.captured = None, f"the code is not captured: {type(error).__name__}: {error}; see the controller's log"
        code, problem = self.captured
        _log.info("the code as it is: %s", code or problem)
        self._wake()

    async def _captured(self) -> tuple[Code | None, str]:
        if not self._spec.code_root:
            return None, "there is no folder of code; name one with --code DIR"
        own = self._folder / ".capture"
        await aside("code", self._make_room)
        await aside("code", shutil.rmtree, own, True)
        asked = Asked(
            root=self._spec.code_root,
            skip=(self._spec.run_dir, self._spec.log_root, str(self._folder)),
            config=self._config,
            target=str(own / "code.tar.gz"),
        )
        try:
            found = await capture(asked)
            if found.code is None:
                return None, found.problem
            return await aside("code", self._keep, Path(asked.target), found.code), ""
        finally:
            aside("code", shutil.rmtree, own, True)

    def _make_room(self) -> None:
        """A folder, without what a controller has left that was killed in the middle."""
        # not its parents: a run directory that is gone stays so
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for left in self._folder.iterdir():
            if _ARRIVING.fullmatch(left.name) and left.name not in self._own:
                self._discard(left)

    def _partial(self) -> Path:
        name = f".{secrets.token_hex(8)}.arriving"
        self._own.add(name)
        return self._folder / name

    def _discard(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s cannot be removed: %s", path, error)
        self._own.discard(path.name)


def _script(spec: ControllerSpec) -> list[str]:
    """Where the script may lie in the folder of the code: either may be named through links."""
    if spec.command.kind != "script" or not spec.code_root:
        return []
    named = os.path.abspath(spec.command.target), os.path.abspath(spec.code_root)
    real = os.path.realpath(named[0]), os.path.realpath(named[1])
    return [os.path.relpath(script, root) for script, root in (named, real) if Path(script).is_relative_to(root)]


def _identity(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
