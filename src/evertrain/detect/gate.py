"""Which of millions of lines deserve a closer look? One pass of one regular expression over whole blocks.

Every rule names, or has derived from its pattern, literal words of which one must stand in a line that it matches. All
words of all rules together make one prefix tree, and the tree one expression: a block of ordinary lines costs one
search.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

_MIN_WORD = 3


def words_of(pattern: str) -> tuple[str, ...]:
    """For each top-level alternative the longest text that every match must contain, in lower case.

    Raises ValueError where an alternative has none that is long enough: such a rule would look at every line.
    """
    words = tuple(max(_runs(alternative), key=len, default="") for alternative in _alternatives(pattern))
    if short := [word for word in words if len(word.strip()) < _MIN_WORD]:
        raise ValueError(f"no fixed text of {_MIN_WORD} characters in every alternative ({short!r}): name its words")
    return tuple(dict.fromkeys(words))


def _alternatives(pattern: str) -> Iterator[str]:
    depth, start, at, in_class = 0, 0, 0, False
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
            if pattern[at + 1 : at + 2] == "]" or pattern[at + 1 : at + 3] == "^]":
                at += 2 if pattern[at + 1] == "^" else 1
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
        elif char == "|" and depth == 0:
            yield pattern[start:at]
            start = at + 1
        at += 1
    yield pattern[start:]


def _runs(alternative: str) -> Iterator[str]:
    """Stretches of literal characters outside groups and classes."""
    run, depth, at = "", 0, 0
    while at < len(alternative):
        char = alternative[at]
        if char == "\\":
            at += 1
            escaped = alternative[at : at + 1]
            if depth == 0:
                if escaped.isalnum():
                    yield run
                    run = ""
                else:
                    run += escaped
        elif char == "[":
            end = alternative.find("]", at + 2)
            at = len(alternative) if end < 0 else end
            yield run
            run = ""
        elif char == "(":
            depth += 1
            yield run
            run = ""
        elif char == ")":
            depth -= 1
        elif depth == 0:
            if char in "?*{":
                # the character before may be missing
                yield run[:-1]
                run = ""
                if char == "{":
                    at = alternative.find("}", at)
            elif char in "+.^$":
                yield run
                run = ""
            else:
                run += char.lower()
        at += 1
    yield run


def trimmed(word: str) -> str:
    """Without signs at its beginning, where enough remains: places where only a letter may begin cost less."""
    rest = word.lstrip(" ([/]._:,")
    return rest if len(rest) >= 5 else word


@lru_cache(maxsize=8)
def gate(words: frozenset[str]) -> re.Pattern[bytes]:
    """One expression that finds any of the words in lower-case bytes."""
    return re.compile(_tree(map(trimmed, words)).encode())


def everywhere(words: Iterable[str]) -> re.Pattern[str]:
    """Finds, at each place of a lower-case line where some words begin, the shortest of them (as its first group)."""
    return re.compile(f"(?=({_tree(words)}))")


def _tree(words: Iterable[str]) -> str:
    tree: dict[str, dict[str, object]] = {}
    for word in words:
        _plant(tree, word)
    return _expression(tree)


def _plant(tree: dict[str, dict[str, object]], word: str) -> None:
    node = tree
    for char in word:
        if "" in node:
            return  # a shorter word already lets it through
        node = node.setdefault(char, {})  # type: ignore[assignment]
    node.clear()
    node[""] = {}


def _expression(node: dict[str, dict[str, object]]) -> str:
    if "" in node:
        return ""
    branches = [re.escape(char) + _expression(below) for char, below in sorted(node.items())]  # type: ignore[arg-type]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
