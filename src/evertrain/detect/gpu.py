"""What do readings of GPUs say? Lost ones, broken memory, heat, slow links, and what the driver itself asks for.

Counters accuse by growing, never by their value: they hold the past of a machine, and begin anew with its driver.
Heat, throttling and narrow links must last for three looks; a GPU without load narrows its link to save power.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from evertrain.detect import xid
from evertrain.model.sensing import GpuReading, Sign
from evertrain.model.signals import Line


class GpuConfig(msgspec.Struct, frozen=True, kw_only=True):
    looks: int = 3
    """In a row, for what may pass."""
    gap_s: float = 30.0
    """Looks further apart are none in a row."""
    hot_c: int = 85
    """Where the device does not name a threshold of its own."""
    load: int = 50
    """Per cent of use above which the PCIe link should be at its best."""


_ORDERED = frozenset(
    {"GPU reset required", "node reboot required", "bus reset required", "system reboot required"}
)  # fmt: skip
"""Until that is done the GPU is of no use; other advice may wait for the next drain."""
_THROTTLED = ("hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal")
"""Running at the power limit is what a GPU under load does."""


class GpuRules:
    """Feed the readings of each look. `boot_id` tells one life of the machine from the next in keys of what lasts."""

    def __init__(self, *, boot_id: str = "", config: GpuConfig | None = None) -> None:
        self._boot_id = boot_id
        self._config = config or GpuConfig()
        self._lasting: dict[tuple[str, str], _Lasting] = {}
        self._errors: dict[str, int] = {}
        self._never_up: dict[str, frozenset[int]] = {}
        self._xids: dict[tuple[str, int], tuple[str, float]] = {}

    def __call__(self, readings: Sequence[GpuReading], now: float) -> tuple[Sign, ...]:
        return tuple(sign for reading in readings for sign in self._signs(reading, now))

    def _signs(self, now_is: GpuReading, now: float) -> Iterator[Sign]:
        yield from self._codes(now_is, now)
        yield from self._state(now_is, now, "gpu_lost", now_is.is_lost, "the GPU does not answer: it is lost")
        if now_is.is_lost:
            return
        order = now_is.recovery_action
        yield from self._state(now_is, now, "gpu_unavailable", order in _ORDERED, f"the driver says: {order}")
        advises = bool(order) and order not in _ORDERED
        yield from self._state(now_is, now, "gpu_recovery", advises, f"the driver advises: {order}")
        failed, pending = now_is.remap_failed, now_is.remap_pending
        yield from self._state(now_is, now, "row_remap_failed", failed, "a row of its memory could not be remapped")
        yield from self._state(
            now_is, now, "row_remap_pending", pending, "a row of its memory is to be remapped at the next reset"
        )
        yield from self._ecc(now_is, now)
        yield from self._links(now_is, now)
        yield from self._lasts(now_is, now, "gpu_hot", self._heat(now_is))
        slowed = ", ".join(name for name in now_is.throttle_reasons if name in _THROTTLED)
        yield from self._lasts(now_is, now, "gpu_throttled", f"its clock is held down: {slowed}" if slowed else "")
        yield from self._lasts(now_is, now, "pcie_degraded", self._narrow(now_is))

    def _heat(self, reading: GpuReading) -> str:
        own = reading.slowdown_c
        limit = own if own else self._config.hot_c
        if reading.temperature_c is None or reading.temperature_c <= limit:
            return ""
        return f"{reading.temperature_c} C, above {f'its slowdown threshold of {limit} C' if own else f'{limit} C'}"

    def _narrow(self, reading: GpuReading) -> str:
        if reading.utilisation is None or reading.utilisation <= self._config.load:
            return ""
        parts = [
            f"{name} {value} of {best}"
            for name, value, best in (
                ("width", reading.pcie_width, reading.pcie_width_max),
                ("generation", reading.pcie_generation, reading.pcie_generation_max),
            )
            if value is not None and best is not None and value < best
        ]
        return f"PCIe at {reading.utilisation} % use: {', '.join(parts)}" if parts else ""

    def _ecc(self, reading: GpuReading, now: float) -> Iterator[Sign]:
        count = reading.ecc_uncorrected
        if count is None:
            return
        before = self._errors.get(reading.uuid)
        self._errors[reading.uuid] = count
        if before is not None and count > before:
            text = f"uncorrected memory errors went from {before} to {count}"
            yield self._sign(reading, now, "ecc_uncorrected", f"ecc:{count}:{now:.0f}", text)

    def _links(self, reading: GpuReading, now: float) -> Iterator[Sign]:
        """Links that were up: one without a cable or bridge is down from the beginning."""
        if reading.nvlinks_down is None:
            return
        down = frozenset(reading.nvlinks_down)
        never_up = self._never_up[reading.uuid] = self._never_up.get(reading.uuid, down) & down
        gone = sorted(down - never_up)
        text = f"NVLink {', '.join(map(str, gone))} went down"
        yield from self._state(reading, now, "nvlink_down", bool(gone), text)

    def _codes(self, reading: GpuReading, now: float) -> Iterator[Sign]:
        """Xids, by what the catalogue knows of the bare code: the kernel's message says more where it can be read."""
        for code in dict.fromkeys(reading.xids):
            key, last = self._xids.get((reading.uuid, code), ("", float("-inf")))
            is_new = now - last > xid.REPEAT_S
            self._xids[(reading.uuid, code)] = key, _ = (f"xid:{code}:{now:.0f}" if is_new else key), now
            line = Line(text="", raw="", order=0, clock=now)
            [found] = xid.judge([xid.Event(reading.bus, code, "", None, line)], job_died=False, host=None)
            if is_new and not found.is_benign and found.action not in ("none", "user_code"):
                yield self._sign(reading, now, f"xid_{code}", key, found.note)

    def _state(self, reading: GpuReading, now: float, kind: str, holds: bool | None, text: str) -> Iterator[Sign]:
        """What is certain at once, and holds until it does not; None: it cannot be said."""
        name = (reading.uuid, kind)
        if holds is None:
            return
        if not holds:
            # the next time is another event
            if (past := self._lasting.get(name)) is not None and not past.is_over:
                self._lasting[name] = _Lasting(0, now, now, is_over=True)
            return
        past = self._lasting.get(name)
        if past is None or past.is_over:
            since = f":{now:.0f}" if past else ""
            past = self._lasting[name] = _Lasting(1, now, now, suffix=since)
        yield self._sign(reading, past.began, kind, f"{kind}:{self._boot_id}{past.suffix}", text)

    def _lasts(self, reading: GpuReading, now: float, kind: str, text: str) -> Iterator[Sign]:
        """What may pass: a sign from the third look in a row on."""
        name = (reading.uuid, kind)
        if not text:
            self._lasting.pop(name, None)
            return
        past = self._lasting.get(name)
        if past is None or now - past.last > self._config.gap_s:
            past = _Lasting(0, now, now, suffix=f"{now:.0f}")
        past = self._lasting[name] = msgspec.structs.replace(past, looks=past.looks + 1, last=now)
        if past.looks >= self._config.looks:
            yield self._sign(reading, past.began, kind, f"{kind}:{past.suffix}", f"{text}, {past.looks} looks in a row")

    def _sign(self, reading: GpuReading, time: float, kind: str, key: str, text: str) -> Sign:
        place = f"GPU {reading.index}" + (f" ({reading.bus})" if reading.bus else "")
        return Sign(
            key=f"gpu:{reading.uuid}:{key}",
            kind=kind,
            device=reading.bus or reading.uuid,
            evidence=f"{place}: {text}",
            time=time,
        )


class _Lasting(msgspec.Struct, frozen=True):
    looks: int
    began: float
    last: float
    suffix: str = ""
    """Of the key, so that the next time has another."""
    is_over: bool = False
