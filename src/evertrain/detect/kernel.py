"""Which of the kernel's messages say that something is wrong with this node?

The lines are judged by what `evertrain explain` knows: codes of the NVIDIA driver, network cards, the catalogue. What
that calls user code or harmless is no sign; what only repetition makes certain is one when it repeats. Many lines of
one event make one sign: the first line gives it its key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from evertrain.detect import nic, xid
from evertrain.detect.catalogue import Catalogue
from evertrain.model.findings import Finding
from evertrain.model.sensing import KernelMessage, Sign
from evertrain.model.signals import Line

WINDOW_S = nic.WINDOW_S
"""How long a line is remembered for what follows."""
MAX_KEPT = 200
"""Lines of each kind that are remembered."""
MAX_ALIKE = 200
"""Lines a minute that differ in numbers only: a broken device can print thousands a second."""
MAX_SHAPES = 2000
MAX_EVENTS = 2000

_HERE = "here"
_RULES: dict[str, str] = {
    "host-memory-error": "host_memory_error",
    "pcie-fatal": "pcie_error",
    "gsp": "gpu_driver_error",
    "nvlink-down": "nvlink_down",
    "thermal": "thermal",
    "nic-fatal": "nic_down",
    "nic-flapping": "link_flap",
    "nic-repeated": "nic_warning",
}
"""Rules that are about machines, and what their signs are called. Rules of users go by their own names."""
_STANDS = re.compile(r"lockup|detected stall", re.IGNORECASE)
_CHECKED = re.compile(r"machine check", re.IGNORECASE)
_DISK = re.compile(r"\b(nvme\d+(?:n\d+)?(?:p\d+)?|sd[a-z]+\d*|vd[a-z]+\d*)\b")
_NO_DISK = re.compile(r"\b(?:fd|sr|loop|nbd|zram|ram)\d+\b")
_DISK_FAILED = re.compile(
    r"critical medium error, dev |I/O error(?:, dev| on dev) nvme(?!.*\(DISCARD\))"
    r"|controller is down|Removing after probe failure"
)
"""For certain. A SCSI disk may be a stick that was pulled out, one path of several, or lie on another machine."""
_PCI = re.compile(r"\b([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d)\b")
_NUMBER = re.compile(r"\b(?:0x)?[0-9a-f]+\b|\d+")
"""Also hexadecimal."""
_UNAVAILABLE = re.compile(r"\((?:GPU Reset|Node Reboot) Required\)", re.IGNORECASE)


class _Event(msgspec.Struct):
    key: str
    began: float
    last: float
    evidence: str
    is_told: bool


class KernelRules:
    """Feed all messages in order; signs come out once each."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._driver = xid.Kernel()
        self._nic_lines: list[Line] = []
        self._events: dict[tuple[str, str], _Event] = {}
        """The latest of each rule and device."""
        self._alike: dict[int, int] = {}
        self._alike_since = 0.0
        self._order = 0

    def __call__(self, messages: Sequence[KernelMessage]) -> tuple[Sign, ...]:
        return tuple(sign for message in messages if self._is_news(message) for sign in self._read(message))

    def _read(self, message: KernelMessage) -> Iterable[Sign]:
        self._order += 1
        line = Line(text=message.text, raw=message.text, order=self._order, clock=message.time)
        low = message.text.lower()
        if any(word in low for word in xid.WORDS):
            self._forget(message.time)
            before = len(self._driver.events)
            self._driver.read(line)
            if new := self._driver.events[before:]:
                return self._driver_says(new, message)
        if not message.is_own:
            # programs may quote anything there; of theirs only the driver's own form counts, for drills
            return ()
        found = self._catalogue.look_at(line)
        if any(word in low for word in nic.WORDS):
            self._forget(message.time)
            before_it = set(nic.judge(self._nic_lines, host=_HERE))
            self._nic_lines.append(line)
            found += [one for one in nic.judge(self._nic_lines, host=_HERE) if one not in before_it]
        if any(one.is_benign for one in found):
            return ()
        named = ((kind, device) for one in found for kind, device in [_named(one, message.text)] if kind)
        return [sign for kind, device in dict.fromkeys(named) for sign in self._event(kind, device, message)]

    def _driver_says(self, new: Sequence[xid.Event], message: KernelMessage) -> list[Sign]:
        events = self._driver.events
        placed = {(event.line.order, _rule(event)): event.gpu for event in events}
        blamed = {
            (one.rule, placed[(one.order, one.rule)])
            for one in xid.judge(events, job_died=False, host=None)
            if not one.is_benign and one.action not in ("none", "user_code")
        }
        signs: list[Sign] = []
        for event in new:
            kind = _rule(event).replace("-", "_")
            if event.code == 154 and _UNAVAILABLE.search(event.text):
                # the driver's own conclusion, as NVML gives it too
                kind = "gpu_unavailable"
            signs += self._event(kind, event.gpu, message, is_certain=(_rule(event), event.gpu) in blamed)
        return signs

    def _event(self, kind: str, device: str, message: KernelMessage, *, is_certain: bool = True) -> list[Sign]:
        """A sign if this is a new event, or has only now become one."""
        event = self._events.pop((kind, device), None)
        if event is None or message.time - event.last > xid.REPEAT_S:
            event = _Event(message.key, message.time, message.time, message.text, message.is_told)
        event.last = max(event.last, message.time)
        self._events[(kind, device)] = event
        if len(self._events) > MAX_EVENTS:
            del self._events[next(iter(self._events))]
        if event.is_told or not is_certain:
            return []
        event.is_told = True
        return [Sign(key=event.key, kind=kind, device=device, evidence=event.evidence, time=event.began)]

    def _is_news(self, message: KernelMessage) -> bool:
        if message.time - self._alike_since > 60 or len(self._alike) > MAX_SHAPES:
            self._alike, self._alike_since = {}, message.time
        shape = hash(_NUMBER.sub("", message.text))
        self._alike[shape] = seen = self._alike.get(shape, 0) + 1
        return seen <= MAX_ALIKE

    def _forget(self, now: float) -> None:
        self._driver.events = [
            event for event in self._driver.events if now - (event.line.clock or now) <= WINDOW_S
        ][-MAX_KEPT:]  # fmt: skip
        self._nic_lines = [line for line in self._nic_lines if now - (line.clock or now) <= WINDOW_S][-MAX_KEPT:]


