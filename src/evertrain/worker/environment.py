"""Does the script set environment variables that count only before torch is imported?

`os.environ["OMP_NUM_THREADS"] = "4"` above `import torch` has an effect under torchrun and would have none in a process
that has torch already. What can be seen in the text of the script is seen here, before the first attempt; what cannot
is noticed in the ranks (session.py), before the second.
"""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Iterator

from evertrain.worker import script
from evertrain.worker.preload import Unfit
from evertrain.worker.session import IMPORT_TIME

_READERS = {"torch", "torchvision", "torchaudio", "numpy", "scipy", "lightning", "pytorch_lightning", "transformers"}
"""An import of one of these reads the environment; what is set below it came too late under torchrun too."""


def check(command: script.Command) -> None:
    """Raise Unfit if the script must import torch by itself."""
    if path := script.source_file(command):
        try:
            found = os.stat(path)
        except OSError:  # the rank will say so
            return
        if reason := _why_not(path, found.st_size, found.st_mtime_ns):
            raise Unfit(reason, "spawn")


@functools.lru_cache(maxsize=1)
def _why_not(path: str, *_: int) -> str | None:
    """For a file in the state that its size and time stand for."""
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    for name, line in changes(tree):
        return f"line {line} of {os.path.basename(path)} sets {name} before it imports torch"
    return None


def changes(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names that the script sets to another value than they have, and where, in front of its first import of torch."""
    for node in _in_order(tree.body):
        if _imports_reader(node):
            return
        for name, value, line in _assignments(node):
            if name.startswith(IMPORT_TIME) and (value is None or os.environ.get(name) != value):
                yield name, line


def _in_order(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when the script is read: those in functions and classes run later, or in their turn."""
    for node in body:
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for inner in ("body", "handlers", "orelse", "finalbody"):
            yield from _in_order(getattr(node, inner, []))


def _imports_reader(node: ast.stmt) -> bool:
    match node:
        case ast.Import(names=names):
            return any(alias.name.partition(".")[0] in _READERS for alias in names)
        case ast.ImportFrom(module=str(module), level=0):
            return module.partition(".")[0] in _READERS
    return False


def _assignments(node: ast.stmt) -> Iterator[tuple[str, str | None, int]]:
    """Name, value where it can be seen, and line of each variable that one statement sets or removes."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _item(target, value)
        case ast.Delete(targets=targets):
            for target in targets:
                yield from _item(target, None)
        case ast.AugAssign(target=target, value=ast.Dict() as value) if _is_environ(target):
            yield from _items_of(value)
        case ast.Expr(value=ast.Call() as call):
            yield from _call(call)


def _item(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, str | None, int]]:
    match target:
        case ast.Subscript(value=owner, slice=ast.Constant(value=str(name))) if _is_environ(owner):
            yield name, _text(value), target.lineno


def _call(call: ast.Call) -> Iterator[tuple[str, str | None, int]]:
    match call.func:
        case ast.Attribute(value=owner, attr=method) if _is_environ(owner):
            pass
        case ast.Attribute(value=ast.Name(id="os"), attr="putenv" as method):
            pass
        case _:
            return
    match method, call.args:
        case "putenv", [ast.Constant(value=str(name)), value]:
            yield name, _text(value), call.lineno
        case "setdefault", [ast.Constant(value=str(name)), value] if name not in os.environ:
            yield name, _text(value), call.lineno
        case "pop", [ast.Constant(value=str(name)), *_] if name in os.environ:
            yield name, None, call.lineno
        case "update", args:
            for given in args:
                if isinstance(given, ast.Dict):
                    yield from _items_of(given)
            for keyword in call.keywords:
                if keyword.arg:
                    yield keyword.arg, _text(keyword.value), call.lineno


def _items_of(given: ast.Dict) -> Iterator[tuple[str, str | None, int]]:
    for key, value in zip(given.keys, given.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value, _text(value), key.lineno


def _is_environ(node: ast.expr) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="os"), attr="environ") | ast.Name(id="environ"):
            return True
    return False


def _text(value: ast.expr | None) -> str | None:
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
