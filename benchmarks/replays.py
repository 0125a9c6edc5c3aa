"""Does a replay of the job find the node that computes wrongly? One job and one fault; for benchmarks that want many.

Six local nodes with one rank each and a spare one train examples/train_3d.py (tests/support/scripts/replayed.py), whose
loss is no number in the first two attempts. Tests of stopped nodes are switched off: the second failure leads to the
replay at once. `p` is the fraction of starts in which the node's products have a flipped bit: with 1.0 three rounds say
who it is, with 0.1 some tens are needed (`repeats`).

    from replays import replay
    trial = replay("node-3", p=0.1, seed=7, repeats=40)
    assert trial.is_right
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import own_job
from harness import ROOT, NotMeasured

sys.path.append(str(ROOT / "tests"))

from support import jobs

SCRIPT = ROOT / "tests/support/scripts/replayed.py"
NODES = 6
FLAGS = (f"--local-nodes={NODES + 1}", f"--nnodes={NODES}", "--standby=1")
SIZES = (
    "--bad-attempts=2", "--at=3", "--pp=2", "--dp=3", "--layers=4", "--width=64", "--batch=4", "--context=32",
    "--microbatches=2", "--steps=4",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Trial:
    node: str
    """The one that computes wrongly; empty: none does."""
    named: tuple[str, ...]
    evicted: tuple[str, ...]
    suspects: tuple[str, ...]
    confidence: float
    because: str
    rounds: int
    seconds: float
    """Of all rounds together."""

    @property
    def is_right(self) -> bool:
        """Nobody but the one to blame is named, and goes."""
        right = (self.node,) if self.node else ()
        return self.named == self.evicted == right


def replay(
    node: str, *, p: float = 1.0, seed: int = 0, repeats: int = 3, budget_s: float = 900.0, limit_s: float = 1200.0
) -> Trial:
    """Run one job; `seed` says in which of its starts the fault shows. Raises NotMeasured."""
    config = (
        f"diagnose: {{enabled: false, replay_repeats: {repeats}, replay_budget_s: {budget_s}}}\n"
        "ladder: {reattempts: 0}\n"
    )
    fault = f"flip:node={node},matmul=1,p={p},seed={seed}" if node else ""
    environment = {"EVERTRAIN_REPLAY_FAULT": fault}
    with own_job.running(
        "replay", SCRIPT, nproc=1, flags=FLAGS, args=SIZES, config=config, environment=environment
    ) as job:
        job.wait(limit_s)
        return _trial(node, job)


def _trial(node: str, job: jobs.Job) -> Trial:
    found = [one["replay"] for one in job.incidents() if one["replay"]]
    if len(found) != 1 or found[0]["confidence"] is None:
        raise NotMeasured(f"{len(found)} replays; {job.story()}")
    (one,) = found
    return Trial(
        node=node,
        named=tuple(one["nodes"]),
        evicted=tuple(seen["id"] for seen in job.status()["nodes"] if seen["state"] == "evicted"),
        suspects=tuple(one["suspects"]),
        confidence=one["confidence"],
        because=one["because"],
        rounds=len(one["rounds"]),
        seconds=sum(each["seconds"] for each in one["rounds"]),
    )
