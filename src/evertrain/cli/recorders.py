"""What did the flight recorders of all ranks hold? Their dumps, put right, as files for torch's own analyzer."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from evertrain.cli import client, look
from evertrain.cli.registry import KnownJob
from evertrain.controller import dump_files
from evertrain.controller.capture_files import Kept
from evertrain.locate import export
from evertrain.model.errors import TroubleError
from evertrain.model.words import counted

COME_S = 10.0
"""So long after a fresh capture the dumps of all its nodes are waited for: they are larger, and come behind it."""
_ANSWER_S = 20.0


def write(job: KnownJob, kept: Kept, folder: Path) -> tuple[str, ...]:
    """Write a file for each rank into `folder`, and say how to read them; raises TroubleError where there are none."""
    number = kept.asked.capture
    if not kept.asked.dumps:
        raise TroubleError(
            f"capture {number} of job {job.job} was taken without the flight recorders' dumps: they are kept of the "
            "look before something is done about a hang, and of a fresh one with --flight-recorder"
        )
    content = _live(job, kept) if look.lives(job) else None
    if content is None:
        content = [_read(job, number, node) for node in dump_files.nodes(job.run_dir, number)]
    try:
        raw = {rank: dump for packed in content for rank, dump in dump_files.unpacked(packed).items()}
        files = export.files(raw, kept.merged.groups)
    except ValueError as error:
        raise TroubleError(f"capture {number} of job {job.job}: {error}") from error
    if not files:
        raise TroubleError(f"no rank of job {job.job} has given its flight recorder in capture {number}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, dump in files.items():
            (folder / name).write_bytes(dump)
    except OSError as error:
        raise TroubleError(f"{folder} cannot be written: {error.strerror or error}") from error
    missing = sorted(kept.merged.nodes.keys() - raw.keys())
    lines = [f"{counted(len(files), 'flight recorder')} written; torch reads them with"]
    partly = " --allow-incomplete-ranks" if missing else ""
    lines.append(f"  torchfrtrace {shlex.quote(str(folder))} -p {export.PREFIX}{partly}")
    if missing:
        lines.append(f"  without those of {counted(len(missing), 'rank')} that did not answer: {missing[:8]}")
    return tuple(lines)


def _live(job: KnownJob, kept: Kept) -> list[bytes] | None:
    """From the controller, which all nodes send to; None where nobody answers any more."""
    path = f"/v1/captures/{kept.asked.capture}/recorders"
    wanted = set(kept.merged.nodes.values()) - set(kept.merged.missing)
    deadline = time.monotonic() + COME_S
    try:
        with client.of_run_dir(job.run_dir, _ANSWER_S) as controller:
            while wanted - set(there := controller.get(path)) and time.monotonic() < deadline:
                time.sleep(look.POLL_S)
            return [controller.get_bytes(f"{path}/{node}") for node in there]
    except client.Refused as refused:
        raise TroubleError(f"job {job.job}: {refused.reason}") from refused
    except client.Unreachable:
        return None


def _read(job: KnownJob, number: int, node: str) -> bytes:
    try:
        return dump_files.read(job.run_dir, number, node)
    except OSError as error:
        raise TroubleError(f"{error.filename} cannot be read: {error.strerror or error}") from error
