"""What does the user want of nodes, and can it be done now?

    allow    an evicted node may come back, whatever it was evicted for
    drain    a node leaves, though nothing is wrong with it: its ranks go to a standby, or the job goes on with fewer

A wish is a record in the log (`AllowAsked`, `DrainAsked`); the ladder gets it as an event and decides.
"""

from __future__ import annotations

from evertrain.decide import eviction, planned
from evertrain.decide.picture import Picture
from evertrain.decide.state import JobState
from evertrain.model import records as r


def allow_refusal(state: JobState, node: str) -> str:
    """Why a node cannot be let back; empty: it can."""
    if state.ended is not None:
        return "the job has just ended; ask again in a moment"
    if node in state.memory.blocked:
        return ""
    if node in state.roster:
        return f"{node} is part of the job and nothing keeps it out"
    if node in state.known_nodes():
        return f"nothing keeps {node} out; it is {state.nodes[node].state if node in state.nodes else 'joining'}"
    blocked = f"; evicted are {', '.join(state.memory.blocked)}" if state.memory.blocked else ""
    return f"{node} was not evicted from this job{blocked}"


def refusal(state: JobState, picture: Picture, node: str) -> str:
    """Why a node cannot be taken out now; empty: it can."""
    run, attempt = state.run, state.active
    if run is None or state.ended is not None or state.closing:
        return "the job is ending"
    if node not in state.roster:
        return _not_part(state, node)
    if run.observe_only:
        return "with --observe-only nothing is done"
    if other := next((one.node for one in state.asked if isinstance(one, r.DrainAsked) and one.node != node), None):
        return f"{other} is being drained; ask again when training is back"
    if stuck := [
        name for name in state.active_nodes() if name in state.nodes and state.nodes[name].state == "unusable"
    ]:
        return f"{stuck[0]} is unusable ({state.nodes[stuck[0]].because}): the ranks cannot all be ended"
    if planned.pending(state) is not None or planned.verifying(state) is not None:
        return "the job is being restarted; ask again when training is back"
    if state.incident is not None or (attempt is not None and attempt.ending is not None):
        return "the job is recovering; ask again when training is back"
    if node in state.standbys():
        return ""
    if attempt is None:
        return "its ranks have not been started yet"
    if any(picture.connected(one) for one in state.usable_standbys()):
        return ""
    why = eviction.why_not_smaller(state, 1)
    return f"no standby is ready to take over the ranks of {node}, and {why}" if why else ""


def _not_part(state: JobState, node: str) -> str:
    if blocked := state.memory.blocked.get(node):
        return f"{node} is out already: {blocked.because}"
    return f"{node} is not part of this job; its nodes are {', '.join(state.roster[:8]) or 'not settled yet'}"
