"""What does the NVIDIA driver say of a GPU? Xid and SXid lines, decoded by rule, and their repeats.

Codes are judged per GPU and together: 43 and 45 only follow, 154 is the driver's own conclusion, a hardware code
outranks an application code that came before it, and 13 and 31 mean hardware only where they repeat at one place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from msgspec import Struct

from evertrain.model.findings import Action, Category, Culprit, Finding
from evertrain.model.signals import Line

WORDS = ("xid", "nvrm", "fallen off the bus")
REPEAT_S = 60.0
"""Two lines closer together are one event: the driver prints one line for each channel or processor."""

_XID = re.compile(r"\bXid ?\((?:PCI:)?(?P<gpu>[0-9a-fA-F:.]+)\): (?P<code>\d+)(?:, ?(?P<text>.*))?")
_SXID = re.compile(r"\bSXid ?\((?:PCI:)?(?P<gpu>[0-9a-fA-F:.]+)\): (?P<code>\d+), (?P<text>.*)")
_LOST = re.compile(r"(?:NVRM:? )?GPU (?:at )?(?:PCI:)?(?P<gpu>[0-9a-fA-F]{4,8}:[0-9a-fA-F:.]+)")
_OWNER = re.compile(r"pid='?(?:(?P<pid>\d+)|<unknown>)'?, ?(?:name='?(?P<name>[^,']*)'?, ?)?")
_PLACE = re.compile(r"\(GPC (\d+), TPC (\d+)")
_RECOVERY = re.compile(r"changed from .* to 0x\w+ \((?P<what>[^)]*)\)")
_NVLINK5 = re.compile(
    r"(?P<unit>[A-Z][A-Z0-9_]*) +(?P<word>Fatal|Nonfatal) .*?Link +(?P<link>-?\d+) *\((?P<words>[^)]*)\)"
)
_LINK = re.compile(r"\bLink +(\d+)|\blink (\d+)")

# code: (category, action, confidence, meaning)
_CODES: dict[int, tuple[Category, Action, float, str]] = {
    46: ("gpu_hardware", "evict", 0.75, "GPU timeout"),
    48: ("gpu_memory_ecc", "evict", 0.93, "double-bit memory error"),
    54: ("gpu_hardware", "evict", 0.75, "auxiliary power is not connected"),
    62: ("gpu_hardware", "evict", 0.94, "the GPU's micro-controller halted"),
    64: ("gpu_memory_ecc", "evict", 0.96, "a memory row could not be remapped"),
    79: ("gpu_hardware", "evict", 0.97, "the GPU has fallen off the bus"),
    94: ("gpu_memory_ecc", "evict", 0.88, "contained memory error: the GPU needs a reset"),
    95: ("gpu_memory_ecc", "evict", 0.96, "uncontained memory error: the GPU must be reset"),
    110: ("gpu_hardware", "evict", 0.75, "security fault of the GPU"),
    119: ("driver_gsp", "evict", 0.94, "the GPU's system processor does not answer"),
    120: ("driver_gsp", "evict", 0.94, "the GPU's system processor failed"),
    136: ("nvlink_fabric", "evict", 0.8, "NVLink training failed"),
    140: ("gpu_memory_ecc", "evict", 0.95, "unrecovered memory error"),
    143: ("gpu_hardware", "evict", 0.92, "the GPU could not be initialised"),
    157: ("gpu_memory_ecc", "evict", 0.75, "a failing resource could not be retired"),
    158: ("gpu_hardware", "evict", 0.75, "fatal timeout of the GPU"),
    167: ("gpu_hardware", "evict", 0.75, "fatal PCIe timeout"),
    168: ("gpu_memory_ecc", "evict", 0.7, "memory capacity is reduced"),
    171: ("gpu_memory_ecc", "evict", 0.88, "uncorrectable memory error"),
    172: ("gpu_memory_ecc", "evict", 0.88, "uncorrectable SRAM error"),
    13: ("user_code", "user_code", 0.72, "a kernel of the program raised an exception"),
    31: ("user_code", "user_code", 0.72, "a kernel of the program read or wrote outside its memory"),
    69: ("user_code", "user_code", 0.5, "the program sent a wrong command"),
    61: ("gpu_hardware", "human", 0.45, "the GPU's micro-controller stopped at a breakpoint"),
    109: ("gpu_hardware", "retry", 0.55, "a context switch timed out"),
    44: ("driver_gsp", "retry", 0.45, "fault during a context switch"),
    137: ("nvlink_fabric", "human", 0.5, "NVLink access refused: look at the GPU at the other end"),
    151: ("driver_gsp", "human", 0.4, "key rotation of confidential computing"),
    155: ("nvlink_fabric", "retry", 0.5, "NVLink error that software defines"),
    **dict.fromkeys(
        (8, 11, 25, 32, 39, 40, 41, 70, 71, 72, 75, 76, 77, 80, 85, *range(126, 136)),
        ("gpu_hardware", "retry", 0.45, "a channel or copy engine failed"),
    ),
}  # fmt: skip
_EVICT_ON_REPEAT = frozenset((8, 11, 25, 32, 61, 74, 109, 155, 80, *range(39, 42), *range(70, 78), *range(126, 136)))
_WATCH = {
    63: "a memory row is marked for remapping: reset the GPU at the next drain",
    92: "many single-bit errors, corrected: watch this GPU",
    121: "corrected error between CPU and GPU: reset in a service window",
    156: "a resource is to be retired: reset the GPU at the next drain",
    45: "the driver cleaned up after another error or after a kill",
    43: "a channel was reset after another error",
}
_HARMLESS = frozenset((37, 38, 60, 66, 67, 68, 82, 83, 84, 86, 88, 89, 93, *range(96, 106), 139, 141, 159, 160, 161,
                       162, 163, 164, 165))  # fmt: skip
_RECOVER = ("GPU Reset Required", "Node Reboot Required", "Drain and Reset", "Drain P2P")


class Event(Struct, frozen=True):
    """One line of the driver; `code` 79 also stands for the texts that come without a code."""

    gpu: str
    code: int
    text: str
    pid: str | None
    line: Line
    is_switch: bool = False


class Kernel:
    """Reads lines in order: some of the driver's messages are spread over several."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._last_gpu: dict[str, str] = {}

    def read(self, line: Line) -> None:
        raw = line.raw
        if found := _SXID.search(raw):
            self.events.append(Event(found["gpu"], int(found["code"]), found["text"], None, line, is_switch=True))
        elif found := _XID.search(raw):
            text = found["text"] or ""
            owner = _OWNER.match(text)
            self.events.append(
                Event(_short(found["gpu"]), int(found["code"]), text[owner.end() :] if owner else text,
                      owner["pid"] if owner else None, line)
            )  # fmt: skip
        else:
            writer = line.host or ""
            if named := _LOST.search(raw):
                self._last_gpu[writer] = _short(named["gpu"])
            if "fallen off the bus" in raw and (gpu := self._last_gpu.get(writer)):
                self.events.append(Event(gpu, 79, "fallen off the bus", None, line))


