"""Where do ranks run from, when not from the user's own files?

    <code_dir>/<digest, 16 digits>-<root, 6 digits>/        a version folder: the unpacked archive, sources read-only
    <code_dir>/<the same>.json                              its manifest
    <code_dir>/.<the same>.…                                being built, or on its way out

Whatever the original folder has that is no code, such as data, secrets and links that lead out of it, a version folder
has as links back (`evertrain.versions.links`), so that scripts find it beside them as before.

What is no source, such as a table of losses that was there when the code was captured, scripts may write to: what they
have written is theirs, and stays.

Several agents of a machine may build the same folder at once, and each may die at any point: it appears by a rename,
and is looked at file by file before every use. A lock only saves them from doing the work twice.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from evertrain.model.config import CodeConfig
from evertrain.versions import links, names
from evertrain.versions.archive import Entry, check, info_of, walk
from evertrain.versions.errors import ArchiveError
from evertrain.versions.manifest import KeptFile, Manifest
from evertrain.versions.tree import File, Link

LOCK_LIMIT_S = 60.0
"""So long another one's building is waited for; a process that is stopped must not hold up the others for good."""
_TRIES = 5
_CHUNK = 1 << 20


def build(
    archive: Path,
    digest: str,
    root: Path,
    code_dir: Path,
    config: CodeConfig,
    name_of_builder: str,
    lock_limit_s: float = LOCK_LIMIT_S,
) -> Path:
    """The version folder of an archive, verified, with links back to `root` as it is now.

    What is there and whole is kept; what is damaged makes way for a new one. The archive is needed only when something
    is to be unpacked. Raises ArchiveError, or OSError where this machine is the reason, a full disk for example; then
    no folder is there that was not there before.
    """
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ArchiveError(f"{names.shown(digest, 12)!r} is not the digest of an archive")
    root, code_dir = Path(os.path.abspath(root)), Path(os.path.abspath(code_dir))
    code_dir.mkdir(parents=True, exist_ok=True)
    folder = code_dir / f"{digest[:16]}-{hashlib.sha256(os.fsencode(root)).hexdigest()[:6]}"
    builder = re.sub(r"[^A-Za-z0-9_-]", "_", name_of_builder)[:40]
    with _lock(code_dir / f".{folder.name}.lock", lock_limit_s) as alone:
        if alone:
            _clean(folder)
        for _ in range(_TRIES):
            manifest = _manifest_of(folder, digest)
            if manifest is not None and not problems(folder, manifest):
                break
            manifest = _unpack(archive, digest, folder, config, builder)
        else:
            raise OSError(errno.EBUSY, "another process keeps changing the version folder", str(folder))
        links.refresh(folder, manifest, root, code_dir, config.exclude)
    return folder


def problems(folder: Path, manifest: Manifest) -> tuple[str, ...]:
    """The paths of a version folder that are not as the manifest says; what else is in there does not matter."""
    wrong: list[str] = []
    if folder.is_symlink() or not folder.is_dir():
        return (".",)
    for path in manifest.folders:
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(os.lstat(folder / path).st_mode):
                continue
        wrong.append(path)
    for link in manifest.links:
        with contextlib.suppress(OSError):
            if os.readlink(folder / link.path) == link.target:
                continue
        wrong.append(link.path)
    with contextlib.suppress(OSError):
        made_ns = os.stat(_manifest_path(folder)).st_mtime_ns
        wrong += [file.path for file in manifest.files if not _is_whole(folder / file.path, file, made_ns)]
        return tuple(sorted(wrong))
    return tuple(sorted([*wrong, *(file.path for file in manifest.files)]))


def _is_source(path: str, executable: bool) -> bool:
    return executable or path.endswith(links.CODE)


def _is_whole(path: Path, file: KeptFile, made_ns: int) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as opened:
            status = os.fstat(descriptor)
            is_own = not _is_source(file.path, file.executable) and status.st_mtime_ns > made_ns
            if is_own and stat.S_ISREG(status.st_mode):
                return True  # a script has written to it since
            as_meant = stat.S_ISREG(status.st_mode) and status.st_size == file.bytes
            if not as_meant or bool(status.st_mode & stat.S_IXUSR) != file.executable:
                return False
            found = hashlib.sha256()
            while chunk := opened.read(_CHUNK):
                found.update(chunk)
            return found.hexdigest() == file.sha256
    except OSError:
        return False


