"""How is something done beside the event loop that may take for ever? In a thread of its own, which nobody waits for.

The executor's threads have to end before the process can; what hangs on a dead file system never does. None of them
gives way to ranks: what interprets Python while it waits for a processor has the event loop wait for it as well.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_Done = TypeVar("_Done")


def aside(name: str, work: Callable[..., _Done], *given: object) -> asyncio.Future[_Done]:
    """Begin it in a thread. When nobody waits any more, the thread goes on all the same."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[_Done] = loop.create_future()

    def settle(failure: BaseException | None, done: list[_Done]) -> None:
        if answer.done():  # cancelled
            return
        if failure is not None:
            answer.set_exception(failure)
        else:
            answer.set_result(done[0])

    def run() -> None:
        failure: BaseException | None = None
        done: list[_Done] = []
        try:
            done.append(work(*given))
        except BaseException as error:
            failure = error
        try:
            loop.call_soon_threadsafe(settle, failure, done)
        except RuntimeError:  # the process is on its way out
            pass

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer


def append(path: Path, piece: bytes) -> None:
    """Add it to a file that is there; nothing stays open that whoever no longer waits would have to close."""
    with path.open("r+b") as file:
        file.seek(0, 2)
        file.write(piece)