def judge(events: Sequence[Event], *, job_died: bool, host: str | None) -> tuple[Finding, ...]:
    """What the driver's lines of all hosts mean. `host`: where lines that name none were collected."""

    def where(event: Event) -> tuple[str, str]:
        return (event.line.host or host or "", event.gpu)

    findings: list[Finding] = []
    gpus_31 = {where(event) for event in events if event.code == 31 and not event.is_switch}
    for place, group in groupby(sorted(events, key=lambda event: (where(event), event.line.order)), key=where):
        own = list(group)
        findings += _switch(place, [event for event in own if event.is_switch])
        findings += _gpu(place, [event for event in own if not event.is_switch], job_died, len(gpus_31) == 1)
    return tuple(findings)


def _switch(place: tuple[str, str], events: Sequence[Event]) -> Iterator[Finding]:
    for event in events:
        is_fatal = not re.match(r"non-?fatal", event.text, re.IGNORECASE) and "fatal" in event.text.lower()
        if is_fatal:
            yield _found(place, event, "nvlink_fabric", "evict", 0.94, "fatal error of an NVSwitch", kind="sxid")
        else:
            yield _benign(place, event, "an NVSwitch reported an error that it survived", kind="sxid")


def _gpu(place: tuple[str, str], events: Sequence[Event], job_died: bool, alone_with_31: bool) -> Iterator[Finding]:
    codes = {event.code for event in events}
    followed_by_45 = {
        int(n) for event in events if event.code == 45 for n in re.findall(r"previous Xid (\d+)", event.text)
    }
    conclusion = next((event for event in reversed(events) if event.code == 154), None)
    orders = conclusion is not None and _orders_recovery(conclusion)
    for code in sorted(codes):
        same = [event for event in events if event.code == code]
        first = same[0]
        repeated = _distinct_times(same) >= 2
        if 144 <= code <= 150:
            yield _nvlink5(place, same, hit=code in followed_by_45 or orders, with_137=137 in codes)
        elif code == 154:
            if orders:
                what = _RECOVERY.search(first.text)
                yield _found(place, conclusion or first, "gpu_hardware", "evict", 0.9,
                             f"the driver asks for recovery: {what['what'] if what else first.text}")  # fmt: skip
            else:
                yield _benign(place, first, "the driver sees no need to act")
        elif code == 74:
            sure = job_died or repeated or orders
            yield _found(place, first, "nvlink_fabric", "evict" if sure else "none", 0.8 if sure else 0.5,
                         "NVLink error", benign=not sure)  # fmt: skip
        elif code == 13 and _same_processor_again(same):
            yield _found(
                place, first, "gpu_hardware", "evict", 0.8, "the same processor of the GPU fails again and again"
            )
        elif code == 31 and repeated and alone_with_31 and len({event.pid for event in same}) > 1:
            yield _found(place, first, "gpu_hardware", "evict", 0.74, "only this GPU faults, in one run after another")
        elif code == 43 and job_died and not codes - {43, 45}:
            yield _found(place, first, "user_code", "user_code", 0.45, _WATCH[43])
        elif code in _WATCH or code in _HARMLESS:
            yield _benign(place, first, _WATCH.get(code, "irrelevant to training"))
        elif code in _CODES:
            category, action, confidence, meaning = _CODES[code]
            if code in _EVICT_ON_REPEAT and (repeated or orders):
                action, confidence = "evict", 0.72
            yield _found(place, first, category, action, confidence, meaning)
        else:
            yield _found(place, first, "unknown", "human", 0.35, "a code without a rule: evidence, nothing more")


