"""Does a folder take data, give them back unchanged, and how fast? The file is removed whatever happens."""

from __future__ import annotations

import hashlib
import os
import time

from evertrain.diagnose.bench import Absent, Bench

ON_EACH_RANK = False
CHUNK = 1 << 20


def run(bench: Bench, *, folder: str = "", size_bytes: int = 32 << 20) -> None:
    folder = folder or bench.folder
    if not os.path.isdir(folder):
        raise Absent(f"no folder {folder}")
    path = os.path.join(folder, f".evertrain-test-{bench.node}-{os.getpid()}")
    # content that no storage can compress or has seen before
    chunk = hashlib.shake_256(os.urandom(32)).digest(CHUNK)
    try:
        began = time.perf_counter()
        written = hashlib.sha256()
        with open(path, "xb") as file:
            for at in range(0, size_bytes, CHUNK):
                part = chunk[: size_bytes - at]
                file.write(part)
                written.update(part)
            file.flush()
            os.fsync(file.fileno())
        bench.say(
            "write",
            size_bytes / (time.perf_counter() - began),
            "bytes/s",
            ok=True,
            size_bytes=size_bytes,
            folder=folder,
        )
        read = hashlib.sha256()
        with open(path, "rb") as file:
            # from the disk, not from memory, as far as the file system can be told
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            while part := file.read(CHUNK):
                read.update(part)
        is_same = read.digest() == written.digest()
        bench.say(
            "read", size_bytes / (time.perf_counter() - began), "bytes/s", ok=is_same,
            because="" if is_same else "what was read is not what was written", size_bytes=size_bytes, folder=folder,
        )  # fmt: skip
    except OSError as error:
        bench.say(
            "write", 0.0, "bytes/s", ok=False, because=f"{error.strerror}: {folder}", errno=error.errno, folder=folder
        )
    finally:
        try:
            os.unlink(path)
        except OSError:
            pass
