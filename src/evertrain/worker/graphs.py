"""What of a GPU's work must not be asked for, and what does nobody say? CUDA graphs, and collectives without a Work.

While a graph is captured no event may be queried, by any thread: polling stops. What is captured is seen then, once;
that it is replayed is not seen at all, and said so beside the page.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from evertrain.trace import layout
from evertrain.worker import contact
from evertrain.worker.session import Session

FLAGS = layout.POSTED_ONLY | layout.GRAPH
_BLIND = "trace: collectives in a CUDA graph are seen when it is captured, not when it is replayed"

capturing = False
_explained = False


def see_captures(pause: Callable[[bool], None]) -> None:
    """Have `pause` called before a capture begins, with True, and when it is over."""
    kind: Any = getattr(torch.cuda, "CUDAGraph", None)
    if kind is None or not hasattr(kind, "capture_begin"):
        return
    begin, end = kind.capture_begin, kind.capture_end

    @functools.wraps(begin)
    def capture_begin(self: Any, *arguments: Any, **named: Any) -> Any:
        global capturing
        pause(True)
        capturing = True
        try:
            return begin(self, *arguments, **named)
        except BaseException:
            capturing = False
            pause(False)
            raise

    @functools.wraps(end)
    def capture_end(self: Any, *arguments: Any, **named: Any) -> Any:
        global capturing
        try:
            return end(self, *arguments, **named)
        finally:
            capturing = False
            pause(False)

    kind.capture_begin, kind.capture_end = capture_begin, capture_end


def explain(current: Session) -> None:
    """Say once that replays are not seen."""
    global _explained
    if not _explained:
        _explained = True
        contact.explain(current, _BLIND)


class _Event:
    """On the stream that has been made to wait for the operation."""

    __slots__ = ("is_completed",)

    def __init__(self, event: Any) -> None:
        self.is_completed = event.query


def event(tensor: torch.Tensor) -> Any:
    """Stands for a Work where the backend gives none; None where the device has no events."""
    if not tensor.is_cuda:
        return None
    made: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    made.record(torch.cuda.current_stream(tensor.device))
    return _Event(made)
