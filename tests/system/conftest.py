"""What several system tests need and should run only once."""

from __future__ import annotations

import pytest

from conftest import InPeace
from support import training


@pytest.fixture(scope="session")
def undisturbed(in_peace: InPeace) -> str:
    """Digest of the parameters that train.py ends with on `training.RANKS` ranks if nobody disturbs it."""
    folder = in_peace("train.py", nproc=training.RANKS)
    assert training.steps_done(folder, 0) == list(range(1, 13))
    return training.digest(folder)
