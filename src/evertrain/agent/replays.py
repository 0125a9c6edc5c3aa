"""What do ranks of a replay need that others do not, and what have they given? Their files lie apart.

A round of a replay is kept by the keeper like an attempt, under the round's number, negative: its ranks have pages, so
that they can be looked at, but nobody takes their steps for the job's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from evertrain.model.replays import Replayed, ReplaySettings

State = dict[str, Any]


def is_one(number: str | int) -> bool:
    """Whether what the keeper knows by this number is a replay."""
    return int(number) < 0


def page_path(node_dir: Path, attempt: int, rank: int) -> Path:
    return node_dir / "pages" / f"replay{-attempt}-r{rank}"


def log_folder(log_root: Path, node: str, attempt: int, rank: int) -> Path:
    """By node: in a round there are as many ranks of a number as groups."""
    return log_root / f"replay_{-attempt}" / node / str(rank)


def result_path(page: Path) -> Path:
    return Path(f"{page}.result")


def told(settings: ReplaySettings, page: Path) -> dict[str, Any]:
    """What the rank is told: see `worker.replay`."""
    return {"config": msgspec.to_builtins(settings), "result": str(result_path(page))}


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Without it PyTorch warns that cuBLAS may give other bits each time."""
    return {} if "CUBLAS_WORKSPACE_CONFIG" in inherited else {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def replayed(state: State, page: Callable[[int, int], Path]) -> Replayed | None:
    """What the ranks here have given in the newest round."""
    number = min((int(number) for number in state["attempts"] if is_one(number)), default=None)
    if number is None:
        return None
    digests: dict[int, str] = {}
    for rank in state["attempts"][str(number)]["ranks"]:
        try:
            digests[int(rank)] = result_path(page(number, int(rank))).read_text()
        except OSError:  # not yet
            pass
    return Replayed(round=-number, digests=digests)


def forget(node_dir: Path, attempt: int) -> None:
    """Remove what rounds before this one have left, or, of an attempt, all of them."""
    for old in (node_dir / "pages").glob("replay*-r*"):
        number = old.name.removeprefix("replay").partition("-")[0]
        if number.isdecimal() and (attempt > 0 or int(number) < -attempt):
            old.unlink(missing_ok=True)
