"""What lies in a shared store, and which of it counts? All that needs no torch: layout, manifest, listing, removal.

    <root>/attempt-2/step-40/.metadata              PyTorch's Distributed Checkpoint format: what lies where
                             __3_<upload>_0.distcp  ... and the data, written by rank 3 or by its node for it
                             plans-<upload>/        until the step is complete: what each writer has, and has written
                             files.json             until then as well: what belongs to the step
                             manifest.json          written last, at once: without it the step does not exist

A root is a local path or a URL that fsspec knows (`s3://bucket/folder`): one job's part of a store. Steps are ordered
by life (a job may begin anew in the same store), attempt, and step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

MANIFEST = "manifest.json"
METADATA = ".metadata"
FILES = "files.json"
LAYOUT = 1
_STEP = re.compile(r"step-(\d+)")
_ATTEMPT = re.compile(r"attempt-(\d+)")
_FLAT = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci"})
"""Object stores: there are no folders to be made, and an object is there at once or not at all."""
_DAY_S = 86400


class StoreError(Exception):
    """The store cannot be used, or what lies in it; the text says where and why."""


class StoreDamaged(StoreError):
    """A step in the store that is not, or no longer, what its manifest promises."""


class File(NamedTuple):
    """One file of a step."""

    bytes: int
    digest: str
    """BLAKE2b-128 of its content."""


class Manifest(NamedTuple):
    """What makes a step exist."""

    job: str
    attempt: int
    step: int
    world_size: int
    """Ranks that saved it."""
    time: float
    """When it was committed, wall seconds."""
    life: float
    """When this life of the job began; what was stored in earlier ones is older, whatever its number."""
    files: dict[str, File]
    code: str = ""
    made_by: dict[str, Any] = {}  # noqa: RUF012 - never changed
    layout: int = LAYOUT

    @property
    def order(self) -> tuple[float, int, int]:
        """The newest step has the highest."""
        return self.life, self.attempt, self.step

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


class Folder:
    """A folder of the store, and what can be done in it; raises StoreError only."""

    def __init__(self, url: str, fs: Any = None, path: str = "") -> None:
        self.url = url.rstrip("/") or url
        if fs is None:
            with self._doing("use it"):
                fs, path = _open(url)
        self.fs = fs
        self.path = path.rstrip("/")
        protocols = (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
        self._is_local = "file" in protocols
        self._is_flat = not _FLAT.isdisjoint(protocols)

    def at(self, *names: str) -> Folder:
        return Folder("/".join((self.url, *names)), self.fs, "/".join((self.path, *names)))

    def names(self) -> list[str]:
        """What lies directly in it; nothing where it does not exist."""
        return sorted(self.sizes())

    def sizes(self) -> dict[str, int]:
        """Bytes of what lies directly in it; of a folder any number."""
        with self._doing("list it"):
            self.fs.invalidate_cache(self.path)
            try:
                found = self.fs.ls(self.path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
            named = {str(one["name"]).rstrip("/").rpartition("/")[2]: int(one["size"] or 0) for one in found}
            return {name: size for name, size in named.items() if name and not name.endswith(".new")}

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        with self._doing(f"read {name}"):
            return bytes(self.fs.cat_file(f"{self.path}/{name}", start=start, end=end))

    def read_json(self, name: str) -> Any:
        """The content of a JSON file; None: it is not there, or not written to its end."""
        try:
            return json.loads(self.read(name))
        except ValueError:
            return None
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def write(self, name: str, content: bytes) -> None:
        """Have a file there, whole or not at all."""
        with self._doing(f"write {name}"):
            target = f"{self.path}/{name}"
            if not self._is_local:
                self.make()
                self.fs.pipe_file(target, content)
                return
            self.make()
            fresh = f"{target}.{secrets.token_hex(4)}.new"
            with open(fresh, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, target)

    def write_json(self, name: str, content: Any) -> None:
        self.write(name, json.dumps(content, separators=(",", ":")).encode())

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[HashingFile]:
        """A file to write one piece after another to; it is safe when this is left."""
        with self._doing(f"write {name}"):
            self.make()
            with self.fs.open(f"{self.path}/{name}", "wb") as file:
                hashing = HashingFile(file)
                yield hashing
                if self._is_local:
                    file.flush()
                    os.fsync(file.fileno())

    def make(self) -> None:
        if not self._is_flat:
            self.fs.makedirs(self.path, exist_ok=True)

    def remove(self, *names: str) -> None:
        """Files and folders of it that may be there or not."""
        for name in names:
            with self._doing(f"remove {name}"):
                try:
                    self.fs.rm(f"{self.path}/{name}", recursive=True)
                except FileNotFoundError:
                    pass

    @contextlib.contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        """Clients of stores raise all kinds of errors."""
        try:
            yield
        except StoreError:
            raise
        except ImportError as error:
            raise StoreError(f"store {self.url}: {error} (into {_interpreter()})") from error
        except Exception as error:
            said = str(error) or type(error).__name__
            raise StoreError(f"store {self.url}: cannot {what}: {said}") from error


class HashingFile:
    """Passes on what is written, counts it and takes its digest."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._hash = hashlib.blake2b(digest_size=16)
        self.bytes = 0

    def write(self, data: Any) -> int:
        raw = memoryview(data).cast("B")
        self._file.write(raw)
        self._hash.update(raw)
        self.bytes += raw.nbytes
        return raw.nbytes

    def flush(self) -> None:
        self._file.flush()

    def done(self) -> File:
        return File(self.bytes, self._hash.hexdigest())


