"""How is `--config file.yaml` read, and what does `--print-config` print? The `Config` tree and back.

An unknown key is refused with the nearest known name. Durations may carry a unit where the key ends in `_s`:
`grace_s: 2 min`. What is printed comes from the Structs and their docstrings, and reads back as the same tree.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import textwrap
from argparse import Namespace
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from evertrain.cli import durations
from evertrain.cli.parsing import did_you_mean
from evertrain.model.config import Config
from evertrain.model.errors import UsageError

RATE = "_per_s"
"""The ending of what is counted a second, and is no duration."""

_HEADER = """\
Settings for `evertrain run --config FILE`. Every line may be left out; what is left out has its default.
Durations take a unit: ms, s, min, h or d.
"""
_WIDTH = 110


def from_flags(args: Namespace) -> Config:
    """What holds for this command line: flags over the file over the defaults."""
    loaded = load(Path(args.config)) if args.config is not None else Config()
    if args.no_nccl_trace:
        loaded = msgspec.structs.replace(loaded, trace=msgspec.structs.replace(loaded.trace, nccl=False))
    grace = args.grace if args.grace is not None else args.shutdown_timeout
    if grace is None:
        return loaded
    if not 0 <= grace < float("inf"):
        raise UsageError(f"--grace {grace:g}: seconds, 0 or more")
    return msgspec.structs.replace(loaded, grace_s=float(grace))


def load(path: Path) -> Config:
    """Read a config file; one clear line for whatever is wrong with it."""
    import yaml

    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"--config {path} is not YAML: {reason}") from error
    try:
        return from_tree({} if tree is None else tree)
    except UsageError as error:
        raise UsageError(f"--config {path}: {error}") from error


def from_tree(tree: Any) -> Config:
    """A `Config` from what YAML gave."""
    cleaned = _cleaned(tree, Config, "")
    try:
        return msgspec.convert(cleaned, Config)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$")
        key = where.strip("`").lstrip(".")
        raise UsageError(f"{key}: {reason[:1].lower()}{reason[1:]}" if key else reason) from error


def _cleaned(tree: Any, kind: type[msgspec.Struct], above: str) -> dict[str, Any]:
    """The same tree with durations in seconds; every key is known."""
    if not isinstance(tree, dict):
        raise UsageError(f"{above.rstrip('.') or 'the file'} should hold keys and values")
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    cleaned: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in fields:
            raise UsageError(f"unknown key {above}{key}{did_you_mean(str(key), fields)}")
        inner = fields[key].type
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            cleaned[key] = _cleaned(value, inner, f"{above}{key}.")
        elif _is_duration(str(key)) and isinstance(value, str):
            cleaned[key] = _seconds(value, f"{above}{key}")
        else:
            cleaned[key] = value
        if isinstance(found := cleaned[key], int | float) and not 0 <= found < math.inf:
            raise UsageError(f"{above}{key}: {found} is not a finite number, 0 or more")
    return cleaned


def _seconds(text: str, key: str) -> float:
    if (found := durations.seconds(text)) is None:
        raise UsageError(f"{key}: {text!r} is not a duration, as 25, 25 s or 2 min")
    return found


def _is_duration(key: str) -> bool:
    return key.endswith("_s") and not key.endswith(RATE)


def annotated(config: Config) -> str:
    """`config` as YAML, each key with its docstring above it."""
    return "\n".join([*_comment(_HEADER, ""), "", *_section(config, "")]).rstrip() + "\n"


def _section(settings: msgspec.Struct, indent: str) -> Iterator[str]:
    notes = _docstrings(type(settings))
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if isinstance(value, msgspec.Struct):
            yield ""
            yield from _comment(notes.get(name) or inspect.getdoc(value) or "", indent)
            yield f"{indent}{name}:"
            yield from _section(value, indent + "  ")
        else:
            yield from _comment(notes.get(name, ""), indent)
            yield f"{indent}{name}: {_written(name, value)}"


def _comment(text: str, indent: str) -> list[str]:
    lines = [line for whole in text.strip().splitlines() for line in textwrap.wrap(whole, _WIDTH - len(indent))]
    return [f"{indent}# {line}" for line in lines]


@functools.cache
def _docstrings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The string below each field: Python keeps it in the source only."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    notes: dict[str, str] = {}
    for field, below in pairwise(tree.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            text = below.value.value if isinstance(below.value, ast.Constant) else None
            if isinstance(text, str):
                notes[field.target.id] = inspect.cleandoc(text)
    return notes


def _written(name: str, value: Any) -> str:
    """A scalar as YAML; a duration with its unit, where that reads back as exactly the same number."""
    import yaml

    if _is_duration(name) and isinstance(value, float):
        for unit in ("d", "h", "min", "s"):
            count = value / durations.UNITS_S[unit]
            text = f"{count:g} {unit}"
            fits = unit == "s" or (count >= 1 and count.is_integer())
            if fits and durations.seconds(text) == value:
                return text
    plain: str = yaml.safe_dump(value, default_flow_style=True)
    return plain.removesuffix("...\n").strip()
