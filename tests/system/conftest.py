"""What several system tests need and should run only once."""

from __future__ import annotations

import pytest

from support import jobs, training


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the parameters that train.py ends with on `training.RANKS` ranks if nobody disturbs it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = jobs.start(folder, "train.py", nproc=training.RANKS)
    try:
        assert job.wait() == 0
        assert job.incidents() == []
        assert training.steps_done(folder, 0) == list(range(1, 13))
        return training.digest(folder)
    finally:
        jobs.close(folder, [job])