def _rule(event: xid.Event) -> str:
    return f"{'sxid' if event.is_switch else 'xid'}-{event.code}"


def _named(found: Finding, text: str) -> tuple[str, str]:
    """Kind and device of what the catalogue has found in a line; no kind: it says nothing about this machine."""
    match found.rule:
        case "gpu-lost":
            return ("xid_79", "") if "fallen off the bus" in text else ("", "")
        case "kernel-panic" if _STANDS.search(text):
            # a machine that was paused, or shares its cores, says so too
            return "kernel_stall", ""
        case "kernel-panic" if _CHECKED.search(text):
            return "host_memory_error", ""
        case "kernel-panic":
            return "kernel_panic", ""
        case "local-disk":
            disk = _DISK.search(text)
            if disk is None and _NO_DISK.search(text):
                return "", ""
            return "disk_fault" if disk and _DISK_FAILED.search(text) else "disk_warning", disk[1] if disk else ""
        case rule if rule in _RULES:
            return _RULES[rule], _device(found, text)
        case rule if found.group == "user" and found.action == "evict":
            return rule.replace("-", "_"), _device(found, text)
        case _:
            return "", ""


def _device(found: Finding, text: str) -> str:
    named = str(found.culprit.id).partition(f"{_HERE}/")[2]
    if not named and (address := _PCI.search(text)):
        return address[1]
    return named
