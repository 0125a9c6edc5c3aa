"""What can happen to a job that calls for a decision, and what can be done about it? The words of the ladder.

Events go into `decide.ladder`, actions come out; both stand in the event log, with the policy that held, so a decision
can be taken again from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from evertrain.model.config import CodeConfig, HangConfig, LadderConfig, RestartConfig

Rung = Literal["inspect", "roll_back", "replay"]
"""Who is asked when the cheap answers have not helped: stop-time checks, an earlier version of the code, a replay."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """All that a decision depends on besides the job and the event."""

    ladder: LadderConfig = LadderConfig()
    restart: RestartConfig = RestartConfig()
    code: CodeConfig = CodeConfig()
    hang_policy: Literal["careful", "paper"] = HangConfig().policy
    sources: tuple[Rung, ...] = ()
    """Those that can give an answer; the others are passed over as not available."""


# -- events ------------------------------------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=True):
    time: float
    """By the run's clock."""


class NodeFault(Event, frozen=True, kw_only=True):
    """A machine is broken for certain: a GPU is gone, a disk is dead."""

    node: str
    signal: str
    evidence: str


class NetworkAlert(Event, frozen=True, kw_only=True):
    """A link of a node misbehaves; often it heals by itself."""

    node: str
    signal: str
    evidence: str


class HardwareReading(Event, frozen=True, kw_only=True):
    """Something about a node's hardware is odd. Alone it proves nothing; beside a hang or a crash it counts."""

    node: str
    signal: str
    evidence: str


class Oddity(Event, frozen=True, kw_only=True):
    """Something is out of the ordinary that accuses no machine.

    Code and data bring most of what training reports forth, and a full disk is nobody's hardware.
    """

    node: str
    signal: str
    evidence: str
    is_fatal: bool = False
    """What the attempt does from now on is worth nothing: it is ended."""


class SensorBlind(Event, frozen=True, kw_only=True):
    """A sensor of a node cannot see. That neither accuses nor acquits anybody."""

    node: str
    sensor: str
    evidence: str


FailureSource = Literal["exit", "hang", "lost", "metrics", "saves", "verification"]


class AttemptFailed(Event, frozen=True, kw_only=True):
    """An attempt has ended, or must end, and somebody has said why."""

    incident: int
    source: FailureSource
    cause: str
    category: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    step: int | None = None
    """At which it failed; of an exception of the script, the one that it was raised in."""
    signature: str = ""
    """Of an exception of the script: type and line. Empty: it is not the script that raised."""
    confidence: float = 1.0
    evidence: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    """Nodes with a process that does not end, SIGKILL notwithstanding; whoever is to blame, nothing can start there."""
    is_group: bool = False
    """`nodes` are a whole parallel group: nothing could narrow it down."""
    is_damage: bool = False
    """Copies of the state were damaged; the next attempt goes on from others."""


class SlowRank(Event, frozen=True, kw_only=True):
    """Training has become slower, and the others wait for these ranks. That proves nothing about their machine yet."""

    incident: int
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    """Theirs; `is_group`: those of their whole parallel group."""
    confidence: float = 1.0
    evidence: tuple[str, ...] = ()
    is_group: bool = False

    @property
    def node(self) -> str:
        return self.nodes[0]


class Proven(Event, frozen=True, kw_only=True):
    """Training has come so far beyond the step at which it failed that the restart counts as a success."""

    incident: int


class Answered(Event, frozen=True, kw_only=True):
    """A verdict source that was asked has answered, or its time is up."""

    incident: int
    rung: Rung
    outcome: Literal["suspects", "clean", "done", "not_available"]
    """`done`: the code was rolled back; `clean`: all checks passed, the replay found nobody."""
    nodes: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()


class NodeReady(Event, frozen=True, kw_only=True):
    """A standby has tested itself and waits."""

    node: str


class NobodyCame(Event, frozen=True, kw_only=True):
    """The wait for nodes that an incident needs is over."""

    incident: int


class NodeArrived(Event, frozen=True, kw_only=True):
    """A node that is not part of the job would like to be: it has just joined."""

    node: str


class NodeTested(Event, frozen=True, kw_only=True):
    """An evicted node was tested."""

    node: str
    passed: bool
    evidence: tuple[str, ...] = ()


