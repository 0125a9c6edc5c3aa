"""Which exception, raised where? Joins tracebacks whose lines are mixed with those of other ranks.

Errors of torch.distributed that speak of a lost connection follow from somebody else's end, and a launcher's own
traceback says nothing at all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

from evertrain.detect.exits import is_follower
from evertrain.model.findings import Action, Category, Culprit, Finding
from evertrain.model.report import RankError
from evertrain.model.signals import Line

WORDS = ("traceback (most", 'file "', "error", "exception", "interrupt", ".empty")

_HEAD = re.compile(r"Traceback \(most recent call last\)")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_ERROR = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Empty|Warning|Iteration|Failed|Failure|Timeout))"
    r"(?:: ?(?P<message>.*))?$"
)
_LAUNCHER = re.compile(
    r"ChildFailedError|CalledProcessError|SignalException|SystemExit|ProcessExitedException|ProcessRaisedException"
)
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3|^<frozen|^<string>|/opt/conda/bin/|/usr/(?:local/)?bin/")
_CONFIG_FRAME = re.compile(
    r"argparse\.py|(?:^|/)config\w*\.py|/hydra/|/omegaconf/|(?:^|/)arguments?\.py|/yaml/|(?:^|/)args\.py"
)
_DATA_FRAME = re.compile(
    r"(?:^|/)(?:data|dataset|datasets|dataloader|data_utils|collat\w*)[\w/]*\.py|__getitem__|__iter__|collate"
)
_OOM = re.compile(r"OutOfMemoryError|MemoryError")
# their own rules know more, or less: a message alone does not make code guilty
_VAGUE = re.compile(
    r"^(?:RuntimeError|OSError|IOError|Exception|TimeoutError|ConnectionError|SystemError|InternalError)$"
)
_MAX_FRAMES = 100
_MAX_OPEN = 4096


class Traceback(Struct, frozen=True):
    type: str
    message: str
    frames: tuple[str, ...]
    """`file:line in function`, outermost first; empty where only the last line was seen."""
    line: Line


class Tracebacks:
    """Reads lines in order; those of one stream belong together."""

    def __init__(self) -> None:
        self.found: list[Traceback] = []
        self._open: dict[str, list[str]] = {}

    def read(self, line: Line) -> None:
        if _HEAD.search(line.text):
            if len(self._open) < _MAX_OPEN:
                self._open[line.stream] = []
        elif frame := _FRAME.match(line.text):
            frames = self._open.setdefault(line.stream, []) if len(self._open) < _MAX_OPEN else []
            if len(frames) < _MAX_FRAMES:
                frames.append(f"{frame['file']}:{frame['line']} in {frame['function']}")
        elif error := _ERROR.match(line.text.strip()):
            frames = self._open.pop(line.stream, [])
            self.found.append(Traceback(error["type"], error["message"] or "", tuple(frames), line))


def judge(tracebacks: Sequence[Traceback]) -> tuple[Finding, ...]:
    return tuple(finding for one in tracebacks if (finding := _judge(one)) is not None)


def _judge(one: Traceback) -> Finding | None:
    name = one.type.rpartition(".")[2]
    if _LAUNCHER.search(name) or _OOM.search(name):
        return None
    error = RankError(type=one.type, message=one.message, traceback="\n".join(one.frames))
    follows = is_follower(1, error, "")
    category: Category = "user_code"
    action: Action = "user_code"
    confidence = 0.4 if _VAGUE.match(name) else 0.58
    culprit = Culprit("code", _place(one.frames))
    if name == "KeyboardInterrupt":
        category, action, confidence, follows = "unknown", "human", 0.1, True
    elif follows:
        category, action, confidence, culprit = "unknown", "human", 0.2, Culprit()
    elif not one.frames and _VAGUE.match(name):
        confidence = 0.35
    elif "config" in name.lower() or (one.frames and _CONFIG_FRAME.search(one.frames[-1]) and not _VAGUE.match(name)):
        category, culprit, confidence = "user_config", Culprit("config", _place(one.frames)), 0.66
    elif one.frames and not _LIBRARY.search(one.frames[-1]):
        confidence += 0.04
    return Finding(
        rule=f"exception-{name}", group="tracebacks", category=category, action=action, culprit=culprit,
        confidence=confidence, evidence=(*one.frames[-1:], one.line.quoted()), time=one.line.clock,
        order=one.line.order, rank=one.line.rank, host=one.line.host, is_symptom=follows,
        note="lost the connection to another rank" if follows else f"{name} in {_place(one.frames) or 'the program'}",
    )  # fmt: skip


def _place(frames: Sequence[str]) -> str:
    """The innermost frame of the user's own files, else the innermost of all."""
    own = [frame for frame in frames if not _LIBRARY.search(frame)]
    return (own or list(frames) or [""])[-1]
