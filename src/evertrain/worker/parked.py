"""What does a parked process do? All imports, ahead of time, and then it waits to become a rank."""

from __future__ import annotations

from evertrain.worker import disguise, environment, launch, preload, talk, version
from evertrain.worker.launch import Given


def main(given: Given, startup: frozenset[str]) -> None:
    disguise.take_stdin(given["stdin"])
    disguise.die_with_parent(given["keeper"])
    given = version.enter(given)
    try:
        environment.check(given["command"])
        preload.load(given["command"], given["preload"], startup)
    except preload.Unfit as unfit:
        talk.refuse(given["channel"], str(unfit), unfit.instead)
    launch.run(launch.wait(given["channel"], given["keeper"]), given, startup)
