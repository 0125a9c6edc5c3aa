"""How does a job go on when the terminal is closed? `--detach`: a copy of `run`, in a session of its own, serves it.

What the ranks print then goes to `<run dir>/logs/run.log`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from evertrain.cli.places import Places
from evertrain.model.errors import EvertrainError, TroubleError

READY = b"ready"


def into_background(here: Places, serve: Callable[[Callable[[], None]], int]) -> int:
    """Fork; the copy serves, this process says where to look and returns as soon as all has been started."""
    report, reporter = os.pipe()
    if os.fork() == 0:
        os.close(report)
        os._exit(_serve_detached(here, reporter, serve))
    os.close(reporter)
    with open(report, "rb") as reading:
        said = reading.read()
    if said != READY:
        raise TroubleError(said.decode(errors="replace") or f"the job did not start; see {here.run_log}")
    print(f"evertrain: job {here.job} runs in the background")
    print(f"  watch   evertrain status --job {here.job}    tail -F {here.run_log}")
    print(f"  stop    evertrain stop --job {here.job}")
    return 0


def _serve_detached(here: Places, reporter: int, serve: Callable[[Callable[[], None]], int]) -> int:
    os.setsid()
    _redirect(here)

    def ready() -> None:
        os.write(reporter, READY)
        os.close(reporter)

    try:
        return serve(ready)
    except EvertrainError as error:
        try:
            os.write(reporter, str(error).encode())
        except OSError:
            print(f"evertrain: {error}", file=sys.stderr)
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _redirect(here: Places) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(here.run_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(nothing)
    os.close(log)
