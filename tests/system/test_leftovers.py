"""The last test of the suite: whatever the tests before it did, nothing of their jobs is left."""

from __future__ import annotations

import pytest

from support import leftovers
from support.jobs import SESSION


def test_no_process_no_shared_memory_and_no_socket_is_left(tmp_path_factory: pytest.TempPathFactory) -> None:
    left = leftovers.after_a_while(tmp_path_factory.getbasetemp(), [f"-{SESSION}-"], within_s=15)
    assert [*leftovers.found_at_close, *left] == []
