"""How busy are the tensor cores? What dcgm-exporter says of this node's GPUs, where it runs.

Where nothing ever answered there is nothing to look at; one that did and does not any more is blind.
"""

from __future__ import annotations

import http.client
import math
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping

from evertrain.model.sensing import Seen

VARIABLE = "EVERTRAIN_DCGM_URL"
DEFAULT_URL = "http://127.0.0.1:9400/metrics"
TENSOR = "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"
_PREFIX = "DCGM_FI_"
_TIMEOUT_S = 2.0
_MAX_BYTES = 8_000_000
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*\r?")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")


class DcgmSensor:
    name = "dcgm"
    period_s = 5.0
    limit_s = 5.0

    def __init__(self, url: str = "", *, environ: Mapping[str, str] = os.environ) -> None:
        self._url = url or environ.get(VARIABLE) or DEFAULT_URL
        # an exporter of this node is not behind a proxy
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._has_answered = False
        self.tensor: dict[str, float] = {}
        """Share of the last interval in which the tensor cores were active, by UUID of the GPU; of the last look."""

    def look(self, now: float) -> Seen:
        self.tensor = {}
        try:
            text = self._fetch()
        except urllib.error.HTTPError as error:
            return self._missed(f"{self._url} answers {error.code} {error.reason}", is_nobody=True)
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(reason, ConnectionRefusedError):
                return self._missed(f"no dcgm-exporter at {self._url}", is_nobody=True)
            return self._missed(f"{self._url}: {reason!s}" if str(reason) else f"{self._url}: {type(reason).__name__}")
        if _PREFIX not in text:
            return self._missed(f"what answers at {self._url} has no metrics of GPUs", is_nobody=True)
        self._has_answered = True
        tensor: dict[str, float] = {}
        for labels, value in samples(text, TENSOR):
            device = labels.get("UUID") or labels.get("gpu", "")
            if 0.0 <= value <= 1.0:
                # parts of one GPU are exported one by one
                tensor[device] = max(value, tensor.get(device, 0.0))
        self.tensor = tensor  # at once: it is read by another thread
        return Seen(last=_in_words(self.tensor))

    def _fetch(self) -> str:
        with self._opener.open(self._url, timeout=_TIMEOUT_S) as answer:
            content: bytes = answer.read(_MAX_BYTES)
        return content.decode(errors="replace")

    def _missed(self, why: str, *, is_nobody: bool = False) -> Seen:
        if self._has_answered:
            return Seen(blind=f"{why}; it did before")
        return Seen(absent=f"{why}; {VARIABLE} names another place") if is_nobody else Seen(blind=why)


def samples(text: str, wanted: str) -> Iterator[tuple[dict[str, str], float]]:
    """Labels and value of each sample of a metric in Prometheus' text format."""
    for line in text.split("\n"):
        if line.startswith(wanted) and (found := _SAMPLE.fullmatch(line)) and found[1] == wanted:
            try:
                value = float(found[3])
            except ValueError:
                continue
            if not math.isnan(value):
                yield {name: _unescaped(label) for name, label in _LABEL.findall(found[2] or "")}, value


def _unescaped(label: str) -> str:
    return _ESCAPED.sub(lambda sign: "\n" if sign[1] == "n" else sign[1], label)


def _in_words(tensor: Mapping[str, float]) -> str:
    if not tensor:
        return f"answers, without tensor activity ({TENSOR})"
    low, high = min(tensor.values()), max(tensor.values())
    return f"tensor cores active {low:.0%} to {high:.0%}"
