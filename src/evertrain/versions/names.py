"""Which names may a file of a version have, and how is a name shown that may hold anything?"""

from __future__ import annotations

LONGEST_NAME = 255
"""Bytes, as file systems have it."""
LONGEST_PATH = 1024
"""So that it fits under a version folder on every machine."""


def problem(path: str) -> str:
    """Why this path, relative to the tree, is not one that every machine can have in the same way; empty: it is."""
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    if not path:
        return "its name is empty"
    if len(encoded) > LONGEST_PATH:
        return f"its path is longer than {LONGEST_PATH} bytes"
    if path.startswith("/"):
        return "its path is absolute"
    if "\\" in path:
        return "its name holds a backslash"
    if not path.isprintable() and any(_is_control(character) for character in path):
        return "its name holds a control character"
    for part in path.split("/"):
        if part in ("", ".", ".."):
            return f"its path holds {part!r}" if part else "its path holds an empty name"
        if len(part.encode()) > LONGEST_NAME:
            return f"its name is longer than {LONGEST_NAME} bytes"
    return ""


def shown(text: object, longest: int = 120) -> str:
    """Text of somebody else's as part of one line."""
    line = "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in str(text)[: longest + 1]
    )
    return line if len(line) <= longest else line[: longest - 1] + "…"


def _is_control(character: str) -> bool:
    # also the line and paragraph separators, at which str.splitlines breaks a message
    return ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0 or character in "\u2028\u2029"
