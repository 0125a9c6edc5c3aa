"""One script under torchrun and under each way to start of `evertrain run`: what it found, printed and ended with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import jobs, leftovers

SCRIPTS = Path(__file__).parent / "scripts"
STARTS = ("zygote", "parked", "spawn")
CLEARED = ("PYTHON", "OMP_", "OPENBLAS_", "PYTEST_")
LIMIT_S = 100.0


@dataclass
class Outcome:
    """What one launcher made of one script."""

    exit_code: int
    facts: list[dict[str, Any]]
    """By rank; what collect.py and neighbour.py have written down."""
    own: list[dict[str, Any]]
    stdout: list[bytes]
    stderr: list[bytes]
    story: str


def flat(facts: dict[str, Any], above: str = "") -> dict[str, Any]:
    """`{"limits": {"core": 0}}` as `{"limits: core": 0}`, so that a difference is shown alone."""
    found: dict[str, Any] = {}
    for name, value in facts.items():
        found |= flat(value, f"{above}{name}: ") if isinstance(value, dict) else {f"{above}{name}": value}
    return found


def launch(
    launcher: str, folder: Path, words: Sequence[str], *, nproc: int, stdin: bytes = b"", cwd: Path = SCRIPTS
) -> Outcome:
    """Run `words` (script and arguments, or `-m module …`) in `cwd` under `torchrun` or one way to start.

    `{folder}` in the words, and in what comes back, stands for the folder that the script may write to.
    """
    folder.mkdir()
    logs, given = folder / "logs", folder / "stdin"
    given.write_bytes(stdin)
    common = [f"--nproc-per-node={nproc}", "--max-restarts=0", "--log-dir", str(logs), "--redirects=3"]
    name = f"parity-{jobs.SESSION}-{folder.name}"
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *common]
    else:
        command = [str(jobs.EVERTRAIN), "run", "--job", name, "--start", launcher, *common]
    command += [word.format(folder=folder) for word in words]
    output = folder / "launcher.log"
    with given.open("rb") as source, output.open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=jobs.user_environment(folder, without=CLEARED),
            stdin=source,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            exit_code = process.wait(LIMIT_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(jobs.STOP_LIMIT_S)
            leftovers.clear_away(folder, [name])
    mark = os.fsencode(folder)
    files = [output, *sorted(logs.rglob("stderr.log"))]
    story = "\n".join(f"--- {file.relative_to(folder)}\n{file.read_text(errors='replace')}" for file in files)
    return Outcome(
        exit_code,
        *(
            [flat(json.loads(file.read_bytes().replace(mark, b"{folder}"))) for file in sorted(folder.glob(names))]
            for names in ("facts-*.json", "own-*.json")
        ),
        *(
            [file.read_bytes().replace(mark, b"{folder}") for file in _rank_files(logs, nproc, name)]
            for name in ("stdout.log", "stderr.log")
        ),
        story,
    )


def _rank_files(logs: Path, nproc: int, name: str) -> list[Path]:
    files = [file for rank in range(nproc) for file in logs.glob(f"*/attempt_*/{rank}/{name}")]
    assert len(files) == nproc, sorted(os.fspath(file.relative_to(logs)) for file in logs.rglob("*"))
    return files
