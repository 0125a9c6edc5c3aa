"""Where does NCCL's profiler plugin come from?

Its sources are part of the package, and the node that wants it compiles it once, with its own C compiler, into the
user's cache. So one wheel fits every machine, the plugin fits the C library that it meets there, an installation needs
neither compiler nor network, and where there is no compiler nothing fails: the inside of NCCL's collectives is not
seen, and `status` says why. For machines without one, `python -m evertrain.trace.plugin FOLDER` builds it elsewhere;
one that lies beside its sources is taken as it is.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

SOURCES = Path(__file__).with_name("nccl")
NAME = "libnccl-profiler-evertrain.so"
SYMBOLS = ("ncclProfiler_v4", "ncclProfiler_v5", "ncclProfiler_v6")
FLAGS = (
    "-std=c11", "-D_GNU_SOURCE", "-O2", "-g", "-fPIC", "-fvisibility=hidden", "-pthread", "-shared", "-Wl,-z,nodelete",
    "-Wl,-z,defs",
)  # fmt: skip
COMPILERS = ("cc", "gcc", "clang")
_BUILD_LIMIT_S = 120.0


class Unavailable(Exception):
    """There is no plugin here; says why in one line."""


def find(fallback: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """The plugin, built now if it has to be; in `fallback` where the user's cache cannot be used.

    Takes about two seconds the first time. Raises Unavailable.
    """
    if (packaged := SOURCES / NAME).is_file():
        return _loadable(packaged)
    reasons = []
    for root in (*_caches(environ), fallback):
        folder = root / f"nccl-{_key()}"
        try:
            if not (folder / NAME).is_file():
                _make_private(folder)
                build(folder / NAME, environ)
            return _loadable(_own(folder / NAME))
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror or error}")
    raise Unavailable("; ".join(reasons))


def build(library: Path, environ: Mapping[str, str] = os.environ, more: Sequence[str] = ()) -> None:
    """Compile it. Raises Unavailable, or OSError where the folder cannot be written to."""
    command = compiler(environ)
    handle, draft = tempfile.mkstemp(dir=library.parent, prefix=".building-", suffix=".so")
    os.close(handle)
    try:
        done = subprocess.run(
            [*command, *FLAGS, *more, "-o", draft, *sorted(map(str, SOURCES.glob("*.c"))), "-ldl"],
            capture_output=True, text=True, errors="replace", timeout=_BUILD_LIMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if done.returncode:
            told = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
            raise Unavailable(f"{' '.join(command)} cannot build it: {told}")
        os.chmod(draft, 0o755)
        os.replace(draft, library)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{' '.join(command)} has not ended after {_BUILD_LIMIT_S:.0f} s") from error
    finally:
        Path(draft).unlink(missing_ok=True)


def compiler(environ: Mapping[str, str] = os.environ) -> list[str]:
    """`CC`, or the first that is there. Raises Unavailable."""
    asked = environ.get("CC", "").split()
    if asked and shutil.which(asked[0], path=environ.get("PATH")):
        return asked
    for name in COMPILERS:
        if shutil.which(name, path=environ.get("PATH")):
            return [name]
    raise Unavailable(
        "no C compiler on this node; install gcc, or build it elsewhere with `python -m evertrain.trace.plugin FOLDER` "
        f"and put {NAME} into {SOURCES}"
    )


def _caches(environ: Mapping[str, str]) -> Iterable[Path]:
    if asked := environ.get("XDG_CACHE_HOME"):
        yield Path(asked) / "evertrain"
    elif home := environ.get("HOME"):
        yield Path(home) / ".cache" / "evertrain"


def _key() -> str:
    """What a built plugin depends on: a home folder may be shared by machines of several kinds."""
    said = hashlib.sha256("\0".join((*FLAGS, platform.machine(), *platform.libc_ver())).encode())
    for file in sorted(SOURCES.glob("*.[ch]")):
        said.update(file.name.encode() + b"\0" + file.read_bytes())
    return said.hexdigest()[:16]


def _make_private(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    _own(folder)


def _own(path: Path) -> Path:
    """What others could have written is not loaded into a rank."""
    for one in (path, path.parent):
        found = one.stat()
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(1, f"{one} is not this user's alone")
        if one.is_dir():
            break
    return path


def _loadable(library: Path) -> Path:
    """Loading it here does nothing, and shows what a rank would meet. Raises Unavailable."""
    try:
        loaded = ctypes.CDLL(str(library))
        for symbol in SYMBOLS:
            ctypes.c_char.in_dll(loaded, symbol)
    except (OSError, ValueError) as error:
        raise Unavailable(f"{library} cannot be loaded: {error}") from error
    return library


def main(argv: Sequence[str]) -> int:
    """`python -m evertrain.trace.plugin FOLDER`"""
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: python -m evertrain.trace.plugin FOLDER", file=sys.stderr)
        return 2
    folder = Path(argv[0])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        build(folder / NAME)
        print(_loadable(folder / NAME))
    except (Unavailable, OSError) as error:
        print(f"evertrain: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
