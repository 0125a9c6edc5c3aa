"""Pipeline, data and tensor parallel at once: a job that loses ranks ends with the same bits."""

from __future__ import annotations

import pytest

from conftest import StartJob
from support.jobs import EXAMPLES

SMALL = ["--steps", "8", "--layers", "4", "--width", "32", "--context", "32"]
KILLS = ["--inject", "kill:rank=1@step=3", "--inject", "kill:rank=2@save=6"]


@pytest.mark.timeout(300)  # sixteen processes on two cores
@pytest.mark.parametrize(
    ("pp", "dp", "tp"),
    [
        (2, 2, 1),
        *(pytest.param(*sizes, marks=pytest.mark.matrix) for sizes in [(2, 2, 2), (4, 1, 1), (1, 4, 1), (1, 1, 4)]),
    ],
)
def test_kills_do_not_change_a_bit(start_job: StartJob, pp: int, dp: int, tp: int) -> None:
    mesh = ["--mesh", f"pp={pp},dp={dp},tp={tp}"]
    args = [f"--pp={pp}", f"--dp={dp}", f"--tp={tp}", *SMALL, "--out=hash"]
    calm, killed = (
        start_job(EXAMPLES / "train_3d.py", nproc=pp * dp * tp, flags=[*mesh, *flags], args=args, folder=folder)
        for folder, flags in (("calm", []), ("killed", KILLS))
    )
    assert (calm.wait(200), killed.wait(200)) == (0, 0)
    assert calm.incidents() == []
    # whoever lost the connection to a killed rank is not blamed, in whatever a pipeline stage wraps its error
    assert [incident["ranks"] for incident in killed.incidents()] == [[1], [2]]
    assert (killed.folder / "hash").read_text() == (calm.folder / "hash").read_text()
