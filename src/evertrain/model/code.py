"""What do ranks run, and how did that come about? Versions of a job's code, and the changes from one to another.

A version is a tree of files together with the script's arguments and what is added to the environment: whatever a user
can change without giving up a node. Versions are counted from 1 for the whole job; a change names the version that it
leads to, so an update, a roll-back and a restart with other arguments are one and the same thing.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from evertrain.model.config import CodeConfig


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """A tree of files as it was captured; equal digests, equal content."""

    digest: str
    """SHA-256 of the archive before it is compressed, in hexadecimal digits."""
    files: int
    bytes: int
    """Of all files."""
    archive_bytes: int = 0
    """Of the compressed archive, as it travels."""


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """What ranks run."""

    number: int
    code: Code | None = None
    """None: it was not captured, and runs only where the user's files are."""
    problem: str = ""
    """Why it was not captured."""
    source: str = ""
    """The folder that it was captured from."""
    args: tuple[str, ...] = ()
    """Of the script."""
    env: dict[str, str] = {}
    """Added to the environment of the ranks."""
    parent: int | None = None
    """The version that it was made from; None: the job began with it."""
    time: float | None = None
    """When it came to be known; None: nobody wrote that down."""


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """What is different between two versions."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    """Paths, the first few of each."""
    files: int = 0
    """All of the three."""
    lines_added: int = 0
    lines_removed: int = 0
    args: bool = False
    env: tuple[str, ...] = ()
    """Names of variables; values may be secrets."""


ChangeKind = Literal["update", "rollback", "restart"]
"""`restart`: with other arguments, environment or code, at a step that the user chose."""


class CodeOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The version that what is prepared on a node is to be of."""

    version: int
    digest: str
    archive_bytes: int = 0
    config: CodeConfig = CodeConfig()
    """The controller's: what it lets a version have, and which files are no code, is the same on every node."""
