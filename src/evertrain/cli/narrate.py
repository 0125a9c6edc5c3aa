"""Which lines does the user read while the job runs? One per event: what failed, what was done, when training was back.

Pure: two looks at the job in, lines out.
"""

from __future__ import annotations

import shlex
import time
from itertools import zip_longest
from typing import Any

from evertrain.cli.poll import Seen

Json = dict[str, Any]


def lines(before: Seen | None, now: Seen) -> list[str]:
    """What is worth saying about the change between two looks."""
    was = before.status if before is not None else {}
    status = now.status
    said: list[str] = []
    said += _start_mode(was, status)
    said += _restart(was, status)
    said += _change(was, status)
    said += _nodes(was, status)
    told = [*_attempt(was, status), *_version(was, status), *_opened(before, now), *_closed(before, now)]
    said += [line for _, line in sorted(told, key=lambda one: one[0])]
    if status.get("message") and status["message"] != was.get("message") and status["state"] not in FINAL:
        said.append(status["message"])
    return said


FINAL = ("done", "failed", "stopped")
_AT_ONCE = ("tolerate", "human")
"""What is only told may be over with the telling."""
OUT = ("lost", "unusable", "evicted")
"""States of nodes on which nothing can run."""


# what happened between two looks is told in the order in which it happened: an attempt, then what befell it, and an
# incident is over when the next one begins, at the latest
_Told = tuple[tuple[int, int, int], str]
"""A line, and its place: the attempt, the incident, whether the incident opens."""


def _attempt(was: Json, status: Json) -> list[_Told]:
    if status["attempt"] == was.get("attempt", 0):
        return []
    resume = status.get("resume")
    where = f", resumed from step {resume}" if resume is not None else ""
    return [((status["attempt"], 0, 0), f"attempt {status['attempt']} runs{where}")]


def _change(was: Json, status: Json) -> list[str]:
    """Other code that somebody has asked for, or that is not to come any more."""
    before, now = was.get("change"), status.get("change")
    if now is not None and (before is None or before["change"] != now["change"]):
        return [change(now)]
    is_gone = before is not None and now is None and status.get("version") == was.get("version")
    return [f"{_named(before)} does not come; see `evertrain versions`"] if before is not None and is_gone else []


def _version(was: Json, status: Json) -> list[_Told]:
    """What ranks run from now on. What was captured when the job began is no news."""
    version, old = status.get("version"), was.get("version")
    if version is not None and old is None and (left := status.get("left_version")) is not None:
        line = f"your own files run, version {version}; version {left} ran last: `evertrain rollback` can go on with it"
        return [((status["attempt"], 0, 1), line)]
    if version is None or old is None or version == old:
        return []
    asked = was.get("change") or status.get("last_change")
    why = f" ({_asked_for(asked)})" if asked is not None and asked["version"] == version else ""
    return [((status["attempt"], 0, 1), f"version {version} runs{why}")]


def change(asked: Json) -> str:
    """`update to version 2 by ann: fix loss; it comes with the next restart, at the latest 2026-12-01 09:13`."""
    return f"{_named(asked)}{_by(asked)}; it comes {when(asked)}"


def _named(asked: Json) -> str:
    act = "roll-back" if asked["act"] == "rollback" else asked["act"]
    return f"{act} to version {asked['version']}"


def _asked_for(asked: Json) -> str:
    """`update by ann: fix loss`."""
    act = "roll-back" if asked["act"] == "rollback" else asked["act"]
    return f"{act}{_by(asked)}"


def _by(asked: Json) -> str:
    if asked["incident"] is not None:
        # what it says itself begins with the number
        return f" after {asked['reason'] or 'incident ' + str(asked['incident'])}"
    author = f" by {asked['author']}" if asked["author"] else ""
    return f"{author}: {asked['reason']}" if asked["reason"] else author


def when(asked: Json) -> str:
    if asked["urgent"]:
        return "at once"
    return f"with the next restart, at the latest {day(asked['latest'])}"


