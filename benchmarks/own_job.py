"""A job of a benchmark's own: in a folder that goes with it, and with nothing left of it in the end."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness import ROOT, NotMeasured

sys.path.append(str(ROOT / "tests"))

from support import jobs, leftovers


@contextmanager
def running(
    prefix: str, script: Path, *, nproc: int, flags: Sequence[str], args: Sequence[str | Path], config: str = "",
    environment: Mapping[str, str] = {},
) -> Iterator[jobs.Job]:  # fmt: skip
    """Starts it; one OpenMP thread a rank. What the helpers that wait give up is raised as NotMeasured."""
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}-"))
    if config:
        (folder / "config.yaml").write_text(config)
        flags = [*flags, "--config=config.yaml"]
    job = jobs.start(
        folder, script, nproc=nproc, flags=flags, args=args, job=folder.name,
        environment={"OMP_NUM_THREADS": "1", **environment}, without=("PYTHON", "OMP_"),
    )  # fmt: skip
    try:
        yield job
    except AssertionError as error:
        raise NotMeasured(str(error)) from error
    finally:
        job.end()
        if left := leftovers.after_a_while(folder, [job.name], within_s=10):
            print(f"left behind: {'; '.join(left)}", flush=True)
        leftovers.clear_away(folder, [job.name])
        shutil.rmtree(folder, ignore_errors=True)
