"""A script cannot tell whether torchrun or Evertrain has started it.

Every script of `scripts/` runs under torchrun once, and under each way to start of `evertrain run`; what it finds out,
prints and ends with has to be the same. Not compared, because they differ by nature: values that name the run
(neighbour.py, DIFFERENT_BY_NATURE), names that begin with EVERTRAIN_, what lies on the stack below the script's first
frame, `/proc/self/environ`, and which modules are loaded already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from system.parity.launchers import SCRIPTS, STARTS, Outcome, launch

CASES: dict[str, dict[str, Any]] = {
    "collect": {"words": ["collect.py", "{folder}", "--flag", "two words", "", "ü"], "nproc": 2, "stdin": b"a\nb"},
    "module": {"words": ["-m", "package", "{folder}", "--flag"], "nproc": 1},
    "text": {"words": ["./text.py"], "nproc": 1},
    "raises": {"words": [str(SCRIPTS / "raises.py")], "nproc": 1},
    "interrupted": {"words": ["interrupted.py"], "nproc": 1},
    "wrong": {"words": ["wrong"], "nproc": 1},
    "environment": {"words": ["environment.py"], "nproc": 1},
    "debugged": {"words": ["debugged.py"], "nproc": 2, "stdin": b"p value * 2\nc\n"},
    "shadow": {"words": ["shadow/main.py"], "nproc": 1},
}

SMALL = ["zygote", *(pytest.param(start, marks=pytest.mark.matrix) for start in ("spawn", "parked"))]
"""What these scripts do is the same from the script's first line on, however that was reached."""

Run = Callable[[str, str], Outcome]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`run(launcher, case)`, done once."""
    done: dict[tuple[str, str], Outcome] = {}

    def outcome(launcher: str, case: str) -> Outcome:
        if (launcher, case) not in done:
            folder = tmp_path_factory.mktemp(f"{launcher}-{case}") / "out"
            done[launcher, case] = launch(launcher, folder, **CASES[case])
        return done[launcher, case]

    return outcome


def differences(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
    """What a script found otherwise under Evertrain: rank and fact, and both values."""
    assert len(ours) == len(theirs)
    return {
        f"rank {rank}: {name}": (own.get(name), other.get(name))
        for rank, (own, other) in enumerate(zip(ours, theirs, strict=True))
        for name in own | other
        if own.get(name) != other.get(name)
    }


@pytest.mark.parametrize("start", STARTS)
def test_what_a_script_finds(run: Run, start: str) -> None:
    theirs, ours = run("torchrun", "collect"), run(start, "collect")
    assert theirs.exit_code == 0, theirs.story
    assert ours.exit_code == 0, ours.story
    assert differences(ours.facts, theirs.facts) == {}
    assert ours.stdout == theirs.stdout


@pytest.mark.parametrize("start", STARTS)
def test_what_a_module_finds(run: Run, start: str) -> None:
    theirs, ours = run("torchrun", "module"), run(start, "module")
    assert theirs.exit_code == 0, theirs.story
    assert ours.exit_code == 0, ours.story
    assert differences(ours.facts, theirs.facts) == {}
    assert ours.facts[0]["__main__: __name__"] == "'__main__'"


@pytest.mark.parametrize("launcher", ["torchrun", *STARTS])
def test_what_every_rank_has_for_itself(run: Run, launcher: str) -> None:
    first, second = run(launcher, "collect").own
    assert first.keys() == second.keys() == {"numpy", "torch", "seed of torch", "random", "authkey"}
    assert not [name for name in first if first[name] == second[name]]


@pytest.mark.parametrize("case", ["text", "raises", "interrupted", "wrong"])
@pytest.mark.parametrize("start", SMALL)
def test_how_a_script_ends(run: Run, start: str, case: str) -> None:
    theirs, ours = run("torchrun", case), run(start, case)
    assert ours.stderr == theirs.stderr
    assert ours.stdout == theirs.stdout
    assert ours.exit_code == theirs.exit_code == 1


@pytest.mark.parametrize("case", ["environment", "debugged", "shadow"])
@pytest.mark.parametrize("start", SMALL)
def test_what_a_script_prints(run: Run, start: str, case: str) -> None:
    theirs, ours = run("torchrun", case), run(start, case)
    assert theirs.exit_code == 0, theirs.story
    assert ours.exit_code == 0, ours.story
    assert ours.stdout == theirs.stdout
    assert all(theirs.stdout)
