"""Imported by the scripts as a module beside them. What a process can find out about itself."""

import gc
import inspect
import locale
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings

DIFFERENT_BY_NATURE = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")


def facts(main):
    return {
        **_python(),
        **_main(main),
        **_process(),
        "standard streams": [_stream(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)],
    }


def facts_after_torch():
    """What `import torch`, done ahead or not, has changed."""
    return {
        "warning filters": sorted(map(_shown, warnings.filters)),
        "log handlers": list(map(_shown, logging.root.handlers)),
        "meta path": sorted(getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path),
    }


def _python():
    return {
        "argv": sys.argv,
        "original argv": sys.orig_argv,
        "flags": list(sys.flags),
        "names of flags": str(sys.flags),
        "executable": sys.executable,
        "prefixes": [sys.prefix, sys.base_prefix, sys.exec_prefix],
        "path": sys.path,
        "warning options": sys.warnoptions,
        "-X": sys._xoptions,
        "hooks": [sys.excepthook.__module__, sys.displayhook.__module__, sys.unraisablehook.__module__],
        "limits of Python": [sys.getrecursionlimit(), sys.getswitchinterval(), gc.get_threshold(), gc.isenabled()],
        "trace functions": [sys.gettrace(), sys.getprofile(), threading.gettrace()],
        "encodings": [sys.getdefaultencoding(), sys.getfilesystemencoding(), locale.getlocale()],
        "threads of Python": [thread.name for thread in threading.enumerate()],
        "main thread": [
            threading.current_thread() is threading.main_thread(),
            threading.get_native_id() == os.getpid(),
            threading.main_thread().native_id == os.getpid(),
        ],
    }


def _main(main):
    return {
        "__main__ is registered": sys.modules["__main__"] is main,
        "__main__": {
            name: repr(getattr(main, name))
            for name in ("__name__", "__file__", "__package__", "__cached__", "__doc__", "__builtins__")
        },
        "__main__ has annotations": getattr(main, "__annotations__", None),
        "__spec__": _shown(main.__spec__),
        "__loader__": [type(main.__loader__).__name__, main.__loader__.name, main.__loader__.path],
        "source of __main__": inspect.getsource(main)[:200],
    }


def _process():
    with open("/proc/self/status") as file:
        status = dict(line.rstrip("\n").split(":", 1) for line in file)
    with open("/proc/self/cmdline", "rb") as file:
        command_line = file.read()
    mask = os.umask(0)
    os.umask(mask)
    pid = os.getpid()
    return {
        "command line": command_line.decode(),
        "ps": subprocess.run(["ps", "-o", "comm=,args=", "-p", str(pid)], capture_output=True, text=True).stdout,
        "signals": {key: _signals(status[key]) for key in ("SigBlk", "SigIgn", "SigCgt")},
        "signal handlers": {number: str(_handler(number)) for number in sorted(signal.valid_signals())},
        "wakeup descriptor of signals": signal.set_wakeup_fd(-1),
        "privileges": {key: status[key].strip() for key in ("Uid", "Gid", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp")},
        "environment": {
            name: "" if name in DIFFERENT_BY_NATURE else value
            for name, value in os.environ.items()
            if not name.startswith("EVERTRAIN_")
        },
        "working directory": os.getcwd(),
        "umask": mask,
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT_" in name},
        "leads its session and group": [os.getsid(0) == pid, os.getpgid(0) == pid],
        "processors": sorted(os.sched_getaffinity(0)),
        "nice": os.nice(0),
        "zone": time.tzname,
    }


def _signals(mask):
    """Numbers of the signals in a mask, without the two that the C library keeps for itself."""
    return [number for number in range(1, 65) if int(mask, 16) >> (number - 1) & 1 and number not in (32, 33)]


def _shown(thing):
    return re.sub(" at 0x[0-9a-f]+", "", repr(thing))


def _handler(number):
    handler = signal.getsignal(number)
    return getattr(handler, "__name__", None) or (handler.name if isinstance(handler, signal.Handlers) else handler)


def _stream(stream):
    return [
        type(stream).__name__, stream.name, stream.mode, stream.encoding, stream.errors, stream.fileno(),
        stream.line_buffering, stream.write_through, stream.isatty(), type(stream.buffer).__name__, stream.closed,
    ]  # fmt: skip
