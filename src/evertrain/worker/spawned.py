"""What does a spawned process do? Nothing ahead: it waits to become a rank, and the script imports what it needs."""

from __future__ import annotations

from evertrain.worker import disguise, hooks, launch, script, version
from evertrain.worker.launch import Given


def main(given: Given, startup: frozenset[str]) -> None:
    disguise.take_stdin(given["stdin"])
    disguise.die_with_parent(given["keeper"])
    given = version.enter(given)
    if given["command"]["kind"] != "program":
        script.enter(given["command"])
        hooks.install_on_import()
    launch.run(launch.wait(given["channel"], given["keeper"]), given, startup)
