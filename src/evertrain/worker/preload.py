"""What is imported before there is a rank, and may the process be forked afterwards?

Importing torch is what a start costs, so it is done ahead, with whatever `--preload` names. It must leave the process
as a script would find it: no environment variable, no thread, no trace of CUDA.
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from evertrain.worker import hooks, script, version

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Makes `torch.cuda.is_available()` ask the driver's management library, which does not initialise CUDA."""
_OURS = ("evertrain.worker.api", "evertrain.worker.checkpointer", "evertrain.worker.settle")
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dxg", "/dev/dri/")


class Unfit(Exception):
    """These imports must not be done ahead, and `instead` is the start that may work."""

    def __init__(self, reason: str, instead: str) -> None:
        super().__init__(reason)
        self.instead = instead


def load(command: script.Command, names: Sequence[str], startup: frozenset[str]) -> None:
    """Import all of it and install the hooks; the script's folder is on `sys.path` afterwards.

    Torch comes before the folder is there: a script called `profile.py` must not run because torch wants another one.
    """
    with _environment_restored(), _without_collector():
        try:
            import torch
            import torch._dynamo  # the first optimizer would import it
            import torch.distributed
        except Exception as error:
            raise Unfit(f"torch cannot be imported: {error}", "spawn") from error
        assert torch
        # what a script that uses us imports, so that no rank pays for it on its way back
        for name in _OURS:
            importlib.import_module(name)
    script.enter(command)
    _refuse_clashes(command, startup)
    for name in names:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            raise Unfit(f"--preload {name} failed: {type(error).__name__}: {error}", "spawn") from error
    _refuse_clashes(command, startup)
    if found := version.problem():
        raise Unfit(f"an import is not of the version that ranks are to run: {found}", "spawn")
    hooks.install()
    # what there is stays for good: no collection looks at it again, and none makes a forked rank copy its pages
    gc.freeze()


def end_idle_threads() -> None:
    """OpenBLAS starts threads at import; it ends them before a fork, and starts them again when they are needed."""
    if len(os.listdir("/proc/self/task")) > 1:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)


def why_not_fork() -> str | None:
    """What a forked child could not live with: another thread, an open GPU, or CUDA."""
    import torch

    if torch.cuda._initialized or torch.cuda._is_in_bad_fork():
        return "CUDA has been initialised by an import"
    if opened := sorted(path for path in _open_files() if path.startswith(DEVICES)):
        return f"an import has opened {', '.join(opened)}"
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"imports have left {threads} threads"
    return None


def _open_files() -> set[str]:
    """What this process has open above standard error."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2:
                found.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # the one that was open for the listing
            pass
    return found


@contextmanager
def _without_collector() -> Iterator[None]:
    """Imports make a million objects that stay; to look for garbage among them takes a quarter of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _environment_restored() -> Iterator[None]:
    before = dict(os.environ)
    os.environ[NVML_CHECK] = "1"
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _refuse_clashes(command: script.Command, startup: frozenset[str]) -> None:
    if names := script.clashes(command, startup):
        one = "a module" if len(names) == 1 else "modules"
        raise Unfit(f"the script has {one} of its own by the name of one already imported: {', '.join(names)}", "spawn")
