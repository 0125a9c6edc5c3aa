"""The same incident told by another cluster: other hosts, pids, times, paths, versions, and another order of ranks."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

_PREFIXES = ("cn", "gpu-b", "h100-", "ip-n", "trn-")


class Paraphrase:
    """One way to retell; `text` renames what a verdict names."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._prefix = self._chance.choice(_PREFIXES)
        self._shift = self._chance.randrange(3, 800)
        self._hours = self._chance.randrange(0, 5)
        self._uptime = self._chance.randrange(1000, 10_000_000)
        self._pids: dict[str, str] = {}

    def signals(self, signals: dict[str, Any]) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.text(json.dumps(signals)))
        told["logs"] = self._reordered(told["logs"])
        return told

    def text(self, text: str) -> str:
        for pid in re.findall(r"(?:Process |pid[=: ]+'?|PID |Thread )(\d{2,8})\b", text):
            self._pids.setdefault(pid, str(self._chance.randrange(100_000, 4_000_000)))
        for pattern, changed in self._changes():
            text = re.sub(pattern, changed, text)
        return text

    def _changes(self) -> list[tuple[str, Callable[[re.Match[str]], str]]]:
        chance = self._chance
        return [
            # racks keep their numbers: their order is told in facts too
            (r"\bnode-(?=r\d)", lambda _: self._prefix + "-"),
            (r"\bnode-(\d+)\b", lambda found: f"{self._prefix}{int(found[1]) + self._shift}"),
            (r"\bnode-(\w+)\b", lambda found: f"{self._prefix}{self._shift}{found[1]}"),
            (r"\b10\.0\.(\d+)\.(\d+)\b", lambda found: f"172.{20 + int(found[1]) % 10}.{found[1]}.{found[2]}"),
            (r"(?<![\d.])\d{2,8}(?![\d.])", lambda found: self._pids.get(found[0], found[0])),
            (
                r"(?<![\d:])([01]\d):(\d\d):(\d\d)(?![\d:])",
                lambda found: f"{int(found[1]) + self._hours:02d}:{found[2]}:{found[3]}",
            ),
            (r"\b20(\d\d)-(\d\d)-(\d\d)", lambda found: f"20{int(found[1]) + 1:02d}-{found[2]}-{found[3]}"),
            (r"\[ *(\d+)\.(\d{6})\]", lambda found: f"[{int(found[1]) + self._uptime}.{found[2]}]"),
            (r"/opt/conda/", lambda _: "/usr/local/venv/"),
            (r"/srv/job/", lambda _: "/home/someone/run-7/"),
            (r"python3\.\d+", lambda _: "python3.13"),
            (r"(NCCL version )[\d.]+\d", lambda found: f"{found[1]}2.{chance.randrange(10, 30)}.{chance.randrange(9)}"),
            (r"(\.(?:cpp|cc|hpp|cu)):\d+", lambda found: f"{found[1]}:{chance.randrange(10, 3000)}"),
            (r"(\.py\W{1,4}line )\d+", lambda found: f"{found[1]}{chance.randrange(2, 3000)}"),
            (r"0x[0-9a-f]{12}\b", lambda _: f"0x7f{chance.randrange(16**10):010x}"),
        ]

    def _reordered(self, lines: list[str]) -> list[str]:
        """Lines of each rank keep their order; whose line comes next is chance. Other logs stay as they are."""
        ranks = [found[1] if (found := re.match(r"\[rank(\d+)\]", line)) else None for line in lines]
        if None in ranks:
            return lines
        queues = {rank: [line for line, of in zip(lines, ranks, strict=True) if of == rank] for rank in set(ranks)}
        order = list(ranks)
        self._chance.shuffle(order)
        return [queues[rank].pop(0) for rank in order]
