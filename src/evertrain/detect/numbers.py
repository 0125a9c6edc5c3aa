"""What do facts and numbers say: losses, step times, the history of earlier attempts?

Facts come from anywhere and under any name, so names are read loosely and a rule needs a shape that speaks for itself:
a series that jumps and comes back, one host that is slower than all others, one host that fails again.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from msgspec import Struct

from evertrain.detect.catalogue import Catalogue
from evertrain.detect.prefixes import hosts_in, looks_like_host
from evertrain.model.findings import Action, Category, Culprit, Finding
from evertrain.model.signals import Line

_HOST_KEYS = ("host", "node", "hostname", "node_name", "machine")
_ERROR_KEYS = ("error", "reason", "failure", "message", "exception", "symptom", "cause", "result", "event")
_LOSS = re.compile(r"loss|perplexity|\bppl\b", re.IGNORECASE)
_NORM = re.compile(r"grad|norm", re.IGNORECASE)
_TIME = re.compile(
    r"step_?(?:time|ms|s\b)|(?:^|_)time|iter\w*_?(?:time|s\b|ms\b)|elapsed|duration|bench\w*|compute_?(?:time|ms|s)|latency|seconds?_per"
    r"|forward|backward|kernel_?time|_m?s(?:_|$)",
    re.IGNORECASE,
)
_RATE = re.compile(
    r"tflops|throughput|samples|tokens_?per|bandwidth|\bbw\b|gbps|gb_s|mfu|clock|mhz|score", re.IGNORECASE
)
_ONE_SLOW = re.compile(
    r"(?:\b(?:one|a single|1) (?:node|gpu|host|rank|card|machine)|(?P<host>[a-zA-Z][\w.-]*\d[\w-]*))\b"
    r"(?:[ /]gpu ?\d+)?[^\d]{0,30}?(?P<own>\d+(?:\.\d+)?)"
    r".{0,30}?(?:\bothers?\b|\brest\b|median|everyone else|all else|average|typical)"
    r"[^\d]{0,30}?(?P<others>\d+(?:\.\d+)?)",
    re.IGNORECASE,
)
_RECOVERS = re.compile(r"recover(?:s|ed)\b|back to (?:normal|the trend)|returned to", re.IGNORECASE)
_NOT_RECOVERS = re.compile(r"(?:not|never|n't|no) recover", re.IGNORECASE)
_DIVERGES = re.compile(r"diverg|explod|rising|rises|blow|goes up|spike|nan\b|\binf\b|not finite|plateau", re.IGNORECASE)
_SAME_HOST = re.compile(
    r"(?:same|this|that|one) (?:host|node|gpu|machine|card)\b"
    r".{0,30}(?:again|each time|every (?:time|attempt)|always|twice|repeat)"
    r"|(?:always|only|every time|each time|again|repeatedly|twice) (?:on|at|with) (?:the )?(?:same|this|that|one) "
    r"(?:host|node|gpu|machine|card)"
    r"|other (?:hosts?|nodes?|gpus?|machines?) (?:are |is |run |work )?(?:fine|ok|clean|healthy|work)",
    re.IGNORECASE,
)
_MOVES = re.compile(
    r"(?:moves?|wanders|jumps) (?:between|across|from) "
    r"|(?:different|another|random|any|every|all|other) (?:hosts?|nodes?|gpus?|machines?)\b"
    r".{0,25}(?:each|every|time|too|also|same|again|affected)"
    r"|not (?:tied|bound) to (?:a|one|any) (?:host|node)|reproduc\w+ (?:on|with) (?:any|every|all|other)",
    re.IGNORECASE,
)
_PORT = re.compile(r"port|nic|interface|iface|ib\b|ib_|mlx|link|traffic|role|use", re.IGNORECASE)
_UNUSED = re.compile(
    r"\bunused\b|_unused: true|not (?:in )?used?\b|management|\bmgmt\b|out.of.band|no (?:training |job |rdma )?traffic"
    r"|carries (?:no|nothing)|(?:used_by|carries|in_use|used|training)\w*: (?:false|none|no\b)|spare port",
    re.IGNORECASE,
)
_MEMORY = re.compile(r"mem|rss|reserved|allocated|vram", re.IGNORECASE)
_HOST_MEMORY = re.compile(r"rss|host|cpu|\bram|_ram|cgroup", re.IGNORECASE)
_COUNTED = re.compile(r"xid|ecc|gpu_?(?:error|fault|fail)", re.IGNORECASE)
_GPU_CATEGORIES = ("gpu_hardware", "gpu_memory_ecc", "driver_gsp")


class Past(Struct, frozen=True):
    """An earlier attempt that failed, and on which host."""

    host: str
    error: str
    path: str


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """`(path, value)` of everything that is no folder of something else; short lists of plain values stay whole."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from flatten(below, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and any(isinstance(one, (Mapping, list, tuple)) for one in value):
        for index, below in enumerate(value):
            yield from flatten(below, f"{path}.{index}")
    else:
        yield path, value


