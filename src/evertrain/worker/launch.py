"""How does a waiting process become a rank? The same way whether it was forked, parked or spawned.

    wait ──go──▶ output to files ▶ environment ▶ looks ▶ `__main__` ▶ session ▶ script ──▶ normal interpreter exit

`run` returns when the script is done; whoever called it returns too, up to the last line of the bootstrap, so that the
interpreter ends as it does after any script.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any, NoReturn

from evertrain.worker import disguise, script, session, talk, version
from evertrain.worker.barrier import Barrier
from evertrain.worker.libraries import LIBRARIES

Given = dict[str, Any]
"""What the keeper told this process at its start: keeper, python, command, preload, code and its root, descriptors."""
Go = dict[str, Any]
"""What the keeper tells it at `go`: env, session, stdout, stderr, and args where the command's own no longer hold.

A process that is to run ahead is told no session, but which variables are `unknown` until there is one."""


def wait(line: int, keeper: int) -> Go:
    """Say that nothing but `go` is missing, and wait for it."""
    _be_oneself()
    talk.say(line, {"is": "ready"})
    go: Go = talk.hear(line)
    # a forked process has become the keeper's child by now: go follows on the zygote's answer
    disguise.die_with_parent(keeper)
    return go


def run(go: Go, given: Given, startup: frozenset[str]) -> None:
    """Be the rank that `go` describes; where it is not known yet which one that is, as far as `evertrain.init()`."""
    early: Barrier | None = None
    if "unknown" not in go:
        os.close(given["channel"])
    disguise.redirect_output(go["stdout"], go["stderr"])
    os.environ.update(go["env"])
    command = given["command"]
    if go.get("args") is not None:
        command = {**command, "args": go["args"]}
    args = version.arguments(script.arguments(command, go["env"].get("LOCAL_RANK", "")))
    if command["kind"] == "program":
        _become(command["target"], args)
    real = [given["python"], "-u", *(["-m"] if command["kind"] == "module" else []), command["target"], *args]
    disguise.show_command_line(real)
    disguise.name_process(os.path.basename(given["python"]))
    sys.orig_argv[:] = real
    script.forget_clashes(command, startup)
    if version.current is not None:
        session.code_check = version.check
    if "unknown" in go:
        early = session.barrier = Barrier(given["channel"], command, go["unknown"], given.get("code_root", ""))
    try:
        if early is None:
            session.begin(go["session"])
        if version.current is not None:
            from evertrain.worker import reads

            rank = go["env"].get("RANK")
            reads.watch(version.current, f"rank {rank}" if rank is not None else "a rank ahead of its start")
        script.run(command, args)
        if session.barrier is not None:
            session.barrier.give_up("the script comes to its end without evertrain.init()")
    except SystemExit:
        if session.barrier is not None:
            session.barrier.give_up("the script exits before it calls evertrain.init()")
        raise
    except BaseException as error:
        error.__traceback__ = theirs = _without_launcher(error.__traceback__)
        if session.barrier is not None:
            traceback.print_exception(error)
            session.barrier.give_up(f"{_in_a_line(error)}, before evertrain.init()")
        told = early.told if early is not None else go
        assert told is not None
        _record(error, told["session"]["exception_path"])
        if session.current is not None:
            session.current.failed = True
        _show_without_launcher(theirs)
        raise


def _become(program: str, args: list[str]) -> NoReturn:
    """Be replaced by a program that is not Python."""
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    try:
        os.execvp(program, [program, *args])
    except OSError as error:
        print(f"evertrain: cannot run {program}: {error.strerror}", file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _be_oneself() -> None:
    """What a fork has copied and every process should have for itself; `random` sees to that by itself."""
    main = threading.main_thread()
    if main.native_id != os.getpid():  # Python 3.11 and 3.12 keep the parent's
        main._set_native_id()  # type: ignore[attr-defined]
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    if process := sys.modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)


def _without_launcher(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, script.__file__):
        trace = trace.tb_next
    return trace


def _show_without_launcher(theirs: TracebackType | None) -> None:
    """Have the interpreter show the error as if the script had been started by itself.

    The error still has to pass through the launcher's own frames, and each adds a line to its traceback.
    """
    hook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
        sys.excepthook = hook
        sys.last_traceback = error.__traceback__ = theirs
        hook(kind, error, theirs)

    sys.excepthook = show


def _record(error: BaseException, path: str) -> None:
    """Write down what ended the script, for the controller to read."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(_described(error), file)
    except Exception:  # a full disk, an error that cannot be printed: the user's own error is what has to be shown
        pass


def _in_a_line(error: BaseException) -> str:
    found = _described(error)
    return f"{found['type']}: {found['message']} in line {found['line']} of {os.path.basename(found['file'] or '?')}"


def _described(error: BaseException) -> dict[str, Any]:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*LIBRARIES, "<"))]
    at = own[-1] if own else frames[-1] if frames else None
    return {
        "type": type(error).__qualname__,
        "module": type(error).__module__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        # the user's own line: what a library raises there moves with its version, not with the mistake
        "file": at.filename if at else None,
        "line": at.lineno if at else None,
        "step": session.current.step if session.current else None,
        "time": time.monotonic(),
    }
