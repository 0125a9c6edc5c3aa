"""Why did this job fail, hang or go wrong? From all signals of an incident to one verdict.

Each kind of signal has a reader that knows nothing of the others; this is where they meet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from evertrain.detect import launcher, numbers
from evertrain.detect.catalogue import Catalogue
from evertrain.detect.sieve import Sieve
from evertrain.locate import flight, ras, verdict, waits
from evertrain.model.findings import Culprit, Finding, Verdict
from evertrain.model.signals import Signals

_LINK = re.compile(r"(?P<host>[A-Za-z][\w-]*)/gpu\d+/link(?P<link>\d+)")
_LINK_OF_LINE = re.compile(r"\bLink +(\d+)", re.IGNORECASE)
_NO_PROGRESS = re.compile(r"no progress|hung\b|hang|stuck|stall|frozen|not moving|did not fire", re.IGNORECASE)


def explain(signals: Signals, catalogue: Catalogue) -> Verdict:
    """The verdict on signals that are all in memory."""
    sieve = Sieve(catalogue)
    sieve.feed_lines(signals.logs, host=signals.collected_from.get("logs"))
    sieve.feed_lines(signals.dmesg, host=signals.collected_from.get("dmesg"))
    return judge(sieve, signals, catalogue)


def judge(sieve: Sieve, signals: Signals, catalogue: Catalogue, more: Sequence[Finding] = ()) -> Verdict:
    """The verdict on what a sieve has kept and all signals but the lines; `more` was found elsewhere."""
    host = signals.collected_from.get("dmesg") or signals.collected_from.get("logs")
    ends = sieve.ends()
    findings = [
        *sieve.findings(exitcode=signals.exitcode, host=host),
        *numbers.judge(signals.metrics, catalogue, host=host),
        *waits.judge(signals.stacks, signals.metrics),
        *(flight.judge_summary(signals.flight_recorder) if signals.flight_recorder else ()),
        *(ras.judge(signals.ras, signals.metrics) if signals.ras else ()),
        *more,
    ]
    findings = [_with_link(one, signals.metrics) for one in findings if one.group not in catalogue.left_out]
    return verdict.draw(findings, _circumstances(findings, ends, signals))


def _circumstances(
    findings: Sequence[Finding], ends: Sequence[launcher.End], signals: Signals
) -> verdict.Circumstances:
    first = launcher.first(ends)
    code = launcher.signed(signals.exitcode) if signals.exitcode is not None else 0
    stands = any(isinstance(value, str) and _NO_PROGRESS.search(value) for _, value in numbers.flatten(signals.metrics))
    return verdict.Circumstances(
        died=bool(code) or bool(ends) or stands or bool(signals.stacks) or bool(signals.flight_recorder)
        or any(not finding.is_benign for finding in findings),
        somebody_died_first=first is not None and first.code not in (0, 1, -6, -15),
        port_is_unused=numbers.port_is_unused(signals.metrics),
        moves_between_hosts=numbers.moves_between_hosts(signals.metrics),
        hosts_of_ranks={
            **{one.rank: one.host for one in findings if one.rank is not None and one.host},
            **{end.rank: end.host for end in ends if end.rank is not None and end.host},
        },
    )  # fmt: skip


def _with_link(finding: Finding, metrics: Mapping[str, Any]) -> Finding:
    """The history of links may name the host that the kernel's line does not."""
    if finding.category != "nvlink_fabric" or finding.host or finding.is_benign:
        return finding
    link = next((found[1] for line in finding.evidence if (found := _LINK_OF_LINE.search(line))), None)
    if link is None:
        return finding
    named = {
        found[0]: found["host"]
        for path, value in numbers.flatten(metrics)
        for found in _LINK.finditer(f"{path} {value}")
        if int(found["link"]) == int(link)
    }
    if len(named) != 1:
        return finding
    ((name, host),) = named.items()
    return msgspec.structs.replace(finding, culprit=Culprit("link", name), host=host)
