"""What is different between two archives?

Lines are counted without their order, as what a file has more of than the other and less of: a line that has moved
counts as neither, and it takes no longer for large changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from evertrain.model.code import Diff
from evertrain.model.config import CodeConfig
from evertrain.versions.archive import Entry, check, walk
from evertrain.versions.manifest import KeptFile, Manifest
from evertrain.versions.tree import File, Link

NAMED = 20
LONGEST_TEXT = 1 << 20
"""Lines of larger files are not counted,"""
MOST_TEXT = 1 << 25
"""... nor are any after so many bytes of changed files on one side."""


def between(before: Path, after: Path, config: CodeConfig, before_digest: str = "", after_digest: str = "") -> Diff:
    """Of two archives; with digests, which are verified. Raises ArchiveError."""
    old = _manifest(before, before_digest, config)
    new = _manifest(after, after_digest, config)
    found = of_manifests(old, new)
    kept_before, kept_after = _leaves(old), _leaves(new)
    different = {path for path in kept_before | kept_after if kept_before.get(path) != kept_after.get(path)}
    lines_before, lines_after = _texts(before, config, different), _texts(after, config, different)
    # where one side is no text, or too large, there are no lines to compare
    countable = {
        path
        for path in different
        if (path in lines_before or not _is_file(kept_before, path))
        and (path in lines_after or not _is_file(kept_after, path))
    }
    added = removed = 0
    for path in countable:
        had, has = lines_before.get(path, b"").splitlines(), lines_after.get(path, b"").splitlines()
        added += (Counter(has) - Counter(had)).total()
        removed += (Counter(had) - Counter(has)).total()
    return Diff(
        added=found.added,
        removed=found.removed,
        changed=found.changed,
        files=found.files,
        lines_added=added,
        lines_removed=removed,
    )


def of_manifests(before: Manifest, after: Manifest) -> Diff:
    """Without lines; the folders themselves are no difference."""
    old, new = _leaves(before), _leaves(after)
    added, removed = sorted(new.keys() - old.keys()), sorted(old.keys() - new.keys())
    changed = sorted(path for path in old.keys() & new.keys() if old[path] != new[path])
    return Diff(
        added=tuple(added[:NAMED]),
        removed=tuple(removed[:NAMED]),
        changed=tuple(changed[:NAMED]),
        files=len(added) + len(removed) + len(changed),
    )


def _manifest(path: Path, digest: str, config: CodeConfig) -> Manifest:
    return check(path, digest, config) if digest else walk(path, None, config, lambda entry, content: None)


def _leaves(manifest: Manifest) -> dict[str, KeptFile | Link]:
    leaves: dict[str, KeptFile | Link] = {file.path: file for file in manifest.files}
    return leaves | {link.path: link for link in manifest.links}


def _is_file(kept: dict[str, KeptFile | Link], path: str) -> bool:
    return isinstance(kept.get(path), KeptFile)


def _texts(archive: Path, config: CodeConfig, wanted: set[str]) -> dict[str, bytes]:
    texts: dict[str, bytes] = {}
    room = MOST_TEXT

    def take(entry: Entry, content: Iterator[bytes]) -> None:
        nonlocal room
        if isinstance(entry, File) and entry.path in wanted and entry.bytes <= min(LONGEST_TEXT, room):
            text = b"".join(content)
            if b"\0" not in text:
                texts[entry.path] = text
                room -= len(text)

    walk(archive, None, config, take)
    return texts
