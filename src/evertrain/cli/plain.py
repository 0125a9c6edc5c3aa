"""How is text shown that may hold anything? An exception's message must not move the cursor or clear the screen."""

from __future__ import annotations


def plain(text: str, kept: str = "\n\t") -> str:
    """`text` with everything but printable letters and what is `kept` written as Python would escape it."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in kept else ascii(letter)[1:-1] for letter in text)
