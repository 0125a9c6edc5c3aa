"""Who holds NCCL's operations up, from the rings of a dead job to the words of `evertrain trace rca`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from evertrain.cli import main
from evertrain.controller import nccl_cause
from evertrain.model.collectives import RootCause
from evertrain.model.tracing import HeadCause
from support import nccl

OUTSIDE = RootCause(symptom="stuck", component="outside", ranks=(2,), nodes=("b",))
NOBODY = RootCause(symptom="stuck", component="none", blind=("a has not answered",))
INSIDE = RootCause(symptom="stuck", component="compute", ranks=(1,), nodes=("a",))


def test_a_rank_its_node_and_its_path_are_told() -> None:
    found = HeadCause(component="gpu", ranks=(1,), confidence=0.9, first_s=5.0, evidence=("why",), path=(3, 2, 1))
    cause = nccl_cause.as_root(found, {1: "a", 2: "a", 3: "b"}, is_stuck=True)
    assert (cause.component, cause.ranks, cause.nodes, cause.time) == ("compute", (1,), ("a",), 5.0)
    assert [(step.rank, step.waits_for) for step in cause.path] == [(3, (2,)), (2, (1,))]


def test_some_channels_only_are_a_path() -> None:
    found = HeadCause(component="network", ranks=(0, 1), link=(0, 1), channels=(2, 3), evidence=("why",))
    cause = nccl_cause.as_root(found, {}, is_stuck=False)
    assert (cause.symptom, cause.link, cause.nodes) == ("slow", (0, 1), ())
    assert cause.evidence[-1] == "only channels 2, 3: a path, not the rank"


def test_who_never_came_explains_what_is_seen_inside() -> None:
    assert nccl_cause.stronger(OUTSIDE, INSIDE) is OUTSIDE
    assert nccl_cause.stronger(NOBODY, None) is NOBODY
    inside = nccl_cause.stronger(NOBODY, INSIDE)
    assert (inside.ranks, inside.blind) == ((1,), ("a has not answered",))
    network = RootCause(symptom="slow", component="network", ranks=(0, 1), link=(0, 1))
    assert nccl_cause.stronger(network, INSIDE).ranks == (1,)
    assert nccl_cause.stronger(network, RootCause(symptom="slow", component="none")) is network


@pytest.mark.skipif(bool(nccl.MISSING), reason=nccl.MISSING)
def test_the_rings_of_a_dead_job_name_the_rank_whose_gpu_is_slow(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    built = nccl.shared(tmp_path_factory)
    found: dict[str, object] = {}
    for pace in (1, 3, 6):  # where other work keeps the cores busy, a small fault is drowned, and nobody may be named
        folder = tmp_path / str(pace)
        folder.mkdir()
        seconds = 1.5 * (1 + pace)
        subprocess.run(
            [built.driver, built.library, "6", "world"], check=True, capture_output=True, timeout=60,
            env={"WORLD_FAULT": "gpu_power", "WORLD_TRANSPORT": "ib", "WORLD_PREFIX": str(folder / "w"),
                 "WORLD_SECONDS": str(seconds), "WORLD_RANKS": "4", "WORLD_CULPRIT": "1", "WORLD_PACE": str(pace)},
        )  # fmt: skip
        main.main(["trace", "rca", str(folder), "--since", str(0.6 * seconds), "--json"])
        found = json.loads(capsys.readouterr().out)
        if found["component"] != "none":
            break
    assert (found["component"], found["ranks"]) == ("compute", [1]), found