def day(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def _restart(was: Json, status: Json) -> list[str]:
    """A restart that somebody asked for, and whether repeated steps came out the same."""
    now, before = status.get("restart"), was.get("restart")
    if now is None:
        return []
    known = before if before is not None and before["restart"] == now["restart"] else None
    said = [f"restart asked for: {wish(now)}"] if known is None else []
    if now["verified"] is not None and (known is None or known["verified"] is None):
        said.append(verified(now["verified"]))
    return said


def wish(restart: Json) -> str:
    """`from step 38; arguments: --lr 3; environment: SEED`."""
    parts = ["from the newest step"]
    if restart["from_step"] is not None:
        parts = [f"from step {restart['from_step']}"]
    elif restart["verify"] is not None:
        many = restart["verify"]
        parts = ["to repeat the last step" if many == 1 else f"to repeat the last {many} steps"]
    if restart["args"] is not None:
        parts.append(f"arguments: {shlex.join(restart['args'])}")
    if restart["env"]:
        parts.append(f"environment: {', '.join(restart['env'])}")
    return "; ".join(parts)


def verified(seen: Json) -> str:
    """What came out when steps were done again."""
    if seen["problem"]:
        return f"nothing could be compared: {seen['problem']}"
    if (other := seen["difference"]) is not None:
        return (
            f"step {other['step']} did not come out the same: rank {other['rank']} on {other['node']} "
            f"reported the loss {other['before']}, and then {other['again']}"
        )
    first, last = seen["first_step"], seen["last_step"]
    steps = f"step {last}" if first == last else f"steps {first} to {last}"
    who = "rank are" if seen["ranks"] == 1 else "ranks are"
    return f"{steps} repeated: the losses of {seen['ranks']} {who} the same bits"


def _start_mode(was: Json, status: Json) -> list[str]:
    start, before = status.get("start") or {}, was.get("start") or {}
    if not start or start == before or start.get("mode") == start.get("wanted") or not start.get("reason"):
        return []
    return [f"ranks are started by {start['mode']} instead of {start['wanted']}: {start['reason']}"]


def _opened(before: Seen | None, now: Seen) -> list[_Told]:
    """New incidents, those whose cause a record that came late has corrected, and what was decided."""
    known = {incident["id"]: incident for incident in before.incidents} if before is not None else {}
    told = []
    for incident in now.incidents:
        place, earlier = (incident["attempt"], incident["id"], 1), known.get(incident["id"], {})
        if earlier.get("cause") != incident["cause"]:
            told.append((place, opened(incident)))
        is_news = any(earlier.get(key) != incident.get(key) for key in ("action", "because"))
        if is_news and _is_worth_telling(incident):
            told.append((place, decided(incident)))
    return told


def _is_worth_telling(incident: Json) -> bool:
    """That a plain restart follows, the next attempt says, but not what can be done against the next one."""
    advises = "evertrain.phase(" in (incident.get("because") or "")
    return incident["action"] not in ("none", "restart") or advises


def _closed(before: Seen | None, now: Seen) -> list[_Told]:
    known = {incident["id"]: incident for incident in before.incidents} if before is not None else {}
    over = {number for number, incident in known.items() if not incident["open"]}
    told = []
    for incident, following in zip_longest(now.incidents, now.incidents[1:]):
        is_told = incident["action"] in _AT_ONCE and incident["id"] not in known
        if not incident["open"] and incident["id"] not in over and not is_told:
            attempt = following["attempt"] if following is not None else now.status["attempt"]
            told.append(((max(attempt, incident["attempt"]), incident["id"] + 1, 0), closed(incident)))
    return told


def opened(incident: Json) -> str:
    step = f" in step {incident['step']}" if incident["step"] is not None else ""
    return f"incident {incident['id']}: {where(incident)}: {incident['cause']}{step}"


def decided(incident: Json) -> str:
    """What is done about it, and why."""
    because = f": {incident['because']}" if incident.get("because") else ""
    return f"incident {incident['id']}: {action(incident)}{because}"


def action(incident: Json) -> str:
    """`evict`, `roll back from version 2 to 1`."""
    name = str(incident["action"]).replace("_", " ")
    old, new = incident.get("from_version"), incident.get("to_version")
    if incident["action"] not in ("roll_back", "hot_update") or new is None:
        return name
    return f"{name} to version {new}" if old is None else f"{name} from version {old} to {new}"


def closed(incident: Json) -> str:
    if incident["seconds"]["recompute"] is None:
        return f"incident {incident['id']} is over"
    lost_s = sum(value for value in incident["seconds"].values() if value is not None)
    step = incident["first_new_step"]
    until = "all ranks trained again" if step is None else f"step {step}, the first new one"
    return f"incident {incident['id']} is over: {lost_s:.2f} s until {until}"


def where(incident: Json) -> str:
    """`rank 2 on node-0`, `ranks 0, 1 on node-0, node-1`."""
    ranks, nodes = incident["ranks"], incident["nodes"]
    named = f"rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)}" if ranks else ""
    on = _listed(nodes)
    return " on ".join(part for part in (named, on) if part) or "the job"


def _listed(names: list[Any]) -> str:
    shown = ", ".join(str(name) for name in names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


def _nodes(was: Json, status: Json) -> list[str]:
    before = {node["id"]: node["state"] for node in was.get("nodes", ())}
    said = []
    for node in status["nodes"]:
        state, old = node["state"], before.get(node["id"])
        if state != old and (state in OUT or old in OUT):
            said.append(f"{node['id']} is {state}{'' if state in OUT else ' again'}")
    return said
