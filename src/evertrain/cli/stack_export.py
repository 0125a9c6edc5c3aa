"""How do other tools read a capture? As speedscope's JSON: a profile for each kind of process, a sample a place."""

from __future__ import annotations

from typing import Any

from evertrain.cli.stack_view import KINDS
from evertrain.controller.capture_files import Kept
from evertrain.model import version
from evertrain.model.stacks import Frame

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"

Json = dict[str, Any]


def speedscope(kept: Kept) -> Json:
    """The widths are numbers of processes, or of looks at them."""
    numbers: dict[Frame, int] = {}
    profiles: list[Json] = []
    for kind in KINDS:
        samples: list[list[int]] = []
        weights: list[int] = []
        for one in kept.merged.positions:
            if one.kind == kind and one.frames:
                samples.append([numbers.setdefault(frame, len(numbers)) for frame in reversed(one.frames)])
                weights.append(sum(member.looks for member in one.members))
        if samples:
            profiles.append(
                {
                    "type": "sampled", "name": kind, "unit": "none", "startValue": 0, "endValue": sum(weights),
                    "samples": samples, "weights": weights,
                }
            )  # fmt: skip
    return {
        "$schema": _SCHEMA,
        "name": f"{kept.job}, capture {kept.asked.capture}",
        "exporter": f"evertrain {version.own()}",
        "activeProfileIndex": 0,
        "shared": {"frames": [_frame(frame) for frame in numbers]},
        "profiles": profiles,
    }


def _frame(frame: Frame) -> Json:
    found: Json = {"name": frame.function}
    if frame.file:
        found["file"] = frame.file
    if frame.line is not None:
        found["line"] = frame.line
    return found
