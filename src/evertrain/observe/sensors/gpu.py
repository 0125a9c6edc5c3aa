"""How are the GPUs of this node? NVML, through nvidia-ml-py where it is installed (`evertrain[gpu]`).

What a driver or GPU cannot say is None in its reading: only a library that does not answer at all is blind. NVML may
hang when a GPU does, so every look is made in a thread of its own.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from evertrain.model.sensing import GpuReading, Seen, Sign

MAX_LINKS = 36
LINKS_EVERY = 4
"""Looks: the state of NVLinks is one call for each link."""
_MAX_EVENTS = 64
_MOST_NAMED = 8
_EVENT_WAIT_MS = 1
_XID_EVENT = 0x8
_ECC_UNCORRECTED, _ECC_VOLATILE = 1, 0
_SLOWDOWN = 1
_CLOCK_SM = 1
_FIELD_LINKS, _FIELD_RECOVERY = 91, 230
_THROTTLE = {0x8: "hw_slowdown", 0x20: "sw_thermal", 0x40: "hw_thermal", 0x80: "hw_power_brake", 0x4: "sw_power_cap"}
_RECOVERY = {
    1: "GPU reset required", 2: "node reboot required", 3: "drain P2P", 4: "drain and reset", 5: "recover IMEX domain",
    6: "bus reset required", 7: "system reboot required",
}  # fmt: skip
_INVALID, _NOT_SUPPORTED, _NO_PERMISSION, _DRIVER_NOT_LOADED = 2, 3, 4, 9
_LIBRARY_NOT_FOUND, _IS_LOST, _RESET_REQUIRED = 12, 15, 16
_CANNOT_SAY = frozenset({_INVALID, _NOT_SUPPORTED, _NO_PERMISSION, 6, 13, 21, 25, 26})
"""Also: not found, function missing, no data, other version, deprecated. Of a field, not of the device."""
_CONTROL = Path("/dev/nvidiactl")

Rules = Callable[[Sequence[GpuReading], float], Sequence[Sign]]


class GpuSensor:
    name = "gpu"
    period_s = 3.0
    """Three looks, which heat must last, are done in less than 10 s."""
    limit_s = 3.0

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._nvml: _Nvml | None = None
        self.readings: tuple[GpuReading, ...] = ()
        """Of the last look."""
        self._began: float | None = None
        """Of the look that is under way."""
        self._was_slow = False

    def look(self, now: float) -> Seen:
        begun = self._began = time.monotonic()
        try:
            self._nvml = self._nvml or _Nvml()
            self.readings, troubles = self._nvml.read()
        except _Nothing as why:
            return Seen(absent=str(why)) if why.is_absent else Seen(blind=str(why))
        finally:
            self._began, took = None, time.monotonic() - begun
            self._was_slow = took > self.limit_s
        if not self.readings:
            self.close()  # it may be another driver by now
        if took > self.limit_s:
            troubles.append(f"NVML took {took:.1f} s to answer")
        signs = tuple(self._rules(self.readings, now))
        return Seen(signs=signs, last=_in_words(self.readings), blind="; ".join(troubles))

    @property
    def can_be_asked(self) -> bool:
        """Whether there are GPUs and NVML has answered in time: otherwise nobody should wait for what it says."""
        began = self._began
        is_late = began is not None and time.monotonic() - began > self.limit_s
        return self._nvml is not None and not self._was_slow and not is_late

    def computing(self) -> dict[int, tuple[str, ...]]:
        """On which GPUs each process computes at this moment. Blocks as `look` does, and may be called beside it."""
        return self._nvml.computing() if self._nvml is not None else {}

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.close()
        self._nvml = None


class _Nothing(Exception):
    """There is nobody to ask."""

    def __init__(self, why: str, *, is_absent: bool) -> None:
        super().__init__(why)
        self.is_absent = is_absent


class _Failed(Exception):
    """NVML refuses to speak of a device."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class _Device(msgspec.Struct):
    """What does not change, and what is asked seldom."""

    index: int
    handle: Any
    name: str
    """Its UUID."""
    bus: str = ""
    slowdown_c: int | None = None
    width_max: int | None = None
    generation_max: int | None = None
    links: int = MAX_LINKS
    links_down: tuple[int, ...] | None = None


