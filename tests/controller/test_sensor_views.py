"""Sensors of all nodes, summed up."""

from __future__ import annotations

from msgspec.structs import replace

from evertrain.controller import sensor_views, views
from evertrain.decide.picture import Picture
from evertrain.model.sensing import SensorState
from support.world import World


def gpu(state: str, **more: object) -> SensorState:
    fields = {"name": "gpu", "state": state, "period_s": 2.0, **more}
    return SensorState(**fields)  # type: ignore[arg-type]


def seen(world: World, **sensors: tuple[SensorState, ...]) -> Picture:
    picture = world.picture()
    nodes = dict(picture.nodes)
    for name, of_node in sensors.items():
        node = name.replace("_", "-")
        nodes[node] = replace(nodes[node], report=replace(nodes[node].report, sensors=of_node))
    return Picture(nodes)


def test_each_kind_is_one_line() -> None:
    world = World()
    world.turns()
    picture = seen(
        world,
        node_0=(gpu("ok", last="8 GPUs", looks=10, cpu_s=0.1),),
        node_1=(gpu("blind", because="the driver does not answer", since=1.0),),
    )
    (line,) = sensor_views.sensors(world.state, picture)
    assert (line["ok"], line["blind"], line["absent"], line["last"]) == (1, 1, 0, "8 GPUs")
    assert line["cpu_fraction"] == 0.005
    assert line["blind_at"] == [{"node": "node-1", "because": "the driver does not answer", "since": 1.0}]
    status = views.status(world.state, picture, job="job", now=world.now)
    assert status["sensors"] == [line]
    assert "node-1: gpu: the driver does not answer" in status["blind"]


def test_what_is_absent_says_why_and_what_is_silent_says_nothing() -> None:
    world = World()
    world.turns()
    picture = seen(world, node_0=(gpu("absent", because="no driver"),))
    (line,) = sensor_views.sensors(world.state, picture)
    assert (line["absent"], line["last"], line["cpu_fraction"]) == (1, "no driver", None)
    world.nodes["node-0"].connected = False
    world.turn()
    assert sensor_views.sensors(world.state, world.picture()) == []
