"""What tests of the NCCL plugin share: it is compiled once."""

from __future__ import annotations

import pytest

from support import nccl


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> nccl.Built:
    return nccl.shared(tmp_path_factory)
