"""What does a version hold, file by file?"""

from __future__ import annotations

import msgspec

from evertrain.model.code import Code
from evertrain.versions.tree import File, Link


class KeptFile(File, frozen=True, kw_only=True):
    """A file and what is in it."""

    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Of one archive; each part sorted by path."""

    digest: str
    """Of the archive, before it is compressed."""
    archive_bytes: int
    files: tuple[KeptFile, ...]
    links: tuple[Link, ...] = ()
    folders: tuple[str, ...] = ()

    @property
    def code(self) -> Code:
        return Code(
            digest=self.digest,
            files=len(self.files),
            bytes=sum(file.bytes for file in self.files),
            archive_bytes=self.archive_bytes,
        )
