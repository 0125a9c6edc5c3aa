"""Is the rank named that has the fault? A small world (tests/trace/nccl/world.c) with the paper's seven faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from evertrain.locate import nccl_heads
from evertrain.model.tracing import HeadCause
from evertrain.trace import pictures
from evertrain.trace.reading import Reader
from support import nccl

pytestmark = pytest.mark.skipif(bool(nccl.MISSING), reason=nccl.MISSING)

RANKS, CULPRIT, SECONDS = 4, 1, 3.0
OTHER_NODE = (CULPRIT + RANKS // 2) % RANKS

FAULTS = {
    "nic_down": "network", "nic_slow": "network", "pcie": "pcie", "gpu_power": "gpu", "gpu_busy": "gpu",
    "traffic": "network", "proxy_delay": "proxy", "late": "host",
}  # fmt: skip
"""The seven, and a rank that launches its kernels late; with what the traces say of each."""


PACES = (1, 3, 6)
"""Where other work keeps the cores busy, each of these ranks waits for a core now and then, and that drowns a small
fault. Then nobody may be named; with a larger one somebody must be."""


def look(built: nccl.Built, folder: Path, fault: str, transport: str, pace: int) -> HeadCause:
    seconds = SECONDS * (1 + pace) / 2
    nccl.play_world(built, folder, fault, culprit=CULPRIT, ranks=RANKS, transport=transport, pace=pace, seconds=seconds)
    ranks = []
    for file in nccl.files(folder):
        with Reader(file) as reader:
            ranks.append(pictures.RankRecords(reader.header().rank, reader.since(0)))
    assert len(ranks) == RANKS
    shown = list(pictures.of_nccl(ranks, otherwise="socket" if transport == "socket" else "ib"))
    # what a trigger would ask for: the last seconds, in which the fault is
    return nccl_heads.judge([one for one in shown if one.t_s > shown[-1].t_s - 0.6 * seconds])


@pytest.mark.matrix
@pytest.mark.parametrize("transport", ["ib", "socket"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_culprit_is_named(built: nccl.Built, tmp_path: Path, fault: str, transport: str) -> None:
    for pace in PACES:
        folder = tmp_path / str(pace)
        folder.mkdir()
        cause = look(built, folder, fault, transport, pace)
        if cause.component != "none":
            break
    said = "\n".join((str(cause), *cause.evidence))
    assert cause.component == FAULTS[fault], said
    if fault == "traffic":
        assert set(cause.ranks) & {CULPRIT, OTHER_NODE}, said
    else:
        assert CULPRIT in cause.ranks and len(cause.ranks) <= (2 if cause.component == "network" else 1), said


@pytest.mark.matrix
@pytest.mark.parametrize("transport", ["ib", "socket"])
def test_where_nothing_is_wrong_nobody_is_named(built: nccl.Built, tmp_path: Path, transport: str) -> None:
    cause = look(built, tmp_path, "none", transport, 1)
    assert cause.component == "none", "\n".join((str(cause), *cause.evidence))