def judge(metrics: Mapping[str, Any], catalogue: Catalogue, *, host: str | None) -> tuple[Finding, ...]:
    facts = list(flatten(metrics))
    return (
        *_known(facts, catalogue, host),
        *_series(metrics, facts),
        *_outliers(metrics),
        *_history(metrics, catalogue),
    )


def moves_between_hosts(metrics: Mapping[str, Any]) -> bool:
    """The facts say that the failure is tied to no host."""
    told = any(_MOVES.search(f"{path}: {value}") for path, value in flatten(metrics))
    pasts = list(_pasts(metrics))
    return told or (len(pasts) >= 2 and len({past.host for past in pasts}) == len(pasts))


def port_is_unused(metrics: Mapping[str, Any]) -> bool:
    """The facts say that a network port carries no traffic of the job."""
    return any(_PORT.search(path) and _UNUSED.search(f"{path}: {value}") for path, value in flatten(metrics))


def _known(facts: Sequence[tuple[str, Any]], catalogue: Catalogue, host: str | None) -> Iterator[Finding]:
    for path, value in facts:
        text = f"{path}: {str(value)[:2000]}"
        named = [part for part in path.split(".") if looks_like_host(part)] or hosts_in(str(value))
        line = Line(text=text, raw=text, order=0, host=named[0] if len(named) == 1 else host)
        yield from catalogue.look_at_metric(line)
        if _SAME_HOST.search(text):
            yield _finding("fact-same-host", "gpu_hardware", "evict", Culprit("host", line.host or ""), 0.7, text,
                           "it fails on this host again, and not on others", host=line.host)  # fmt: skip
        if _LOSS.search(path) and isinstance(value, str):
            if _RECOVERS.search(value) and not _NOT_RECOVERS.search(value):
                yield _finding(
                    "fact-loss-recovers", "none", "none", Culprit("none"), 0.75, text, "it recovered by itself"
                )
            elif _DIVERGES.search(value):
                yield _finding("fact-loss-diverges", "numerics", "human", Culprit("config", "recipe"), 0.5, text,
                               "the loss runs away")  # fmt: skip


