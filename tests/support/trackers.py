"""Files as experiment trackers write them: TensorBoard's records and wandb's, byte by byte."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from zlib import crc32


def frame(body: bytes) -> bytes:
    """A record of an event file."""
    length = struct.pack("<Q", len(body))
    return length + struct.pack("<I", masked(length)) + body + struct.pack("<I", masked(body))


def masked(data: bytes) -> int:
    """CRC32C bit by bit, turned by 15 and moved, as TensorFlow has it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def event(step: int, scalars: Mapping[str, float], *, time: float = 1000.0, form: str = "simple") -> bytes:
    """An Event with one value for each scalar."""
    summary = b"".join(_field(1, _field(1, tag.encode()) + _value(value, form)) for tag, value in scalars.items())
    return b"\x09" + struct.pack("<d", time) + b"\x10" + _varint(step) + _field(5, summary)


def _value(value: float, form: str) -> bytes:
    four = struct.pack("<f", value)
    if form == "simple":
        return b"\x15" + four
    tensor = {
        "float": b"\x08\x01" + _field(2, b"") + _field(5, four),
        "raw": b"\x08\x01" + _field(2, b"") + _field(4, four),
        "double": b"\x08\x02" + _field(2, b"") + b"\x31" + struct.pack("<d", value),
        "text": b"\x08\x07" + _field(8, b"some words"),
    }[form]
    return _field(8, tensor)


def history(step: int, said: Mapping[str, object], *, time: float = 1000.0) -> bytes:
    """A Record of wandb that logs these values."""
    items = {**said, "_step": step, "_timestamp": time}
    packed = b"".join(
        _field(1, _field(1, name.encode()) + _field(16, json.dumps(value).encode())) for name, value in items.items()
    )
    return b"\x08\x05" + _field(2, packed)


def parts(records: Iterable[bytes]) -> bytes:
    """A run file of wandb: records, divided where a block of 32 KiB ends."""
    out = bytearray(b":W&B\xe1\xbe\x00")
    for record in records:
        begun = False
        while True:
            room = 32768 - len(out) % 32768
            if room < 7:
                out += bytes(room)
                continue
            part, record = record[: room - 7], record[room - 7 :]
            kind = (4 if begun else 1) if not record else (3 if begun else 2)
            out += struct.pack("<IHB", crc32(part, crc32(bytes([kind]))), len(part), kind) + part
            begun = True
            if not record:
                break
    return bytes(out)


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
