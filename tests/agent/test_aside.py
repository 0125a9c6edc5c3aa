"""What is done beside the event loop comes back to it, or is forgotten."""

from __future__ import annotations

import asyncio
import threading

import pytest

from evertrain.agent.aside import aside


async def test_what_comes_of_it_is_what_is_waited_for() -> None:
    assert await aside("sum", sum, [1, 2]) == 3
    with pytest.raises(ZeroDivisionError):
        await aside("division", divmod, 1, 0)


async def test_nobody_has_to_wait_for_what_hangs() -> None:
    may_go_on, over = threading.Event(), threading.Event()

    def hang() -> None:
        may_go_on.wait(20)
        over.set()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await aside("hanging", hang)
    may_go_on.set()
    async with asyncio.timeout(20):
        while not over.is_set():
            await asyncio.sleep(0.005)
    # and what it comes to is of no interest any more
    await asyncio.sleep(0)
