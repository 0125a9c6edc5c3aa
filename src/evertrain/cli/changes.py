"""How is a job told to run other code, and what came of it? What `update`, `rollback` and `restart` share.

Whatever is told may be told twice: a controller that dies before it has written a wish down is asked again.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from evertrain.cli import client, code, look, narrate, waiting
from evertrain.cli.registry import KnownJob
from evertrain.model.errors import TroubleError, UsageError
from evertrain.model.words import counted

if TYPE_CHECKING:
    # command lines are read, and help is shown, without what it takes to capture anything
    from evertrain.model.code import Code
    from evertrain.model.config import CodeConfig

Json = dict[str, Any]
FAILED = ("rolled_back", "superseded", "dropped")
"""Outcomes of a change that nobody runs."""


class Captured(NamedTuple):
    """A folder as it is now, ready to be sent."""

    code: Code
    archive: Path
    source: Path


@contextmanager
def captured(job: KnownJob, asked: str) -> Iterator[Captured]:
    """What `--code` names, in a file that is there as long as it may have to be sent."""
    from evertrain.versions import archive, tree
    from evertrain.versions.errors import TreeError

    source = code.folder(asked)
    with tempfile.TemporaryDirectory(prefix="evertrain-") as folder:
        target = Path(folder) / "code.tar.gz"
        try:
            packed = archive.pack(tree.scan(source, _settings(job), (job.run_dir, job.log_root)), target)
        except TreeError as error:
            raise UsageError(str(error)) from error
        yield Captured(packed, target, source)


def _settings(job: KnownJob) -> CodeConfig:
    """Those of the job: a pattern that its config excludes is not a file that somebody has added."""
    import msgspec

    from evertrain.model.config import CodeConfig

    try:
        return msgspec.convert(dict(job.code), CodeConfig)
    except msgspec.ValidationError:
        return CodeConfig()  # of another version of evertrain


def upload(job: KnownJob, found: Captured, vain: str) -> None:
    look.tell(job, f"/v1/code/{found.code.digest}", found.archive, vain, code=True)


@dataclass(frozen=True)
class Wish:
    """A change that is asked for."""

    job: KnownJob
    body: Json
    vain: str
    """What the job then is not: `is not updated`."""
    found: Captured | None = None

    @property
    def name(self) -> str:
        return str(self.body["change"])

    def ask(self) -> None:
        if not look.lives(self.job):
            raise TroubleError(f"job {self.job.job} does not run; `evertrain run` runs your own files as they are then")
        if self.found is not None:
            upload(self.job, self.found, self.vain)
        look.tell(self.job, "/v1/changes", self.body, self.vain, code=True)

    def wait(self, over: Callable[[Json], bool]) -> Json:
        """Until it is `over`, or has come to nothing."""
        return waiting.until(
            self.job,
            f"/v1/changes/{self.name}",
            over=lambda seen: over(seen) or seen["outcome"] in FAILED,
            again=self.ask,
            from_log=lambda database: _from_log(database, self.name),
            what=str(self.body["kind"]),
        )


def _from_log(database: Path, name: str) -> Json | None:
    from evertrain.controller import code_views

    found: Json | None = code_views.change_of(database, name)
    return found


def seen(job: KnownJob, name: str) -> Json | None:
    """A change as the controller sees it; None where it knows of none of that name, or does not answer."""
    try:
        with client.of_run_dir(job.run_dir) as controller:
            found: Json = controller.get(f"/v1/changes/{name}")
            return found
    except client.Unreachable:
        return None


def is_back(change: Json) -> bool:
    return bool(change["back"])


def show(wish: Wish, change: Json, lines: Callable[[Json], list[str]], *, as_json: bool) -> int:
    """What came of it; raises with one line where that is nothing."""
    if as_json:
        print(json.dumps(change))
    if change["outcome"] in FAILED:
        raise TroubleError(failure(wish.job, change, wish.vain))
    if not as_json:
        print("\n".join(lines(change)))
    return 0


def failure(job: KnownJob, change: Json, vain: str) -> str:
    """Why a change has come to nothing, and what runs now."""
    version, because, ended = change["version"], change["because"], change["ended"]
    goes_on = "training goes on" if ended is None else f"the job has ended: {ended}"
    if change["outcome"] == "dropped":
        return f"job {job.job} {vain}: {because}; {goes_on if ended is not None else 'training goes on as it is'}"
    if change["outcome"] == "superseded":
        return f"job {job.job} {vain}: {because or f'another change has taken the place of version {version}'}"
    why = f": {because}" if because else ""
    return f"job {job.job}: version {version} failed{why}; rolled back to version {_runs(job, change)}, {goes_on}"


def _runs(job: KnownJob, change: Json) -> int:
    """The version that a failed one has been changed for."""
    answers = look.ask(job, "/v1/versions")
    versions = answers[0]["versions"] if answers is not None else []
    running = [int(one["version"]) for one in versions if one["runs"] and one["version"] != change["version"]]
    return running[0] if running else int(change["parent"])


# -- in words --------------------------------------------------------------------------------------------------------


def runs(job: KnownJob, change: Json) -> list[str]:
    """`job J: version 2 runs: attempt 4 resumed from step 120 in 1.2 s`, and what is different in it."""
    attempt, resume = change["attempt"], change["resume"]
    how = f"attempt {attempt} began anew" if resume is None else f"attempt {attempt} resumed from step {resume}"
    took = f" in {change['seconds']:.1f} s" if change["seconds"] is not None else "; its steps cannot be seen yet"
    return [f"job {job.job}: version {change['version']} runs: {how}{took}", *_difference(change)]


def pending(job: KnownJob, change: Json) -> list[str]:
    return [
        f"job {job.job}: version {change['version']} comes {narrate.when(change)} (the same with --urgent: at once)",
        *_difference(change),
    ]


def _difference(change: Json) -> list[str]:
    said = difference(change["diff"])
    return [f"compared with version {change['parent']}: {said}"] if said and change["parent"] is not None else []


def difference(diff: Json) -> str:
    """`3 files changed, +12 −4 lines: model.py, …`."""
    parts = []
    if diff["files"]:
        named = [*diff["changed"], *(f"{name} (new)" for name in diff["added"])]
        named += [f"{name} (gone)" for name in diff["removed"]]
        shown = ", ".join([*named[:5], *(["…"] if diff["files"] > len(named[:5]) else [])])
        parts.append(
            f"{counted(diff['files'], 'file')} changed, +{diff['lines_added']} −{diff['lines_removed']} lines: {shown}"
        )
    if diff["args"]:
        parts.append("other arguments")
    if diff["env"]:
        parts.append(f"environment: {', '.join(diff['env'])}")
    return "; ".join(parts)