def _series(metrics: Mapping[str, Any], facts: Sequence[tuple[str, Any]]) -> Iterator[Finding]:
    later = {path.rpartition(".")[2]: _numbers(value) for path, value in facts if "." in path}
    for path, value in facts:
        name = path.rpartition(".")[2]
        if "." not in path and (slowed := _slowed(name, path, _numbers(value))):
            yield slowed
            continue
        if "." not in path and (grown := _grows(name, path, _numbers(value))):
            yield grown
            continue
        is_loss = bool(_LOSS.search(name)) and "scale" not in name
        if not (is_loss or _NORM.search(name)) or "." in path:
            continue
        text = f"{path}: {str(value)[:300]}"
        if _is_broken(value):
            yield _finding("series-not-finite", "numerics", "human", Culprit("config", "recipe"), 0.7, text,
                           "the numbers are not finite")  # fmt: skip
            continue
        numbers = _numbers(value)
        if not is_loss or len(numbers) < 3:
            continue
        numbers += later.get(name, [])
        base, peak, last = median(numbers[: max(1, len(numbers) // 3)]), max(numbers), numbers[-1]
        if peak > 1.3 * base and last <= 1.1 * base:
            yield _finding("series-recovers", "none", "none", Culprit("none"), 0.8, text,
                           f"one spike to {peak:.3g}, back at {last:.3g}")  # fmt: skip
        elif last > 1.25 * base:
            yield _finding("series-diverges", "numerics", "human", Culprit("config", "recipe"), 0.7, text,
                           f"from {base:.3g} to {last:.3g} and no way back")  # fmt: skip


def _grows(name: str, path: str, numbers: Sequence[float]) -> Finding | None:
    """Memory that only ever grows is used up in the end."""
    if not _MEMORY.search(name) or len(numbers) < 4 or numbers[0] <= 0 or numbers[-1] < 1.25 * numbers[0]:
        return None
    if any(later < earlier for earlier, later in pairwise(numbers)):
        return None
    text, note = f"{path}: {list(numbers)[:40]}", "memory grows and never shrinks"
    is_host = bool(_HOST_MEMORY.search(name))
    category: Category = "oom_host" if is_host else "oom_gpu"
    return _finding("series-memory", category, "user_code", Culprit("config", "memory that grows"), 0.8, text, note)


def _slowed(name: str, path: str, numbers: Sequence[float]) -> Finding | None:
    """All together became slower, and stay so: somebody holds them up, and nothing says who."""
    is_rate = bool(_RATE.search(name))
    if len(numbers) < 4 or not (is_rate or _TIME.search(name)) or _LOSS.search(name) or min(numbers) <= 0:
        return None
    third = max(1, len(numbers) // 3)
    before, after = median(numbers[:third]), median(numbers[-third:])
    change = before / after - 1 if is_rate else after / before - 1
    worst = min(numbers) if is_rate else max(numbers)
    text = f"{path}: {list(numbers)[:40]}"
    if change > 0.04:
        return _finding(
            "series-slower", "straggler", "human", Culprit(), 0.55, text, f"{change:.0%} slower than before"
        )
    if abs(worst / before - 1) > 0.1:
        return _finding("series-dip", "none", "none", Culprit("none"), 0.55, text, "slower for a while, and back")
    return None


def _outliers(metrics: Mapping[str, Any], path: str = "") -> Iterator[Finding]:
    """One host or rank that is slower than all others."""
    for path, value in flatten(metrics):
        if (
            isinstance(value, str)
            and (found := _ONE_SLOW.search(value))
            and (_TIME.search(path) or _RATE.search(f"{path} {value}"))
        ):
            own, others = float(found["own"]), float(found["others"])
            if others and abs(own - others) / others > 0.015:
                host = found["host"] if found["host"] and looks_like_host(found["host"]) else ""
                yield _slow(host, f"{path}: {value}", f"{own:g} against {others:g} of the others")
    for path, table in _tables(metrics):
        if _COUNTED.search(path) and len(table) > 1:
            host = max(table, key=lambda name: table[name])
            if table[host] >= 3 and sum(table.values()) - table[host] <= table[host] / 4 and looks_like_host(host):
                told, note = f"{path}: {table}", "errors of GPUs come from this host again and again"
                culprit = Culprit("host", host)
                yield _finding("one-repeats", "gpu_hardware", "evict", culprit, 0.76, told, note, host=host)
            continue
        if not (_TIME.search(path) or _RATE.search(path)) or len(table) < 3:
            continue
        middle = median(table.values())
        is_rate = bool(_RATE.search(path)) and not _TIME.search(path)
        off = {
            name: (middle - number if is_rate else number - middle) / middle for name, number in table.items() if middle
        }
        worst = sorted(off, key=lambda name: off[name], reverse=True)
        limit = max(1, len(table) // 8)
        usual = max((abs(off[name]) for name in worst[limit:]), default=0.0)
        slow = [name for name in worst[:limit] if off[name] > max(0.02, 4 * usual + 0.005)]
        hosts = {name.partition("/")[0] for name in slow}
        if len(hosts) == 1:
            share = off[slow[0]]
            yield _slow(
                hosts.pop(),
                f"{path}: {slow[0]} {table[slow[0]]:g}, median {middle:g}",
                f"{share:.1%} slower than the others",
            )


def _slow(name: str, text: str, note: str) -> Finding:
    rank = re.fullmatch(r"(?:rank[-_ ]?)?(\d+)", name)
    culprit = Culprit("rank", int(rank[1])) if rank else Culprit("host", name)
    return _finding("one-slow", "straggler", "evict", culprit, 0.82, text, note, host=None if rank else name or None)


def _tables(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, float]]]:
    if isinstance(value, Mapping):
        numbers = {
            str(key): float(number)
            for key, number in value.items()
            if isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)
            and (looks_like_host(str(key).partition("/")[0]) or re.fullmatch(r"(?:rank[-_ ]?)?\d+", str(key)))
        }  # fmt: skip
        if len(numbers) == len(value):
            yield path, numbers
        for key, below in value.items():
            yield from _tables(below, f"{path}.{key}" if path else str(key))


def _history(metrics: Mapping[str, Any], catalogue: Catalogue) -> Iterator[Finding]:
    pasts = list(_pasts(metrics))
    counted = Counter(past.host for past in pasts)
    for past in pasts:
        known = [
            finding
            for finding in catalogue.look_at(Line(text=past.error, raw=past.error, order=0))
            if finding.action == "evict"
        ]
        again = counted[past.host] >= 2 and len(counted) < len(pasts)
        if known or again:
            best = max(known, key=lambda finding: finding.confidence) if known else None
            category: Category = best.category if best else "gpu_hardware"
            if category in _GPU_CATEGORIES:
                category = "gpu_hardware"
            yield _finding("failed-before", category, "evict", Culprit("host", past.host), 0.86 if best else 0.72,
                           f"{past.path}: {past.host}: {past.error}",
                           "this host failed in an earlier attempt, and was used again", host=past.host)  # fmt: skip


def _pasts(value: Any, path: str = "") -> Iterator[Past]:
    if isinstance(value, Mapping):
        host = next((str(value[key]) for key in _HOST_KEYS if isinstance(value.get(key), str)), None)
        error = next((str(value[key]) for key in _ERROR_KEYS if isinstance(value.get(key), str)), None)
        if host and error:
            yield Past(host, error, path)
            return
        for key, below in value.items():
            yield from _pasts(below, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for index, below in enumerate(value):
            yield from _pasts(below, f"{path}.{index}")


def _numbers(value: Any) -> list[float]:
    if isinstance(value, (list, tuple)):
        return [float(one) for one in value if isinstance(one, (int, float)) and not isinstance(one, bool)]
    return []


def _is_broken(value: Any) -> bool:
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(
        (isinstance(one, float) and not math.isfinite(one))
        or (isinstance(one, str) and one.strip().lower() in ("nan", "inf", "-inf"))
        for one in values
    )


def _finding(
    rule: str, category: Category, action: Action, culprit: Culprit, confidence: float, text: str, note: str,
    *, host: str | None = None,
) -> Finding:  # fmt: skip
    return Finding(
        rule=rule, group="numbers", category=category, action=action, culprit=culprit, confidence=confidence,
        evidence=(text,), host=host, note=note,
    )  # fmt: skip
