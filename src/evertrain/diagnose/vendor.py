"""What do the vendor's own diagnostics say? DCGM's, where it is installed; and did they leave settings as they were?

A diagnostic can be a fault itself: one is known to have removed a frequency lock, and the job was slower ever after.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

from evertrain.diagnose.bench import Absent, Bench
from evertrain.worker import disguise

ON_EACH_RANK = False
SETTINGS = (
    "persistence_mode", "compute_mode", "power.limit", "clocks.applications.graphics", "clocks.applications.memory",
    "ecc.mode.current", "mig.mode.current",
)  # fmt: skip
SETTINGS_S = 20.0


def run(bench: Bench, *, level: int = 1, dcgmi: str = "dcgmi", nvidia_smi: str = "nvidia-smi") -> None:
    if shutil.which(dcgmi) is None:
        raise Absent(f"no {dcgmi} on this node")
    before = settings(nvidia_smi)
    rank = os.getpid()
    done = subprocess.run(
        [dcgmi, "diag", "-r", str(level), "-j"],
        capture_output=True,
        text=True,
        timeout=max(bench.left_s, 1.0),
        check=False,
        # it would meet the next attempt where this process is killed together with the server that would end it
        preexec_fn=lambda: disguise.die_with_parent(rank),
    )
    results = list(parse(done.stdout))
    if not results:
        words = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[0]
        # its own service is not there, most often: nothing was tested
        raise Absent(f"{dcgmi} diag ended with {done.returncode} and no results: {words}")
    for name, device, status, warning in results:
        # a warning is for people, and what was skipped was not tested
        ok = None if status in ("skip", "warn", "notrun", "") else status == "pass"
        because = f"{device}: {warning or status}" if ok is False else ""
        bench.say(f"dcgm {name}", 1.0 if ok else 0.0, status, ok=ok, because=because, device=device, warning=warning)
    after = settings(nvidia_smi)
    changed = {
        f"{device} {name}": [before[device][name], values.get(name)]
        for device, values in after.items()
        for name in before.get(device, {})
        if before[device][name] != values.get(name)
    }
    because = "; ".join(f"{name}: {was} before, {now} after" for name, (was, now) in changed.items())
    bench.say(
        "settings", len(changed), "changed", ok=None if not before else not changed, because=because, changed=changed
    )


def settings(nvidia_smi: str) -> dict[str, dict[str, str]]:
    """Of each GPU; empty where they cannot be read."""
    if shutil.which(nvidia_smi) is None:
        return {}
    command = [nvidia_smi, f"--query-gpu=uuid,{','.join(SETTINGS)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SETTINGS_S, check=False)
    found = {}
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        uuid, *values = (word.strip() for word in line.split(","))
        if len(values) == len(SETTINGS):
            found[uuid] = dict(zip(SETTINGS, values, strict=True))
    return found


def parse(text: str) -> Iterator[tuple[str, str, str, str]]:
    """Test, device, status in small letters and warning, of DCGM 3 and 4."""
    start = text.find("{")
    try:
        told = json.loads(text[start:]) if start >= 0 else {}
    except ValueError:
        return
    reports = [one for one in told.values() if isinstance(one, dict) and "test_categories" in one]
    for category in (category for report in reports for category in report["test_categories"]):
        for test in category.get("tests", ()):
            for result in test.get("results", ()):
                yield (
                    str(test.get("name", "?")),
                    _device(result),
                    str(result.get("status", "")).lower(),
                    _warning(result),
                )


def _device(result: dict[str, Any]) -> str:
    if "entity_id" in result:
        return f"{result.get('entity_group', 'entity')} {result['entity_id']}"
    return f"GPU {result['gpu_id']}" if "gpu_id" in result else "node"


def _warning(result: dict[str, Any]) -> str:
    """One text, a list of texts, or a list of objects, by version."""
    found = result.get("warnings") or result.get("warning") or ()
    listed = found if isinstance(found, list) else [found]
    words = [str(one.get("warning", "")) if isinstance(one, dict) else str(one) for one in listed]
    return "; ".join(word.strip() for word in words if word.strip())