class _Nvml:
    """The library, and the devices that it had when it was opened."""

    def __init__(self) -> None:
        has_gpu = _CONTROL.exists()
        try:
            self._api: Any = importlib.import_module("pynvml")
        except ImportError:
            why = "nvidia-ml-py is not installed: pip install 'evertrain[gpu]'"
            raise _Nothing(why, is_absent=not has_gpu) from None
        self.devices: list[_Device] = []
        self._lost: list[GpuReading] = []
        self._troubles: list[str] = []
        self._looks = 0
        self._events: Any = None
        try:
            self._api.nvmlInit()
        except self._api.NVMLError as error:
            is_absent = not has_gpu and error.value in (_LIBRARY_NOT_FOUND, _DRIVER_NOT_LOADED)
            why = "no NVIDIA driver on this node" if is_absent else f"NVML does not start: {error}"
            raise _Nothing(why, is_absent=is_absent) from error
        try:
            count = self._api.nvmlDeviceGetCount()
            for index in range(count):
                self._add(index)
        except self._api.NVMLError as error:
            self.close()
            raise _Nothing(f"NVML does not count its devices: {error}", is_absent=False) from error
        if not count:
            self.close()
            raise _Nothing("the NVIDIA driver has no GPU on this node", is_absent=True)
        self._listen()

    def close(self) -> None:
        for call, *args in ((self._api.nvmlEventSetFree, self._events), (self._api.nvmlShutdown,)):
            try:
                if args != [None]:
                    call(*args)
            except self._api.NVMLError:
                pass  # it is given up in any case
        self._events = None

    def read(self) -> tuple[tuple[GpuReading, ...], list[str]]:
        """A reading of each device that answers, and what is wrong with the others."""
        xids = self._xids()
        readings, troubles = list(self._lost), list(self._troubles)
        for device in self.devices:
            told = tuple(code for address, code in xids if address == _address(device.handle))
            known: dict[str, Any] = {"index": device.index, "uuid": device.name, "bus": device.bus, "xids": told}
            try:
                readings.append(self._reading(device, known))
            except _Failed as failed:
                if failed.code == _IS_LOST:
                    readings.append(GpuReading(**known, is_lost=True))
                elif failed.code == _RESET_REQUIRED:
                    readings.append(GpuReading(**known, recovery_action=_RECOVERY[1]))
                else:
                    troubles.append(f"GPU {device.index} ({device.bus or device.name}): {failed}")
        self._looks += 1
        return tuple(readings), troubles

    def computing(self) -> dict[int, tuple[str, ...]]:
        found: dict[int, tuple[str, ...]] = {}
        for device in self.devices:
            place = f"GPU {device.index}" + (f" ({device.bus})" if device.bus else "")
            try:
                pids = self.processes(device)
            except _Failed:
                continue  # each look says so
            for pid in pids:
                found[pid] = (*found.get(pid, ()), place)
        return found

    def processes(self, device: _Device) -> tuple[int, ...]:
        found = [
            process.pid
            for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3")
            for process in self._ask(name, device.handle) or ()
        ]
        return tuple(dict.fromkeys(found))

    def _reading(self, device: _Device, known: dict[str, Any]) -> GpuReading:
        ask, handle = self._ask, device.handle
        temperature = ask("nvmlDeviceGetTemperatureV", handle, 0)
        if temperature is None:
            temperature = ask("nvmlDeviceGetTemperature", handle, 0)
        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:
            reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
        use = ask("nvmlDeviceGetUtilizationRates", handle)
        rows = ask("nvmlDeviceGetRemappedRows", handle)
        if self._looks % LINKS_EVERY == 0:
            device.links_down = self._links_down(device)
        return GpuReading(
            **known,
            temperature_c=temperature,
            slowdown_c=device.slowdown_c,
            throttle_reasons=tuple(name for bit, name in _THROTTLE.items() if reasons & bit),
            pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            pcie_width_max=device.width_max,
            pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            pcie_generation_max=device.generation_max,
            utilisation=use.gpu if use is not None else None,
            sm_clock_mhz=ask("nvmlDeviceGetClockInfo", handle, _CLOCK_SM),
            ecc_uncorrected=ask("nvmlDeviceGetTotalEccErrors", handle, _ECC_UNCORRECTED, _ECC_VOLATILE),
            remapped_uncorrectable=rows[1] if rows is not None else None,
            remap_pending=bool(rows[2]) if rows is not None else None,
            remap_failed=bool(rows[3]) if rows is not None else None,
            nvlinks_down=device.links_down,
            recovery_action=self._recovery(handle),
            processes=self.processes(device),
        )

    def _add(self, index: int) -> None:
        try:
            handle = self._api.nvmlDeviceGetHandleByIndex(index)
        except self._api.NVMLError as error:
            if error.value == _IS_LOST:
                self._lost.append(GpuReading(index=index, uuid=f"index-{index}", is_lost=True))
            else:
                self._troubles.append(f"GPU {index}: {error}")
            return
        device = _Device(index, handle, f"index-{index}")
        try:
            device.name = self._ask("nvmlDeviceGetUUID", handle) or device.name
            address = self._ask("nvmlDeviceGetPciInfo_v3", handle)
            device.bus = _bus(address.busId) if address is not None else ""
            device.slowdown_c = self._ask("nvmlDeviceGetTemperatureThreshold", handle, _SLOWDOWN)
            device.width_max = self._ask("nvmlDeviceGetMaxPcieLinkWidth", handle)
            device.generation_max = self._ask("nvmlDeviceGetMaxPcieLinkGeneration", handle)
            if (links := self._field(handle, _FIELD_LINKS)) is not None:
                device.links = min(links, MAX_LINKS)
        except _Failed:
            pass  # each look says so
        self.devices.append(device)

    def _listen(self) -> None:
        """For Xid codes; where the driver does not tell them so, the kernel's messages do."""
        try:
            self._events = self._api.nvmlEventSetCreate()
        except self._api.NVMLError:
            return
        for device in self.devices:
            try:
                self._api.nvmlDeviceRegisterEvents(device.handle, _XID_EVENT, self._events)
            except self._api.NVMLError:
                continue

    def _xids(self) -> list[tuple[int | None, int]]:
        found: list[tuple[int | None, int]] = []
        while self._events is not None and len(found) < _MAX_EVENTS:
            try:
                event = self._api.nvmlEventSetWait_v2(self._events, _EVENT_WAIT_MS)
            except self._api.NVMLError:
                break  # nothing has come, in most cases
            if event.eventType == _XID_EVENT:
                found.append((_address(event.device), event.eventData))
        return found

    def _links_down(self, device: _Device) -> tuple[int, ...] | None:
        states = []
        for link in range(device.links):
            state = self._ask("nvmlDeviceGetNvLinkState", device.handle, link)
            if state is None and device.links == MAX_LINKS:
                break  # the driver does not say how many there are
            states.append(state)
        return tuple(link for link, state in enumerate(states) if state == 0) if states else None

    def _recovery(self, handle: Any) -> str:
        action = self._field(handle, _FIELD_RECOVERY)
        return _RECOVERY.get(action, f"recovery action {action}") if action else ""

    def _field(self, handle: Any, field: int) -> int | None:
        values = self._ask("nvmlDeviceGetFieldValues", handle, [field])
        return values[0].value.uiVal if values is not None and values[0].nvmlReturn == 0 else None

    def _ask(self, name: str, *args: Any) -> Any:
        """The answer; None: this driver, GPU or binding cannot say."""
        call = getattr(self._api, name, None)
        if call is None:
            return None
        try:
            return call(*args)
        except self._api.NVMLError as error:
            if error.value in _CANNOT_SAY:
                return None
            raise _Failed(error.value, str(error)) from error


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _bus(address: str | bytes) -> str:
    """As kernel messages name it: four digits of the domain, lower case."""
    text = (address.decode() if isinstance(address, bytes) else address).lower()
    domain, _, rest = text.partition(":")
    return f"{domain[-4:]}:{rest}"


def _in_words(readings: Sequence[GpuReading]) -> str:
    def each() -> Iterator[str]:
        yield f"{len(readings)} GPUs" if len(readings) != 1 else "1 GPU"
        if lost := sum(reading.is_lost for reading in readings):
            yield f"{lost} lost"
        if temperatures := [one.temperature_c for one in readings if one.temperature_c is not None]:
            yield f"up to {max(temperatures)} C"
        if used := [one.utilisation for one in readings if one.utilisation is not None]:
            yield f"{sum(used) // len(used)} % used"
        if pids := sorted({pid for reading in readings for pid in reading.processes}):
            named = ", ".join(map(str, pids[:_MOST_NAMED])) + (", …" if len(pids) > _MOST_NAMED else "")
            yield f"by process{'' if len(pids) == 1 else 'es'} {named}"

    return ", ".join(each())
