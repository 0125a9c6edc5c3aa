"""Why did a process end? From its status, its exception and the tail of its stderr.

When one rank dies the others lose their connection to it a millisecond later and end too, with a traceback of their
own. Those are *followers*: victims that must never be taken for the cause, whatever order the news arrives in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from signal import Signals

from evertrain.model.report import RankError

# errors of torch.distributed say that *something* in the group failed, never that this rank did
_FOLLOWER_TYPES = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})

_LOST_CONNECTION = re.compile(
    r"Connection closed by peer"
    r"|Connection reset by peer"
    r"|Connection refused"
    r"|Broken pipe"
    r"|Application timeout caused pair closure"
    r"|Timed out waiting \d+ms for (recv|send)"
    r"|gloo[/\\]transport"
    r"|Gloo connectFullMesh failed"
    r"|failed to pass monitoredBarrier"
    r"|recvValue failed|sendBytes failed|failed to recv, got 0 bytes"
    r"|NCCL communicator was aborted|ncclRemoteError|ncclInternalError|remote process exited"
    r"|The client socket has (timed out|failed to connect)",
    re.IGNORECASE,
)

_RAISED_FROM = "\n\nThe above exception was the direct cause of the following exception:\n\n"
_AFTER_FRAMES = re.compile(r"^\S.*", re.MULTILINE | re.DOTALL)
"""Frames are indented, the exception's own line is not; what it says may have more lines."""
_DISTRIBUTED_FRAME = re.compile(r"torch[/\\](distributed|nn[/\\]parallel|autograd)[/\\]")


def is_follower(status: int, error: RankError | None, stderr_tail: str) -> bool:
    """Whether this end was caused by somebody else's.

    An exception counts when torch.distributed says so by type, or when its message speaks of a lost connection and it
    passed through torch's collectives; a user's own `ConnectionResetError` to a web service does not. What an
    exception was raised from counts as well: a pipeline stage wraps what went wrong in it in an error of its own.
    """
    if status == 0:
        return False
    if error is not None:
        return any(map(_lost_connection, (error, *_raised_from(error))))
    # no record: a program without our launcher, or one that C++ ended (`terminate called after throwing ...`)
    return status in (1, -6) and bool(_LOST_CONNECTION.search(stderr_tail))


def _lost_connection(error: RankError) -> bool:
    if error.type.rpartition(".")[2] in _FOLLOWER_TYPES:
        return True
    return bool(_LOST_CONNECTION.search(error.message) and _through_torch(error))


def _raised_from(error: RankError) -> Iterator[RankError]:
    for text in error.traceback.split(_RAISED_FROM)[:-1]:
        if own := _AFTER_FRAMES.search(text, max(0, text.rfind('\n  File "') + 1)):
            kind, _, message = own[0].partition(": ")
            yield RankError(type=kind, message=message, traceback=text)


def _through_torch(error: RankError) -> bool:
    return not error.traceback or bool(_DISTRIBUTED_FRAME.search(error.traceback))


def cause(status: int | None, error: RankError | None) -> str:
    """The end in a few words, for the incident's line."""
    if status is None:
        return "node lost"
    if error is not None:
        return f"exception {error.type.rpartition('.')[2]}"
    if status < 0:
        return f"{'killed' if status in (-2, -9, -15) else 'crashed'} ({signal_name(-status)})"
    return f"exit code {status}"


def category(status: int | None, error: RankError | None) -> str:
    """The class of the cause, in the words of `evertrain explain`."""
    if status is None:
        return "host_os"
    if error is None:
        return "unknown"
    short = error.type.rpartition(".")[2]
    if short == "OutOfMemoryError":
        return "oom_gpu"
    if short == "MemoryError":
        return "oom_host"
    if is_damage(error):
        return "storage"
    return "user_code"


def is_damage(error: RankError | None) -> bool:
    """Whether a rank found every copy of its state damaged that it could have gone on from: no fault of the script."""
    return error is not None and error.type.rpartition(".")[2] == "CheckpointDamaged"


def signal_name(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"
