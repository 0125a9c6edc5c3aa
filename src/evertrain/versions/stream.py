"""How is a compressed stream of somebody else's read without trusting what it says of itself?

Memory is bounded by one chunk, what comes out by a limit, and its density by the densest code there is.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from io import FileIO

CHUNK = 1 << 16
DENSE_FROM = 10 << 20
MOST_DENSE = 100
"""So many times its compressed size a stream may have, once more than `DENSE_FROM` bytes have come out."""

_GZIP = 31


class StreamError(Exception):
    """What is wrong, to follow the name of the archive."""


def too_dense(plain_bytes: int, compressed_bytes: int) -> bool:
    return plain_bytes > DENSE_FROM and plain_bytes > MOST_DENSE * compressed_bytes


class Inflated:
    """What one gzip member holds; anything after it is refused, another member as well."""

    def __init__(self, source: FileIO, most_bytes: int) -> None:
        self._source = source
        self._most_bytes = most_bytes
        self._inflate = zlib.decompressobj(_GZIP)
        self._waiting = b""
        self._buffer = b""
        self._at = 0
        self._hash = hashlib.sha256()
        self._read = 0
        self._plain = 0

    @property
    def compressed_bytes(self) -> int:
        return self._read

    def digest(self) -> str:
        """Of all that has come out of the compressed stream."""
        return self._hash.hexdigest()

    def exactly(self, count: int) -> bytes:
        """So many bytes; `count` is small, or bounded by the caller."""
        taken = self._taken(count)
        if len(taken) == count:
            return taken
        parts, missing = [taken], count - len(taken)
        while missing:
            if not self._more():
                raise StreamError("is truncated")
            parts.append(self._taken(missing))
            missing -= len(parts[-1])
        return b"".join(parts)

    def chunks(self, count: int) -> Iterator[bytes]:
        """So many bytes, piece by piece."""
        while count:
            chunk = self.exactly(min(count, CHUNK))
            count -= len(chunk)
            yield chunk

    def rest(self, longest: int) -> bytes:
        """All that is left, if it is no longer than that."""
        left = self._taken(longest + 1)
        while self._more():
            left += self._taken(longest + 1)
            if len(left) > longest:
                raise StreamError("has something after its end")
        return left

    def _taken(self, count: int) -> bytes:
        piece = self._buffer[self._at : self._at + count]
        self._at += len(piece)
        return piece

    def _more(self) -> bool:
        """Fills the empty buffer; False at the end of the stream."""
        while not self._inflate.eof:
            if not self._waiting:
                self._waiting = self._compressed()
            try:
                plain = self._inflate.decompress(self._waiting, CHUNK)
            except zlib.error:
                raise StreamError("is damaged" if self._plain else "is not compressed with gzip") from None
            if not self._waiting and not plain:
                raise StreamError("is truncated" if self._read else "is empty")
            self._waiting = self._inflate.unconsumed_tail
            if plain:
                self._accept(plain)
                return True
        if self._inflate.unused_data or self._compressed():
            raise StreamError("has something after its end")
        return False

    def _compressed(self) -> bytes:
        try:
            piece = self._source.read(CHUNK)
        except OSError as error:
            raise StreamError(f"cannot be read: {error.strerror}") from None
        self._read += len(piece)
        return piece

    def _accept(self, plain: bytes) -> None:
        self._plain += len(plain)
        if self._plain > self._most_bytes:
            raise StreamError("holds more bytes than code may have")
        if too_dense(self._plain, self._read - len(self._waiting)):
            raise StreamError(f"holds more than {MOST_DENSE} times as many bytes as it has")
        self._hash.update(plain)
        self._buffer, self._at = plain, 0
