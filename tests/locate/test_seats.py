"""What the names of dumps say."""

import pytest

from evertrain.locate import seats


@pytest.mark.parametrize(
    ("label", "rank", "local", "host"),
    [
        ("rank0", 0, None, None),
        ("rank 12", 12, None, None),
        ("node-06/rank3", 3, None, "node-06"),
        ("node-03/local5", None, 5, "node-03"),
        ("node-7 rank 3", 3, None, "node-7"),
        ("17", 17, None, None),
        ("host1/global_rank=9", 9, None, "host1"),
        ("node-1/local_rank2", None, 2, "node-1"),
        ("sampled ranks", None, None, None),
        ("dumps/node-52-local0.txt", None, 0, "node-52"),
        ("/tmp/stacks/node-06/rank0.json", 0, None, "node-06"),
        ("./py-spy_gpu-a-3_rank12.log.gz", 12, None, "gpu-a-3"),
        ("stacks/rank3/dump.txt", 3, None, None),
        ("trainer/rank5", 5, None, "trainer"),
        ("7.txt", 7, None, None),
        ("node-3/rank9.txt#4711", 9, None, "node-3"),
    ],
)
def test_names_of_dumps(label: str, rank: int | None, local: int | None, host: str | None) -> None:
    found = seats.seat(label)
    assert (found.rank, found.local, found.host) == (rank, local, host)


@pytest.mark.parametrize(
    ("label", "is_helper"), [("rank3/worker 1", True), ("rank3 pin memory", True), ("worker-3/rank0", False)]
)
def test_helpers_are_no_ranks(label: str, is_helper: bool) -> None:
    assert seats.seat(label).is_helper is is_helper
