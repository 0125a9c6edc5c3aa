"""Does a folder lie on a network file system? There locks and SQLite cannot be trusted."""

from __future__ import annotations

import os
import re
from pathlib import Path

NETWORK = frozenset(
    ("9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4")
    + ("ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs")
)


def is_network(folder: Path, table: str | None = None) -> bool:
    """Whether the file system below `folder`, which need not exist yet, is a network one (or any kind of FUSE)."""
    kind = kind_of(folder, Path("/proc/self/mounts").read_text(errors="replace") if table is None else table)
    return kind in NETWORK or kind == "fuse" or kind.startswith("fuse.")


def kind_of(folder: Path, table: str) -> str:
    """Type of the file system that holds `folder`: that of the longest mount point above it, the last where several lie
    on each other."""
    real = os.path.realpath(folder)
    best, kind = "", ""
    for line in table.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = _unescaped(fields[1])
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


def _unescaped(text: str) -> str:
    # the kernel writes spaces and the like as \040
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
