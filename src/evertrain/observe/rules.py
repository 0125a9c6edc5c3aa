"""Where do the rules of the catalogue come from? Our own file, installed packages, and files that the user names.

A package offers rules by an entry point in the group `evertrain.catalogue` that names a function without arguments; it
returns the path of a YAML file, or the rules as that file would hold them.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import yaml

from evertrain.model.errors import UsageError

GROUP = "evertrain.catalogue"
# the C parser, where PyYAML was built with it: five times as fast
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def contents(files: Iterable[Path] = ()) -> list[tuple[Any, str]]:
    """What the sources hold, and what each is called; later ones may replace rules of earlier ones."""
    own = resources.files("evertrain.detect").joinpath("catalogue.yaml").read_text()
    return [
        (_parse(own, "catalogue.yaml"), "catalogue.yaml"),
        *_installed(),
        *[(_parse(_read(path), str(path)), str(path)) for path in files],
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the catalogue {path}: {error}") from error


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise UsageError(f"{source}: {' '.join(str(error).split())}") from error


def _installed() -> list[tuple[Any, str]]:
    found: list[tuple[Any, str]] = []
    for point in entry_points(group=GROUP):
        offered = point.load()()
        found.append(
            (_parse(_read(Path(offered)), point.name) if isinstance(offered, (str, Path)) else offered, point.name)
        )
    return found
