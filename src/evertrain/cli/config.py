"""How is `--config file.yaml` read? Into the `Config` tree; an unknown key is refused with the nearest known name.

Durations may carry a unit where the key ends in `_s`: `grace_s: 2 min`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from evertrain.cli.parsing import did_you_mean
from evertrain.model.config import Config
from evertrain.model.errors import UsageError

UNITS_S = {"ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*")


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
        elif str(key).endswith("_s") and isinstance(value, str):
            cleaned[key] = _seconds(value, f"{above}{key}")
        else:
            cleaned[key] = value
    return cleaned


def _seconds(text: str, key: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None or match[2] not in UNITS_S:
        raise UsageError(f"{key}: {text!r} is not a duration, as 25, 25 s or 2 min")
    return float(match[1]) * UNITS_S[match[2]]
