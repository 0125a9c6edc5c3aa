"""What does the kernel say of network cards? mlx5 lines and lost carriers; some count only when they repeat."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from evertrain.model.findings import Culprit, Finding
from evertrain.model.signals import Line

WORDS = ("mlx5", "lost carrier", "link is down", "bnxt_en", "link down", "netdev watchdog", "health compromised",
         "unrecoverable hardware error")  # fmt: skip

_DEVICE = re.compile(
    r"(?:mlx5_core|mlx4_core|bnxt_en|ice|i40e) ([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d)"
    r"|\b(mlx5_\d+|ib\d+|ibp\w+|rdma\d+|bond\d+|enp?\w+\d)\b"
)
_FATAL = re.compile(
    r"Will cause a leak of a command resource|health compromised|unrecoverable hardware error"
    r"|mlx5.{0,60}(?:Device is in fatal error|fw fatal|firmware fatal|device is dead)"
    r"|mlx5_core.{0,80}(?:enter(?:ing|ed)? (?:fatal )?error state|PCI.{0,20}(?:slot|offline)|handling bad device)"
    r"|bnxt_en.{0,80}(?:firmware (?:hang|fatal|reset failed)|hwrm.{0,40}timeout)",
    re.IGNORECASE,
)
_LOST = re.compile(
    r"\b(ib\w*|ibp\w+|mlx5_\d+|rdma\w*|bond\w*|en[ps]?\w+|eth\d+)(?:np\d)?: (?:lost carrier|link (?:is )?down)",
    re.IGNORECASE,
)
_LOST_MLX = re.compile(r"mlx5_core.{0,60}(?:link down|port.{0,10}down)", re.IGNORECASE)
_REPEATED = re.compile(
    r"transmit queue \d+ timed out|insufficient power on the PCIe slot|Cable error, (?:High Temperature|\w+)"
    r"|Port module event\[error\]",
    re.IGNORECASE,
)
_UNPLUGGED = re.compile(r"Port module event.*Cable unplugged", re.IGNORECASE)
_NOISE = re.compile(r"ACCESS_REG|mlx5_cmd_out_err", re.IGNORECASE)
FLAPS = 5
REPEATS = 3
WINDOW_S = 3600.0


def judge(lines: Sequence[Line], *, host: str | None) -> tuple[Finding, ...]:
    """`host`: where lines that name none were collected."""
    findings: list[Finding] = []
    lost: dict[tuple[str, str], list[Line]] = defaultdict(list)
    minor: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in lines:
        raw, at = line.raw, line.host or host or ""
        if _FATAL.search(raw):
            findings.append(_found("nic-fatal", at, [line], 0.95, "the network card gave up"))
        elif _NOISE.search(raw):
            findings.append(_benign("nic-noise", at, [line], "a query that this card does not know"))
        elif found := _LOST.search(raw):
            lost[(at, found[1])].append(line)
        elif _LOST_MLX.search(raw):
            lost[(at, _device(raw))].append(line)
        elif _UNPLUGGED.search(raw):
            findings.append(
                _benign("nic-unplugged", at, [line], "a cable was pulled; it matters if training used the port")
            )
        elif _REPEATED.search(raw):
            minor[(at, _device(raw))].append(line)
    for (at, _), same in lost.items():
        if len(same) > FLAPS:
            findings.append(_found("nic-flapping", at, same, 0.9, f"the port went down {len(same)} times"))
        else:
            findings.append(_benign("nic-carrier", at, same, "the port went down and may have come back"))
    for (at, _), same in minor.items():
        if _densest(same) >= REPEATS:
            findings.append(
                Finding(
                    rule="nic-repeated",
                    group="nic",
                    category="network_ib",
                    action="human",
                    culprit=Culprit("host", at),
                    confidence=0.6,
                    evidence=tuple(line.quoted() for line in same[:3]),
                    host=at or None,
                    order=same[0].order,
                    note="the network card complains again and again: a case for its vendor",
                )
            )
        else:
            findings.append(_benign("nic-warning", at, same, "a warning that healthy hosts show too"))
    return tuple(findings)


def _densest(lines: Sequence[Line]) -> int:
    """Most lines within the window; lines without a time count as one moment each."""
    clocks = [line.clock for line in lines]
    if any(clock is None for clock in clocks):
        return len(lines)
    times = sorted(clock for clock in clocks if clock is not None)
    return max(sum(0 <= later - first <= WINDOW_S for later in times) for first in times)


def _device(raw: str) -> str:
    found = _DEVICE.search(raw)
    return (found[1] or found[2]) if found else ""


def _found(rule: str, host: str, lines: Sequence[Line], confidence: float, note: str) -> Finding:
    device = next((name for line in lines if (name := _device(line.raw))), "")
    culprit = Culprit("nic", f"{host}/{device}") if host and device else Culprit("host", host)
    return Finding(
        rule=rule, group="nic", category="network_ib", action="evict", culprit=culprit, confidence=confidence,
        evidence=tuple(line.quoted() for line in lines[:3]), time=lines[0].clock, order=lines[0].order,
        host=host or None, note=note,
    )  # fmt: skip


def _benign(rule: str, host: str, lines: Sequence[Line], note: str) -> Finding:
    return Finding(
        rule=rule, group="nic", category="none", action="none", culprit=Culprit("none"), confidence=0.6,
        evidence=(lines[0].quoted(),), order=lines[0].order, host=host or None, is_benign=True, note=note,
    )  # fmt: skip
