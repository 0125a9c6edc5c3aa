"""What does a file of an experiment tracker say that another process is still writing? Its numbers, as they come.

Three kinds are known: TensorBoard's event files, wandb's run files, and lines of JSON. Each reader takes what has been
added since the last time, at most a mebibyte at once, and leaves a record that is not whole yet for the next time. Only
what leads to a number is known of the formats here, so no library of theirs is needed.
"""

from __future__ import annotations

import json
import math
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

CHUNK_BYTES = 1 << 20
_LARGEST = 64 << 10
"""A record that is larger is a picture or a histogram."""


class Number(NamedTuple):
    tag: str
    step: int
    time: float
    """Seconds since the epoch, as the tracker says; 0.0: it does not."""
    value: float


class RecordFile(ABC):
    """One growing file. `trouble` says why it cannot be read any further; empty: it can."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble = ""
        self._at = 0
        self._kept = b""

    def read(self) -> list[Number]:
        """What is new; empty where there is nothing, or no file."""
        if self.trouble:
            return []
        try:
            with open(self.path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self._at:
                    self._at, self._kept = 0, b""  # written anew
                    self._restart()
                file.seek(self._at)
                new = file.read(CHUNK_BYTES)
        except OSError:
            return []
        self._at += len(new)
        data = self._kept + new
        found: list[Number] = []
        used = self._take(data, found)
        self._kept = data[used:]
        if len(self._kept) > 16 * CHUNK_BYTES:
            self.trouble = f"{self.path}: a record of more than {16 * CHUNK_BYTES >> 20} MiB"
            self._kept = b""
        return found

    def _restart(self) -> None:  # noqa: B027 (most kinds remember nothing of what they have read)
        """The file begins anew."""

    @abstractmethod
    def _take(self, data: bytes, found: list[Number]) -> int:
        """Put the numbers of all whole records into `found`; how many bytes they took."""


class JsonLines(RecordFile):
    """An object a line, as `wandb-history.jsonl`: names and numbers; a line that names no step is skipped."""

    def _take(self, data: bytes, found: list[Number]) -> int:
        end = data.rfind(b"\n") + 1
        for line in data[:end].splitlines():
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if isinstance(said, dict):
                found.extend(_numbers_of(said))
        return end


class EventFile(RecordFile):
    """TensorBoard's: length, CRC of the length, an Event, CRC of it."""

    def _take(self, data: bytes, found: list[Number]) -> int:
        at = 0
        while len(data) - at >= _FRAME.size:
            length, length_crc = _FRAME.unpack_from(data, at)
            if _masked_crc(data[at : at + 8]) != length_crc:
                self.trouble = f"{self.path}: the length of a record is damaged"
                break
            end = at + _FRAME.size + length + 4
            if end > len(data):
                break
            body = data[at + _FRAME.size : end - 4]
            (crc,) = _CRC.unpack_from(data, end - 4)
            if length <= _LARGEST:
                if _masked_crc(body) == crc:
                    found.extend(_event(body))
                elif end == len(data):
                    break  # its last bytes may still be on their way
            at = end
        return at