def digest(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def root_of(url: str | os.PathLike[str], job: str = "") -> str:
    """The root of a job's steps; without a job the folder is the job's own. A relative path is made absolute."""
    whole = os.fspath(url)
    if "://" not in whole and "::" not in whole:
        whole = os.path.abspath(whole)
    return f"{whole.rstrip('/')}/{job}" if job else whole


def step_folder(root: Folder, attempt: int, step: int) -> Folder:
    return root.at(f"attempt-{attempt}", f"step-{step}")


def committed(root: Folder, since: float = 0.0) -> list[Manifest]:
    """The steps of the lives that began at `since` or later, oldest first."""
    found = []
    for attempt, step in _step_folders(root):
        manifest = read_manifest(step_folder(root, attempt, step))
        if manifest is not None and (manifest.attempt, manifest.step) == (attempt, step) and manifest.life >= since:
            found.append(manifest)
    return sorted(found, key=lambda one: one.order)


def read_manifest(folder: Folder) -> Manifest | None:
    """The manifest of a step; None: there is none that we could have written."""
    said = folder.read_json(MANIFEST)
    if not isinstance(said, dict) or said.get("layout") != LAYOUT:
        return None
    try:
        files = {name: File(one["bytes"], one["digest"]) for name, one in said.pop("files").items()}
        return Manifest(**said, files=files)
    except (KeyError, TypeError, AttributeError):
        return None


def commit(
    root: Folder, manifest: Manifest, *, keep: int, one_a_day: bool = False, alone: bool = False
) -> tuple[Manifest, list[str]]:
    """Make a step exist whose files are all there; its `files` are found here. Returns it, and what went wrong after.

    Then old steps are removed, and what uploads that were killed have left: of earlier steps only, unless the caller
    knows that nobody else writes (`alone`). The step is safe whatever goes wrong with that.
    """
    folder = step_folder(root, manifest.attempt, manifest.step)
    listed = folder.read_json(FILES)
    if listed is None:
        raise StoreError(f"store {folder.url}: the upload is not complete, there is no {FILES}")
    files = {name: File(*file) for name, file in listed["files"].items()}
    there = folder.sizes()
    for name, file in files.items():
        if there.get(name) != file.bytes:
            raise StoreError(f"store {folder.url}: {name} has {there.get(name, 'no')} bytes, not {file.bytes}")
    manifest = manifest._replace(files=files, made_by=listed["made_by"], code=listed["code"])
    said = {**manifest._asdict(), "files": {name: file._asdict() for name, file in files.items()}}
    folder.write_json(MANIFEST, said)
    try:
        folder.remove(*(name for name in there if name not in files and name != MANIFEST))
        _tidy(root, manifest, keep, one_a_day, alone)
    except StoreError as error:
        return manifest, [str(error)]
    return manifest, []


def uncommit(folder: Folder) -> None:
    """What is written here from now on must not pass for what an earlier life has left under this number."""
    folder.remove(MANIFEST)


def to_keep(steps: list[Manifest], keep: int, one_a_day: bool) -> list[Manifest]:
    """The newest ones, and the first of each day (UTC)."""
    first = {int(one.time // _DAY_S): one for one in sorted(steps, key=lambda one: one.time, reverse=True)}
    newest = sorted(steps, key=lambda one: one.order)[-keep:]
    return [one for one in steps if one in newest or (one_a_day and one in first.values())]


def _tidy(root: Folder, just: Manifest, keep: int, one_a_day: bool, alone: bool) -> None:
    steps = committed(root)
    kept = {(one.attempt, one.step) for one in to_keep(steps, keep, one_a_day)} | {(just.attempt, just.step)}
    whole = {(one.attempt, one.step) for one in steps}
    for place in _step_folders(root):
        leftover = place not in whole and (alone or place < (just.attempt, just.step))
        if leftover or (place in whole and place not in kept):
            attempt, step = place
            uncommit(step_folder(root, attempt, step))  # first: nobody may find half of it
            root.at(f"attempt-{attempt}").remove(f"step-{step}")
    for name in root.names():
        if _ATTEMPT.fullmatch(name) and name != f"attempt-{just.attempt}" and not root.at(name).names():
            root.remove(name)


def verify(folder: Folder) -> list[str]:
    """Read all files of a step and compare them with its manifest; what is wrong with which."""
    manifest = read_manifest(folder)
    if manifest is None:
        return [f"{folder.url}: there is no {MANIFEST}"]
    there = folder.sizes()
    wrong = []
    for name, file in manifest.files.items():
        if name not in there:
            wrong.append(f"{folder.url}/{name} is missing")
        elif there[name] != file.bytes:
            wrong.append(f"{folder.url}/{name} has {there[name]} bytes, not {file.bytes}")
        elif _digest_of(folder, name, file.bytes) != file.digest:
            wrong.append(f"{folder.url}/{name} does not match its checksum")
    return wrong


def now() -> float:
    return time.time()


def _digest_of(folder: Folder, name: str, size: int, piece: int = 64 << 20) -> str:
    found = hashlib.blake2b(digest_size=16)
    for start in range(0, size, piece):
        found.update(folder.read(name, start, min(size, start + piece)))
    return found.hexdigest()


def _step_folders(root: Folder) -> list[tuple[int, int]]:
    """Attempt and step of each folder, whether or not it is committed."""
    attempts = [int(match[1]) for name in root.names() if (match := _ATTEMPT.fullmatch(name))]
    return sorted(
        (attempt, int(match[1]))
        for attempt in attempts
        for name in root.at(f"attempt-{attempt}").names()
        if (match := _STEP.fullmatch(name))
    )


def _open(url: str) -> tuple[Any, str]:
    import fsspec.core  # type: ignore[import-untyped]

    protocol = url.partition("://")[0] if "://" in url else "file"
    options: dict[str, Any] = {"use_listings_cache": False}
    if protocol in ("s3", "s3a"):
        if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
            options["endpoint_url"] = endpoint  # named here, so that a client is not used again for another one
        # one that does not answer is to be noticed while the answer still matters
        options["config_kwargs"] = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 2}}
    fs, path = fsspec.core.url_to_fs(url, **options)
    return fs, path


def _interpreter() -> str:
    import sys

    return sys.executable
