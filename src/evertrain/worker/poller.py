"""Who sees the end of an operation that C++ waits for? A thread that asks every 20 ms while any is in flight.

It begins with the first operation that nobody may wait for in Python (a gradient's, say), and ends when there has been
none for a second. A rank whose operations are all waited for in Python never has it. Scripts do not see it among
`threading`'s threads, no signal is delivered to it, forks of the rank do not have it.
"""

from __future__ import annotations

import _thread
import ctypes
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

PERIOD_S = 0.02
IDLE_S = 1.0
NAME = b"evertrain-trace"
_PR_SET_NAME = 15


class Poller:
    """Calls `look` again and again until it has returned False for a while."""

    __slots__ = ("_lock", "_look", "_over", "is_awake", "paused")

    def __init__(self, look: Callable[[], bool]) -> None:
        """`look` says whether anything is in flight."""
        self._look = look
        self._lock = _thread.allocate_lock()
        self._over = False
        self.is_awake = False
        self.paused = False
        """Nothing may be asked for now."""

    def wake(self) -> None:
        """Something was launched. Callers ask `is_awake` first."""
        with self._lock:
            if self.is_awake or self._over:
                return
            self.is_awake = True
        import atexit
        import signal

        atexit.unregister(self.stop)
        atexit.register(self.stop)
        # masks are inherited: signals stay with the threads of the script
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # no more threads: ends are seen when the next operation is launched
            self._over = True
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def pause(self, paused: bool) -> None:
        """When this returns, a look that had begun is over."""
        with self._lock:
            self.paused = paused

    def stop(self) -> None:
        """The interpreter ends: no thread may be in C++ when it does."""
        with self._lock:
            self._over = True

    def _run(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, NAME, 0, 0, 0)
        last = time.monotonic()
        while True:
            time.sleep(PERIOD_S)
            with self._lock:
                if not self._over and (self.paused or self._found()):
                    last = time.monotonic()
                elif self._over or time.monotonic() > last + IDLE_S:
                    self.is_awake = False
                    return

    def _found(self) -> bool:
        try:
            return self._look()
        except Exception:  # another version of torch: the script is not told of it on its output
            self._over = True
            return False
