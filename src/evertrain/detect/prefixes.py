"""Who wrote this line? What the prefixes of ranks, launchers, collectors, syslog and the kernel say.

Every tool that gathers the lines of many ranks puts its own mark in front; a line may carry several of them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# names that look like hosts with a colon behind them and are none
_NOT_A_HOST = re.compile(
    r"(?:rank|step|epoch|iter|iteration|gpu|cuda|mlx\d|bnxt|ib|eth|en|bond|nvidia|nvme|sd|pid|bf|fp|int|task|default|frame"
    r"|line|stage|layer|thread|loss|lr|e|w|i|d|v|t|python|group|block|batch|shard|dp|tp|pp|cp|ep|chunk|level|attempt"
    r"|core|cpu|kernel|device|port|xid|sxid|error|errno|http|https|file|exit|py|cu|cc|cpp|h|nccl|nvidia-nvswitch|md|ata|usb|pci"
    r"|scsi|loop|dm|mc|igb|ixgbe|i\d+e|e\d+e|channel|expert|head|node_rank|version|v)"
    r"[-_]?\d*[\d.]*$",
    re.IGNORECASE,
)
# a letter and a digit, or an address: `node-12`, `gpu-a-3`, `10.0.0.4`, `ip-10-0-0-4.ec2.internal`
_HOST = r"(?:(?=[\w.-]*\d)(?=[\w.-]*[A-Za-z])[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?|\d{1,3}(?:\.\d{1,3}){3})"

_HOST_WORD = re.compile(r"(?<![\w./-])[a-zA-Z][a-zA-Z]*\d*(?:-[a-zA-Z0-9]+)*-?[a-zA-Z]*\d[\w-]*\b")

_MONTHS = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_ISO = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"

_SYSLOG = re.compile(rf"(?:<\d+>)?(?:{_MONTHS} +\d+ \d\d:\d\d:\d\d(?:\.\d+)?|{_ISO}) (\S+) ([\w./-]+)(?:\[\d+\])?: ")
_HOST_KERNEL = re.compile(r"(\S+) kernel: ")
_KERNEL = re.compile(
    rf"kernel: ?|(?:kern|user|daemon) *:\w+ *: *(?:{_ISO} )?|\[ *[+-]?\d+\.\d+\] ?"
    rf"|\[(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) )?{_MONTHS} +\d+ \d\d:\d\d:\d\d(?: \d{{4}})?\] ?|\d+,\d+,\d+,[-\w,=]+;"
)
_BRACKET_TIME = re.compile(rf"\[{_ISO}\] ?|{_ISO} +")
_NCCL = re.compile(r"([A-Za-z0-9][\w.-]*):\d+:\d+ \[\d+\] ?")
_UCX = re.compile(r"\[([A-Za-z0-9][\w.-]*):\d+ *:\d+:\d+\] ?")
_LABEL = re.compile(rf"({_HOST}): ?(?=\S)")
_POD = re.compile(rf"\[({_HOST})\] ")
_TAG = re.compile(r"\[[A-Za-z][A-Za-z_ ]*\] ?")
_SRUN = re.compile(r" *(\d{1,5}): (?=\S|$)")
_RANK = re.compile(r"\[rank *(\d+)\]:? ?|\[default(\d+)\]:? ?|\(rank *(\d+)\):? |rank[ _]?(\d+): ", re.IGNORECASE)
_TASK = re.compile(rf"\[(?:task ?\d+ ?)?(?:rank ?(\d+) ?)?({_HOST})\] ?")
_TASK_RANK = re.compile(r"\[task ?\d+ rank ?\d+ ([\w.-]+)\] ?")
_RAY = re.compile(r"\([\w.:]+ pid=\d+(?:, ip=([\d.]+))?\) ?")
_ON_NODE = re.compile(rf"(?:, node |\"nodeName\": ?\"|\bnode[=:] ?|\bhost(?:name)?[=:] ?)({_HOST})\b")
_INNER_RANK = re.compile(r"\[Rank (\d+)\]|\) Rank (\d+)\]")

_CLOCK = re.compile(r"(?:(\d{4})-(\d\d)-(\d\d)[T ])?(?<![\d:])(\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_UPTIME = re.compile(r"\[ *(\d+\.\d+)\]")


class Origin(NamedTuple):
    host: str | None
    rank: int | None
    text: str
    """What is left behind the prefixes."""
    is_kernel: bool


def looks_like_host(name: str) -> bool:
    return bool(re.fullmatch(_HOST, name)) and not _NOT_A_HOST.match(name)


def hosts_in(text: str) -> list[str]:
    """Words that can only be names of hosts; of pods and jobs (`pod/train-3`) they are not."""
    return [word for word in dict.fromkeys(_HOST_WORD.findall(text)) if "-" in word and looks_like_host(word)]


def origin(raw: str) -> Origin:
    """Take the prefixes off, one after another, and remember what they say."""
    host: str | None = None
    rank: int | None = None
    is_kernel = False
    at = len(raw) - len(raw.lstrip())
    for _ in range(6):
        if found := _SYSLOG.match(raw, at):
            host = host or found[1]
            is_kernel = is_kernel or found[2] == "kernel"
        elif found := _KERNEL.match(raw, at):
            is_kernel = True
        elif found := _HOST_KERNEL.match(raw, at):
            host, is_kernel = host or found[1], True
        elif found := _RANK.match(raw, at):
            rank = rank if rank is not None else int(next(group for group in found.groups() if group))
        elif found := _first(raw, at):
            host = host or found[1]
        elif found := _BRACKET_TIME.match(raw, at):
            pass  # says when, not who
        elif not is_kernel and (found := _LABEL.match(raw, at) or _POD.match(raw, at)) and looks_like_host(found[1]):
            # the innermost of several names is the writer's own
            host = host or found[1]
        elif found := _TAG.match(raw, at):
            pass
        elif at == 0 and (found := _SRUN.match(raw, at)):
            rank = int(found[1])
        else:
            break
        at = found.end()
    text = raw[at:]
    if rank is None and "ank " in raw and (inner := _INNER_RANK.search(raw)):
        rank = int(inner[1] or inner[2])
    if host is None and "[" in raw and (task := _TASK.search(raw)) and looks_like_host(task[2]):
        host = task[2]
    if host is None and (named := _ON_NODE.search(raw)) and looks_like_host(named[1]):
        host = named[1]
    return Origin(host, rank, text, is_kernel)


def _first(raw: str, at: int) -> re.Match[str] | None:
    patterns = (_NCCL, _UCX, _TASK_RANK, _RAY)
    return next((found for pattern in patterns if (found := pattern.match(raw, at))), None)


def stream(raw: str, text: str) -> str:
    """What lines of one writer share: the prefix without its times and numbers that count up."""
    prefix = raw[: len(raw) - len(text)]
    return _CLOCK.sub("", _UPTIME.sub("", prefix)).strip()


def clock(raw: str) -> float | None:
    """Seconds as the line says them; days count where there is a date."""
    if found := _CLOCK.search(raw):
        year, month, day, hours, minutes, seconds, fraction = found.groups()
        day_s = int(hours) * 3600 + int(minutes) * 60 + int(seconds) + float(f"0.{fraction or 0}")
        return day_s + (_days(int(year), int(month), int(day)) * 86400 if year else 0)
    if found := _UPTIME.search(raw):
        return float(found[1])
    return None


def _days(year: int, month: int, day: int) -> int:
    """Days in the proleptic Gregorian calendar, from an arbitrary beginning."""
    if month <= 2:
        year, month = year - 1, month + 12
    return 365 * year + year // 4 - year // 100 + year // 400 + (153 * (month - 3) + 2) // 5 + day
