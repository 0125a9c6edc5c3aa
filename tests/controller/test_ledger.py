"""Every second is productive or lost, and the lost ones are told apart."""

from __future__ import annotations

import pytest

from evertrain.controller import ledger
from support.world import World


def test_a_run_without_faults_loses_only_its_start() -> None:
    world = World()
    world.turns(4)
    begun = world.state.attempts[0].resumed
    world.turns(4)
    begun = world.state.attempts[0].resumed
    assert begun is not None
    end = 1000.0 + 10 * (begun.resumed_time - 1000.0)
    assert ledger.ettr(world.state, end) == pytest.approx(0.9, abs=1e-3)


def test_before_the_first_step_all_is_lost() -> None:
    world = World()
    world.now += 5
    assert ledger.ettr(world.state, world.now) == 0.0


def test_an_incident_is_lost_from_the_last_progress_to_the_first_new_step() -> None:
    world = World()
    world.turns()
    world.train(10)
    world.turn()
    last_progress = world.now - 0.05
    world.now += 2.0
    world.fail(1)
    world.turns()
    world.train()
    passed = world.now
    world.turns()
    (_, *lost) = ledger.lost(world.state, world.now)
    assert len(lost) == 1
    assert lost[0] == pytest.approx((last_progress, passed), abs=0.11)
    phases = ledger.seconds(world.state.incidents[1])
    assert phases.detect is not None and phases.failover is not None
    assert phases.recompute is not None and phases.recompute > 0


def test_the_hour_forgets_what_the_whole_remembers() -> None:
    world = World()
    world.now += 60.0
    world.turns()
    later = world.now + 7200.0
    whole, hour = ledger.ettr(world.state, later), ledger.ettr(world.state, later, window_s=3600.0)
    assert hour == 1.0
    assert whole is not None and whole < 1.0