class NodeAllowed(Event, frozen=True, kw_only=True):
    """The user lets an evicted node back."""

    node: str
    because: str


class DrainRequested(Event, frozen=True, kw_only=True):
    """The user wants a node out of the job; it is no fault."""

    node: str
    because: str


AnyEvent = (
    NodeFault
    | NetworkAlert
    | HardwareReading
    | Oddity
    | SensorBlind
    | AttemptFailed
    | SlowRank
    | Proven
    | Answered
    | NodeReady
    | NobodyCame
    | NodeArrived
    | NodeTested
    | NodeAllowed
    | DrainRequested
)


# -- actions -----------------------------------------------------------------------------------------------------------


class Action(msgspec.Struct, frozen=True, kw_only=True, tag_field="action", tag=True):
    because: str
    """One line for whoever reads it: who, what, and why this."""


class Tolerate(Action, frozen=True, kw_only=True):
    """Nothing is done, knowingly."""

    node: str


class Inspect(Action, frozen=True, kw_only=True):
    """Run the stop-time checks on these nodes; `Answered` follows."""

    nodes: tuple[str, ...]


class Restart(Action, frozen=True, kw_only=True):
    """All ranks again, where they are."""


class Evict(Action, frozen=True, kw_only=True):
    """Take nodes out of the job. Without evidence there is no eviction."""

    nodes: tuple[str, ...]
    replacements: dict[str, str] = {}
    """By evicted node, the standby that takes over its ranks; the job becomes smaller by each that is not here."""
    evidence: tuple[str, ...]
    lost: bool = False
    """They have left by themselves: no budget counts it."""
    planned: bool = False
    """The user asked for it."""
    spare: bool = False
    """They only waited: training goes on untouched, and no budget counts it."""


class WaitForNodes(Action, frozen=True, kw_only=True):
    """Ask the platform for nodes, and hold the start until they are there, or until then."""

    nodes: int
    until: float
    instead_of: tuple[str, ...] = ()
    """These are evicted when the others are there,"""
    evidence: tuple[str, ...] = ()
    """... because of this."""


class RollBack(Action, frozen=True, kw_only=True):
    """Undo the newest change of the code; `Answered` follows."""


class Replay(Action, frozen=True, kw_only=True):
    """Replay the failing steps on groups of nodes; `Answered` follows."""


class Stop(Action, frozen=True, kw_only=True):
    """The job ends; what is saved goes to disk first."""


class Hold(Action, frozen=True, kw_only=True):
    """Storage does not answer: the next start waits until then."""

    until: float


class AskHuman(Action, frozen=True, kw_only=True):
    """Somebody should look. Nothing waits for them."""


class Enlist(Action, frozen=True, kw_only=True):
    """The node becomes a standby."""

    node: str


class Grow(Action, frozen=True, kw_only=True):
    """Standbys become active nodes: the job had shrunk and may be larger."""

    nodes: tuple[str, ...]


AnyAction = (
    Tolerate | Inspect | Restart | Evict | WaitForNodes | RollBack | Replay | Stop | Hold | AskHuman | Enlist | Grow
)

ActionName = Literal[
    "none", "tolerate", "capture", "inspect", "restart", "evict", "roll_back", "hot_update", "replay", "stop", "hold",
    "human",
]  # fmt: skip
"""From the weakest to the strongest: what `incidents` shows of an incident is the strongest that was done."""

_NAMES: dict[type[Action], ActionName] = {
    Tolerate: "tolerate",
    Inspect: "inspect",
    Restart: "restart",
    Evict: "evict",
    RollBack: "roll_back",
    Replay: "replay",
    Stop: "stop",
    Hold: "hold",
    AskHuman: "human",
}
_ORDER: tuple[ActionName, ...] = ActionName.__args__  # type: ignore[attr-defined]


def strongest(actions: tuple[AnyAction, ...]) -> ActionName:
    """The name under which a decision is shown."""
    if len(actions) == 1:
        return _NAMES.get(type(actions[0]), "none")
    return stronger(_NAMES.get(type(action), "none") for action in actions)


def stronger(names: Iterable[ActionName]) -> ActionName:
    """The strongest of them."""
    return max(names, key=_ORDER.index, default="none")
