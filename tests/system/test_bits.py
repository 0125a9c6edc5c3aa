"""Bit for bit the same: the losses of all steps and the parameters at the end; and the check can fail."""

from __future__ import annotations

from conftest import StartJob
from support import training
from support.training import RANKS

KILLS = ["--inject", "kill:rank=1@step=5", "--inject", "kill:rank=2@save=9"]


def test_every_loss_is_the_same(start_job: StartJob) -> None:
    calm, killed = (
        start_job("train.py", nproc=RANKS, folder="calm"),
        start_job("train.py", nproc=RANKS, flags=KILLS, folder="killed"),
    )
    assert (calm.wait(), killed.wait()) == (0, 0)
    assert len(killed.incidents()) == 2
    for rank in range(RANKS):
        assert training.losses(killed.folder, rank) == training.losses(calm.folder, rank)
    assert training.digest(killed.folder) == training.digest(calm.folder)


def test_without_settle_the_bits_differ(start_job: StartJob) -> None:
    calm = start_job("train.py", nproc=RANKS, args=["--no-settle"], folder="calm")
    killed = start_job("train.py", nproc=RANKS, args=["--no-settle"], flags=KILLS, folder="killed")
    assert (calm.wait(), killed.wait()) == (0, 0)
    assert len(killed.incidents()) == 2
    assert training.digest(killed.folder) != training.digest(calm.folder)
