"""Where do the dumps of flight recorders stay? In `RUN_DIR/captures/NUMBER.recorders`, beside their capture."""

from __future__ import annotations

import re
import shutil
import zlib
from pathlib import Path

import msgspec

from evertrain.model.stacks import RecorderDumps

_ENDING = ".msgpack"
_NAME = re.compile(r"(\d{1,9})\.recorders")
_MOST_BYTES = 64 << 20
"""Of one rank, unpacked."""

_decoder = msgspec.msgpack.Decoder(RecorderDumps)


def folder(run_dir: Path) -> Path:
    """Of all captures of a run."""
    return run_dir / "captures"


def numbers(run_dir: Path) -> list[int]:
    """Captures of which there are any."""
    try:
        found = [_NAME.fullmatch(path.name) for path in folder(run_dir).iterdir()]
    except FileNotFoundError:
        return []
    return [int(named[1]) for named in found if named]


def nodes(run_dir: Path, number: int) -> list[str]:
    """Those whose dumps are there."""
    try:
        names = [path.name for path in _folder(run_dir, number).iterdir()]
    except FileNotFoundError:
        return []
    return sorted(name.removesuffix(_ENDING) for name in names if name.endswith(_ENDING))


def write(run_dir: Path, number: int, node: str, content: bytes) -> None:
    """Put those of one node there, whole or not at all. Raises OSError."""
    where = _folder(run_dir, number)
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = where / f"{node}.new"
    try:
        fresh.write_bytes(content)
        fresh.replace(where / f"{node}{_ENDING}")
    finally:
        fresh.unlink(missing_ok=True)


def read(run_dir: Path, number: int, node: str) -> bytes:
    """As they were sent. Raises OSError."""
    return (_folder(run_dir, number) / f"{node}{_ENDING}").read_bytes()


def unpacked(content: bytes) -> dict[int, bytes]:
    """JSON of each rank's recorder. Raises ValueError, in one line."""
    try:
        return {rank: _unpacked(packed) for rank, packed in _decoder.decode(content).dumps.items()}
    except (msgspec.MsgspecError, OSError, EOFError, zlib.error) as error:
        raise ValueError(f"dumps of flight recorders that cannot be read: {error}") from error


def _unpacked(packed: bytes) -> bytes:
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    raw = unpacker.decompress(packed, _MOST_BYTES)
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise ValueError(f"a dump of a flight recorder that is cut short, or larger than {_MOST_BYTES >> 20} MiB")
    return raw


def remove(run_dir: Path, number: int) -> None:
    shutil.rmtree(_folder(run_dir, number), ignore_errors=True)


def _folder(run_dir: Path, number: int) -> Path:
    return folder(run_dir) / f"{number}.recorders"
