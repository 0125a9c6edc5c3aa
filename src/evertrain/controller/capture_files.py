"""Where do captures stay? `RUN_DIR/captures/NUMBER-REASON.msgpack.gz`, during the run and afterwards.

The newest twenty of each reason: what a hang has shown is still there after the job was slow for hours, which is looked
at five times each time.
"""

from __future__ import annotations

import gzip
import re
import zlib
from pathlib import Path
from typing import get_args

import msgspec

from evertrain.controller import dump_files
from evertrain.locate.grouping import Merged
from evertrain.model.capture_records import CaptureAsked, CaptureReason
from evertrain.model.stacks import Located

MOST = 20
"""Of one reason."""
_REASONS: tuple[CaptureReason, ...] = get_args(CaptureReason)
_NAME = re.compile(rf"(\d{{1,9}})-({'|'.join(_REASONS)})\.msgpack\.gz")
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
    return [number for number, _ in _there(run_dir)]


def _there(run_dir: Path) -> list[tuple[int, str]]:
    """With their reasons."""
    found: list[tuple[float, int, str]] = []
    try:
        for path in dump_files.folder(run_dir).iterdir():
            if named := _NAME.fullmatch(path.name):
                found.append((path.stat().st_mtime, int(named[1]), named[2]))
    except FileNotFoundError:  # none yet, or removed meanwhile
        pass
    return [(number, reason) for _, number, reason in sorted(found)]


def write(run_dir: Path, kept: Kept) -> None:
    """Put one there, whole or not at all; the oldest ones of its reason go. Raises OSError."""
    dump_files.folder(run_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
    reason = kept.asked.reason
    path = _path(run_dir, kept.asked.capture, reason)
    fresh = path.with_suffix(".new")
    try:
        fresh.write_bytes(gzip.compress(_encoder.encode(kept), _LEVEL))
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    for number in [number for number, other in _there(run_dir) if other == reason][:-MOST]:
        _path(run_dir, number, reason).unlink(missing_ok=True)
        dump_files.remove(run_dir, number)
    # of a capture whose controller died before it had written it only the dumps are there
    there = numbers(run_dir)
    for number in dump_files.numbers(run_dir):
        if number <= kept.asked.capture - MOST and number not in there:
            dump_files.remove(run_dir, number)


def read(run_dir: Path, number: int) -> Kept | None:
    """The one of that number; None: it is not there. Raises ValueError, in one line, where it cannot be read."""
    for reason in _REASONS:
        path = _path(run_dir, number, reason)
        try:
            return _decoder.decode(gzip.decompress(path.read_bytes()))
        except FileNotFoundError:
            continue
        except (OSError, EOFError, zlib.error, msgspec.MsgspecError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
    return None


def _path(run_dir: Path, number: int, reason: CaptureReason) -> Path:
    return dump_files.folder(run_dir) / f"{number}-{reason}.msgpack.gz"