def _nvlink5(place: tuple[str, str], events: Sequence[Event], *, hit: bool, with_137: bool) -> Finding:
    """NVLink 5: the word in the line does not decide alone."""
    worst = max(events, key=_weight)
    parsed = _NVLINK5.search(worst.text)
    meaning = f"NVLink error {parsed['unit'] if parsed else ''}".strip()
    link = int(parsed["link"]) if parsed and int(parsed["link"]) >= 0 else None
    match _weight(worst):
        case 0 if not hit and not with_137:
            return _benign(place, worst, meaning + ", which the vendor says to ignore")
        case 3:
            return _found(
                place, worst, "nvlink_fabric", "human", 0.6, meaning + ": the device at the other end went down"
            )
        case 2:
            return _found(place, worst, "nvlink_fabric", "evict", 0.88, meaning, link=link)
        case _ if hit:
            return _found(
                place, worst, "nvlink_fabric", "evict", 0.84, meaning + "; the driver ended what used it", link=link
            )
        case _ if with_137:
            return _found(
                place, worst, "nvlink_fabric", "human", 0.6, meaning + " and refused access: look at the fabric"
            )
        case _:
            return _benign(place, worst, meaning + ", not fatal")


def _weight(event: Event) -> int:
    """0 ignore, 1 not fatal, 2 reset the GPU, 3 the peer went down."""
    parsed = _NVLINK5.search(event.text)
    if parsed is None:
        return 2 if "Nonfatal" not in event.text and "Fatal" in event.text else 1
    words = [int(word, 16) for word in parsed["words"].split() if re.fullmatch(r"0x[0-9a-fA-F]+", word)]
    is_fatal = parsed["word"] == "Fatal"
    if event.code == 149 and words:
        is_link_event = "LINK_DOWN" in parsed["unit"] or "LINK_EVT" in parsed["unit"]
        reason = words[0] >> 20 & 0x3F
        if is_link_event and (words[0] & 0x3FF == 0b0111000110 or words[0] & 0x7F == 0b0010001):
            if reason in (0b100110, 0b101000):
                return 0
            return 3 if reason == 0b010101 or 0b100000 <= reason <= 0b100101 else 2
        if "BER" in parsed["unit"]:
            return 0
    if event.code == 145 and len(words) > 1 and "REMAP" in parsed["unit"]:
        if words[1] in (0x40, 0x80):
            return 2
        return 1 if words[1] <= 0x20 else 0
    return 2 if is_fatal else 1


def _orders_recovery(event: Event) -> bool:
    what = _RECOVERY.search(event.text)
    return bool(what) and any(word.lower() in what["what"].lower() for word in _RECOVER)  # type: ignore[index]


def _distinct_times(events: Sequence[Event]) -> int:
    clocks = sorted(event.line.clock for event in events if event.line.clock is not None)
    return bool(clocks) + sum(later - earlier > REPEAT_S for earlier, later in pairwise(clocks))


def _same_processor_again(events: Sequence[Event]) -> bool:
    by_processor: dict[tuple[str, ...], list[Event]] = {}
    for event in events:
        if found := _PLACE.search(event.text):
            by_processor.setdefault(found.groups(), []).append(event)
    # one processor, at different times; a bug of the program hits whichever runs it
    return len(by_processor) == 1 and any(_distinct_times(same) >= 2 for same in by_processor.values())


def _found(
    place: tuple[str, str], event: Event, category: Category, action: Action, confidence: float, meaning: str,
    *, kind: str = "xid", link: int | None = None, benign: bool = False,
) -> Finding:  # fmt: skip
    host, gpu = place
    culprit = Culprit("host", host)
    if action == "user_code":
        culprit = Culprit("code", meaning)
    elif host and link is not None:
        culprit = Culprit("link", f"{host}/{gpu}/link{link}")
    elif host:
        culprit = Culprit("switch" if event.is_switch else "gpu", f"{host}/{gpu}")
    return Finding(
        rule=f"{kind}-{event.code}", group="xid", category=category, action=action, culprit=culprit,
        confidence=confidence, evidence=(event.line.quoted(),), time=event.line.clock, order=event.line.order,
        host=host or None, is_benign=benign, note=f"{'SXid' if event.is_switch else 'Xid'} {event.code}: {meaning}",
    )  # fmt: skip


def _benign(place: tuple[str, str], event: Event, meaning: str, kind: str = "xid") -> Finding:
    return _found(place, event, "none", "none", 0.6, meaning, kind=kind, benign=True)


def _short(address: str) -> str:
    """Domain, bus and device; the function says nothing."""
    return address.rpartition(".")[0] if "." in address else address