class WandbFile(RecordFile):
    """`run-*.wandb`: blocks of 32 KiB, records that may be divided among them, each a protobuf Record."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._restart()

    def _restart(self) -> None:
        self._offset = 0
        self._parts = b""
        self._too_large = False

    def _take(self, data: bytes, found: list[Number]) -> int:
        at = 0
        while True:
            room = _BLOCK - self._offset % _BLOCK
            if room < _PART.size:
                if len(data) - at < room:
                    return at
                at, self._offset = at + room, self._offset + room
                continue
            if len(data) - at < _PART.size:
                return at
            if self._offset == 0:
                if data[at : at + 4] != b":W&B":
                    self.trouble = f"{self.path}: no file of wandb"
                    return at
                at, self._offset = at + _PART.size, _PART.size
                continue
            crc, length, kind = _PART.unpack_from(data, at)
            end = at + _PART.size + length
            if end > len(data):
                return at
            body = data[at + _PART.size : end]
            if not 1 <= kind <= 4 or crc32(body, crc32(bytes([kind]))) != crc:
                if any(data[at:]) and end < len(data):  # zeros: room that was made for what will come
                    self.trouble = f"{self.path}: a record is damaged"
                return at
            self._part(kind, body, found)
            self._offset += end - at
            at = end

    def _part(self, kind: int, body: bytes, found: list[Number]) -> None:
        """1: a whole record, 2, 3, 4: its first part, one in the middle, its last."""
        if kind in (1, 2):
            self._parts, self._too_large = b"", False
        self._too_large = self._too_large or len(self._parts) + len(body) > _LARGEST
        self._parts = b"" if self._too_large else self._parts + body
        if kind in (1, 4) and not self._too_large:
            found.extend(_history(self._parts))


# -- what is inside ----------------------------------------------------------------------------------------------------

_FRAME = struct.Struct("<QI")
_PART = struct.Struct("<IHB")
_CRC = struct.Struct("<I")
_BLOCK = 32768
_STEP_NAMES = ("_step", "step", "global_step", "iteration")
_TIME_NAMES = ("_timestamp", "timestamp", "time")
_DTYPES = {1: (5, "<f"), 2: (6, "<d")}
"""Of a TensorProto: the field of its values, and how one is written."""


def _event(data: bytes) -> Iterator[Number]:
    """Event: wall time 1, step 2, summary 5 with values 1, each a tag 1 and a simple value 2 or a tensor 8."""
    time, step, summary = 0.0, 0, b""
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes) and len(value) == 8:
            (time,) = struct.unpack("<d", value)
        elif number == 2 and isinstance(value, int):
            step = value
        elif number == 5 and isinstance(value, bytes):
            summary = value
    for number, value in _fields(summary):
        if number == 1 and isinstance(value, bytes):
            tag, scalar = "", None
            for inner, content in _fields(value):
                if not isinstance(content, bytes):
                    continue
                if inner == 1:
                    tag = content.decode("utf-8", "replace")
                elif inner == 2 and len(content) == 4:
                    (scalar,) = struct.unpack("<f", content)
                elif inner == 8:
                    scalar = _scalar(content)
            if scalar is not None:
                yield Number(tag, step, time, scalar)


def _scalar(data: bytes) -> float | None:
    """TensorProto of one number: dtype 1, shape 2, raw content 4, or the values of its type."""
    fields = list(_fields(data))
    dtype = next((value for number, value in fields if number == 1), 0)
    if dtype not in _DTYPES:
        return None
    field, form = _DTYPES[int(dtype)]
    for number, value in fields:
        if number in (4, field) and isinstance(value, bytes) and len(value) == struct.calcsize(form):
            (scalar,) = struct.unpack(form, value)
            return float(scalar)
    return None


def _history(data: bytes) -> Iterator[Number]:
    """Record: history 2 with items 1, each a key 1 or the parts 2 of one, and JSON 16; its step 2."""
    for number, value in _fields(data):
        if number != 2 or not isinstance(value, bytes):
            continue
        said: dict[str, Any] = {}
        for inner, content in _fields(value):
            if inner == 2 and isinstance(content, bytes):
                said.setdefault("_step", next((one for name, one in _fields(content) if name == 1), 0))
            elif inner == 1 and isinstance(content, bytes):
                name: list[str] = []
                text = b""
                for field, part in _fields(content):
                    if isinstance(part, bytes) and field in (1, 2):
                        name.append(part.decode("utf-8", "replace"))
                    elif isinstance(part, bytes) and field == 16:
                        text = part
                try:
                    said["/".join(filter(None, name))] = json.loads(text)
                except ValueError:
                    continue
        yield from _numbers_of(said)


def _numbers_of(said: dict[str, Any]) -> Iterator[Number]:
    step: int | None = next((said[name] for name in _STEP_NAMES if isinstance(said.get(name), int)), None)
    if step is None:
        return
    time = next((time for name in _TIME_NAMES if (time := _number(said.get(name))) is not None), 0.0)
    for tag, value in said.items():
        number = _number(value)
        if number is not None and tag not in _STEP_NAMES and tag not in _TIME_NAMES:
            yield Number(tag, step, time, number)


def _number(value: object) -> float | None:
    if value in ("NaN", "Infinity", "-Infinity"):  # as wandb writes what JSON does not know
        return float(str(value))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return None


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Fields of a protobuf message, by number: varints as numbers, all others as bytes. Ends where it is damaged."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            if at <= len(data):
                yield number, value
            continue
        length = 8 if wire == 1 else 4 if wire == 5 else -1
        if wire == 2:
            length, at = _varint(data, at)
        if length < 0 or at + length > len(data):
            return
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number, of 64 bits with a sign, and where it ends; beyond the data where it does not."""
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            value &= (1 << 64) - 1
            return value - (1 << 64) if value >> 63 else value, at
        shift += 7
    return 0, len(data) + 1


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_CASTAGNOLI = _table()


def _masked_crc(data: bytes) -> int:
    """CRC32C, turned and moved as records of TensorFlow have it."""
    crc, table = 0xFFFFFFFF, _CASTAGNOLI
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
