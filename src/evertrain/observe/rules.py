"""Where do the rules of the catalogue come from? Our own file, files that the user names, and installed packages.

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

from evertrain.detect.catalogue import Catalogue, Rule, decode
from evertrain.model.errors import UsageError

GROUP = "evertrain.catalogue"
# the C parser, where PyYAML was built with it: five times as fast
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load(files: Iterable[Path] = (), *, without: Iterable[str] = ()) -> Catalogue:
    """Our rules, those of installed packages, and those of `files`; a later rule of the same name replaces an earlier."""
    rules: dict[str, Rule] = {}
    own = resources.files("evertrain.detect").joinpath("catalogue.yaml").read_text()
    sources = [(own, "catalogue.yaml"), *_installed(), *[(_read(path), str(path)) for path in files]]
    try:
        for content, source in sources:
            parsed = yaml.load(content, _Loader) if isinstance(content, str) else content
            for rule in decode(parsed, source):
                rules[rule.rule] = rule
        return Catalogue(rules.values()).without(without)
    except (ValueError, yaml.YAMLError) as error:
        raise UsageError(f"catalogue: {' '.join(str(error).split())}") from error


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the catalogue {path}: {error}") from error


def _installed() -> list[tuple[Any, str]]:
    found: list[tuple[Any, str]] = []
    for point in entry_points(group=GROUP):
        offered = point.load()()
        found.append((_read(Path(offered)) if isinstance(offered, (str, Path)) else offered, point.name))
    return found
