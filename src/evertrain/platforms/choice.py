"""Which platform does a job have?"""

from __future__ import annotations

from evertrain.model.spec import ControllerSpec
from evertrain.platforms.base import Platform
from evertrain.platforms.command import Command
from evertrain.platforms.local import ByHand, Local


def of(spec: ControllerSpec) -> Platform:
    endpoint = spec.url.partition("://")[2]
    # nodes that are named from the start are those of this machine
    by_hand = ByHand(endpoint) if spec.seats is not None else None
    if spec.config.platform.request_command:
        return Command(spec.config.platform, spec.job, endpoint, by_hand)
    return by_hand or Local()
