"""Start of the keeper: `python -I …/keeper/main.py keeper.json`.

Started by file and isolated, so that neither the user's folder nor environment decides what it imports.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36


def main(path: str) -> None:
    from evertrain.keeper.keeper import Keeper
    from evertrain.keeper.log import log

    spec: dict[str, Any] = json.loads(Path(path).read_bytes())
    _stand_alone()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        # a handler, not SIG_IGN, which ranks would inherit (`nohup evertrain run …` hands it down to us): the zygote is
        # started with the keeper
        signal.signal(number, lambda number, _: log(f"signal {number} is for `evertrain run`, not for the keeper"))
    try:
        os.makedirs(spec["node_dir"], mode=0o700, exist_ok=True)
        keeper = Keeper(spec, environ=_environ_of_ranks(spec), stdin=os.dup(0), log_fd=_open_log(spec))
    except OSError as error:
        sys.exit(f"evertrain: the keeper of {spec['node']} cannot start: {error}")
    signal.signal(signal.SIGTERM, lambda *_: keeper.stop("SIGTERM"))
    keeper.run()


def _stand_alone() -> None:
    """A session of its own, adoption of orphans, and no descriptor that would pass to ranks by accident."""
    import ctypes

    try:
        os.setsid()
    except PermissionError:  # it leads one already
        pass
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    while (lowest := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(lowest, True)
    os.close(lowest)
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2:
                os.set_inheritable(int(name), False)
        except OSError:  # the one that was open for the listing
            pass


def _environ_of_ranks(spec: dict[str, Any]) -> dict[str, str]:
    """The user's, with what torchrun adds to it for all ranks of a machine."""
    environ = dict(os.environ)
    if spec["local_world_size"] > 1:
        environ.setdefault("OMP_NUM_THREADS", "1")
    return environ


def _open_log(spec: dict[str, Any]) -> int:
    """Where the zygote and ranks write until `go` gives them files of their own."""
    try:
        path = Path(spec["log_dir"]) / f"zygote-{spec['node']}.log"
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


if __name__ == "__main__":
    # only to find the package: nothing beside it may stand in for a module of the standard library
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import evertrain

    assert evertrain.__path__
    del sys.path[0]
    main(sys.argv[1])