def _manifest_of(folder: Path, digest: str) -> Manifest | None:
    try:
        manifest = msgspec.json.decode(_manifest_path(folder).read_bytes(), type=Manifest)
    except (OSError, ValueError):
        return None
    return manifest if manifest.digest == digest else None


def _manifest_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def _unpack(archive: Path, digest: str, folder: Path, config: CodeConfig, builder: str) -> Manifest:
    manifest = check(archive, digest, config)
    hidden = Path(tempfile.mkdtemp(prefix=f".{folder.name}.{builder}.", dir=folder.parent))
    try:
        target = hidden / "code"
        target.mkdir()
        if walk(archive, digest, config, _Unpacking(target).take) != manifest:
            raise ArchiveError(f"archive {digest[:12]} changed while it was unpacked")
        # last, so that no file was ever written through one
        for link in manifest.links:
            os.symlink(link.target, target / link.path)
        for path in ("", *manifest.folders):
            os.chmod(target / path, 0o755)
        # a loss of power may still empty files of a folder that is there: they are looked at before every use
        said = hidden / "manifest"
        said.write_bytes(msgspec.json.encode(manifest))
        os.replace(said, _manifest_path(folder))
        _put(target, folder, hidden / "old", manifest)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return manifest


def _put(new: Path, folder: Path, old: Path, manifest: Manifest) -> None:
    """Rename into place; what is damaged there makes way, but for what else has come to lie in it."""
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, old)
    try:
        os.rename(new, folder)
    except OSError as error:
        # else somebody was faster; what they have put there is looked at next
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            with contextlib.suppress(OSError):
                os.rename(old, folder)
            raise
    _salvage(old, folder, manifest)


def _salvage(old: Path, folder: Path, manifest: Manifest) -> None:
    """Scripts may have written beside their own files: that is not ours to drop."""
    if old.is_symlink():
        return
    known = {file.path for file in manifest.files} | {link.path for link in manifest.links}
    for place, folders, files in os.walk(old):
        relative = os.path.relpath(place, old)
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in files + [name for name in folders if os.path.islink(os.path.join(place, name))]:
            path = os.path.normpath(os.path.join(relative, name))
            if path in known:
                continue
            with contextlib.suppress(OSError):
                os.makedirs(folder / os.path.dirname(path), exist_ok=True)
                if not os.path.lexists(folder / path):
                    os.rename(os.path.join(place, name), folder / path)


def _clean(folder: Path) -> None:
    """Remove what builders left behind that were killed: nobody else is building now."""
    for name in os.listdir(folder.parent):
        left = folder.parent / name
        if not name.startswith(f".{folder.name}.") or not left.is_dir():
            continue
        if os.path.lexists(old := left / "old"):
            if not os.path.lexists(folder):
                # killed between the two renames
                os.rename(old, folder)
            else:
                with contextlib.suppress(OSError, ValueError):
                    _salvage(old, folder, msgspec.json.decode(_manifest_path(folder).read_bytes(), type=Manifest))
        shutil.rmtree(left, ignore_errors=True)


class _Unpacking:
    def __init__(self, target: Path) -> None:
        self._target = target
        # this Python may have none yet; every entry has been checked by our own rules before
        self._second_opinion = getattr(tarfile, "data_filter", None)

    def take(self, entry: Entry, content: Iterator[bytes]) -> None:
        path = self._target / (entry if isinstance(entry, str) else entry.path)
        if self._second_opinion is not None:
            try:
                self._second_opinion(info_of(entry), str(self._target))
            except tarfile.TarError as error:
                raise ArchiveError(f"an archive holds what may not be unpacked: {names.shown(error)}") from None
        if isinstance(entry, str):
            path.mkdir()
        elif isinstance(entry, File):
            mode = 0o755 if entry.executable else 0o644
            if _is_source(entry.path, entry.executable):
                mode &= 0o555
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
            # the time is that of unpacking: what has been compiled from a file that was damaged is then out of date
            with open(descriptor, "wb") as out:
                for chunk in content:
                    out.write(chunk)
                if stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:
                    os.fchmod(descriptor, mode)
        else:
            assert isinstance(entry, Link)


@contextlib.contextmanager
def _lock(path: Path, limit_s: float) -> Iterator[bool]:
    """Whether nobody else is building; without an answer in time, or locks on this file system, nobody knows."""
    with open(path, "ab") as handle:
        yield _locked(handle.fileno(), limit_s)


def _locked(descriptor: int, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EINTR) or time.monotonic() > deadline:
                return False
        time.sleep(0.02)
