"""Where do captures stay? `RUN_DIR/captures/NUMBER.msgpack.gz`, the newest twenty, during the run and afterwards."""

from __future__ import annotations

import gzip
import re
import zlib
from pathlib import Path

import msgspec

from evertrain.controller import dump_files
from evertrain.locate.grouping import Merged
from evertrain.model.capture_records import CaptureAsked
from evertrain.model.stacks import Located

MOST = 20
_NAME = re.compile(r"(\d{1,9})\.msgpack\.gz")
_LEVEL = 1
"""Stacks are much alike: more takes longer and saves little."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """One capture of a whole job, with what it has shown."""

    job: str
    asked: CaptureAsked
    step: int | None = None
    """How far the job had come."""
    mesh: str = ""
    merged: Merged
    located: Located


_decoder = msgspec.msgpack.Decoder(Kept)
_encoder = msgspec.msgpack.Encoder()


def numbers(run_dir: Path) -> list[int]:
    """Those that there are, by the time when they were written."""
    found: list[tuple[float, int]] = []
    try:
        for path in dump_files.folder(run_dir).iterdir():
            if named := _NAME.fullmatch(path.name):
                found.append((path.stat().st_mtime, int(named[1])))
    except FileNotFoundError:  # none yet, or removed meanwhile
        pass
    return [number for _, number in sorted(found)]


def write(run_dir: Path, kept: Kept) -> None:
    """Put one there, whole or not at all; the oldest ones go. Raises OSError."""
    dump_files.folder(run_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
    path = _path(run_dir, kept.asked.capture)
    fresh = path.with_suffix(".new")
    try:
        fresh.write_bytes(gzip.compress(_encoder.encode(kept), _LEVEL))
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    for number in numbers(run_dir)[:-MOST]:
        _path(run_dir, number).unlink(missing_ok=True)
        dump_files.remove(run_dir, number)


def read(run_dir: Path, number: int) -> Kept | None:
    """The one of that number; None: it is not there. Raises ValueError, in one line, where it cannot be read."""
    path = _path(run_dir, number)
    try:
        return _decoder.decode(gzip.decompress(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, EOFError, zlib.error, msgspec.MsgspecError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _path(run_dir: Path, number: int) -> Path:
    return dump_files.folder(run_dir) / f"{number}.msgpack.gz"
