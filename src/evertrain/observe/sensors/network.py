"""How are this node's ports doing? Interfaces and RDMA ports that carry the job's traffic, from /sys.

Which ones matter is settled when the first of them has a carrier: the one with the agent's address, that of the default
route, those that NCCL or gloo were told to use, the physical ones below these, and every RDMA port. What belongs to
containers is left out, and a port that comes later (a VPN, a cable) is nobody's promise. A look costs about a
millisecond for each port.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from evertrain.model.sensing import PortReading, Seen, Sign

Rules = Callable[[Sequence[PortReading], float], Sequence[Sign]]
TcpRules = Callable[[int, int, float], Sequence[Sign]]

_OTHERS = ("lo", "docker", "veth", "br-", "virbr", "cni", "cali", "flannel", "kube", "tunl", "dummy", "ifb")
"""Begin the names of what is no way to other machines, unless the agent's own address is there."""
_NAMED_BY = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_DEEP = 3
_UP, _GATEWAY_ANY = 1, "00000000"


class NetworkSensor:
    """`rules` say what is trouble."""

    name = "network"
    period_s = 5.0
    limit_s = 5.0

    def __init__(
        self,
        rules: Rules,
        tcp_rules: TcpRules,
        *,
        address: str,
        sys: Path = Path("/sys"),
        proc: Path = Path("/proc"),
        environ: Mapping[str, str] = os.environ,
        addresses: Callable[[], Mapping[str, Sequence[str]]] | None = None,
    ) -> None:
        """`address`: of the agent; empty: there is no job. `addresses`: by interface, those that it has."""
        self._rules, self._tcp_rules = rules, tcp_rules
        self._address = address
        self._net, self._rdma, self._proc = sys / "class/net", sys / "class/infiniband", proc
        self._environ = environ
        self._addresses = addresses or _own_addresses
        self._ports: tuple[str, ...] = ()
        self._segments: tuple[int, int] | None = None
        self.readings: tuple[PortReading, ...] = ()
        """Of the last look."""

    def look(self, now: float) -> Seen:
        try:
            if not self._ports:
                self._ports = tuple(name for name in self._wanted() if self._read(name).is_up)
            if not self._ports:
                return Seen(absent=self._nothing())
            self.readings = readings = tuple(self._read(name) for name in self._ports)
        except OSError as error:
            return Seen(blind=f"{error.filename or self._net} cannot be read: {error.strerror or error}")
        signs = [*self._rules(readings, now)]
        before, self._segments = self._segments, self._count_segments()
        if self._segments is not None:
            signs += self._tcp_rules(*self._segments, now)
        return Seen(signs=tuple(signs), last=self._in_words(readings, before))

    # -- which ports matter --------------------------------------------------------------------------------------------

    def _nothing(self) -> str:
        if self._is_alone():
            return f"the job's traffic stays on this machine ({self._address})"
        return "no interface with a carrier carries the job's traffic"

    def _is_alone(self) -> bool:
        own = _resolved(self._address)
        return bool(own) and all(address.startswith("127.") or address == "::1" for address in own)

    def _wanted(self) -> list[str]:
        if self._is_alone():
            return []
        present = sorted(entry.name for entry in self._net.iterdir())
        own = _resolved(self._address)
        with_address = [name for name, has in self._addresses().items() if not own.isdisjoint(has)]
        named = [name for name in present for rule in self._rules_of_names() if name.startswith(rule)]
        others = [name for name in (*named, *self._default_routes()) if not name.startswith(_OTHERS)]
        wanted = [name for name in dict.fromkeys((*with_address, *others)) if name in present]
        for name in tuple(wanted):
            wanted += self._below(name)
        return [*dict.fromkeys(wanted), *self._rdma_ports()]

    def _rules_of_names(self) -> Iterator[str]:
        for variable in _NAMED_BY:
            value = self._environ.get(variable, "")
            if not value.startswith("^"):  # all but these says too little
                yield from filter(None, value.removeprefix("=").split(","))

    def _default_routes(self) -> Iterator[str]:
        for line in (_text(self._proc / "net/route") or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 7 and fields[1] == fields[7] == _GATEWAY_ANY and int(fields[3], 16) & _UP:
                yield fields[0]
        for line in (_text(self._proc / "net/ipv6_route") or "").splitlines():
            fields = line.split()
            if len(fields) > 9 and fields[0].strip("0") == "" and fields[1] == "00" and fields[4].strip("0") != "":
                yield fields[9]

    def _below(self, name: str, deep: int = _DEEP) -> list[str]:
        """The physical ports that a bond or a VLAN consists of."""
        try:
            lower = sorted(entry.name[6:] for entry in (self._net / name).iterdir() if entry.name.startswith("lower_"))
        except OSError:
            return []
        found: list[str] = []
        for one in lower if deep else ():
            found += [one] if (self._net / one / "device").exists() else []
            found += self._below(one, deep - 1)
        return found

    def _rdma_ports(self) -> list[str]:
        return sorted(f"{port.parent.parent.name}/{port.name}" for port in self._rdma.glob("*/ports/*"))

    # -- what they say -------------------------------------------------------------------------------------------------

    def _read(self, name: str) -> PortReading:
        device, is_rdma, number = name.partition("/")
        return self._read_rdma(device, number) if is_rdma else self._read_interface(name)

    def _read_interface(self, name: str) -> PortReading:
        folder = self._net / name
        if not folder.exists():
            return PortReading(name=name, is_up=False)  # the driver has let go of it
        statistics = folder / "statistics"
        # without a carrier some drivers refuse to say so
        has_carrier = _text(folder / "carrier") == "1"
        state = _text(folder / "operstate")
        speed = _number(folder / "speed")
        return PortReading(
            name=name,
            is_up=has_carrier and state in ("up", "unknown"),
            carrier_changes=_number(folder / "carrier_changes"),
            speed_mbps=speed if speed is not None and speed > 0 else None,
            received_bytes=_count(statistics / "rx_bytes"),
            sent_bytes=_count(statistics / "tx_bytes"),
            received_packets=_count(statistics / "rx_packets"),
            sent_packets=_count(statistics / "tx_packets"),
            errors=_count(statistics / "rx_errors") + _count(statistics / "tx_errors"),
            dropped=_count(statistics / "rx_missed_errors") + _count(statistics / "tx_dropped"),
            unclaimed=_count(statistics / "rx_dropped"),
        )

    def _read_rdma(self, device: str, number: str) -> PortReading:
        folder = self._rdma / device / "ports" / number
        counters = folder / "counters"
        downs = _number(counters / "link_downed")
        rate = (_text(folder / "rate") or "").split()
        return PortReading(
            name=f"{device}/{number}",
            # "4: ACTIVE"; 5 is ACTIVE_DEFER, which lasts for a moment
            is_up=(_text(folder / "state") or "").partition(":")[0] in ("4", "5"),
            # each time it was lost it has gone and come
            carrier_changes=2 * downs if downs is not None else None,
            speed_mbps=int(float(rate[0]) * 1000) if rate and rate[0].replace(".", "", 1).isdecimal() else None,
            received_bytes=4 * _count(counters / "port_rcv_data"),
            sent_bytes=4 * _count(counters / "port_xmit_data"),
            received_packets=_count(counters / "port_rcv_packets"),
            sent_packets=_count(counters / "port_xmit_packets"),
            errors=_count(counters / "port_rcv_errors") + _count(folder / "hw_counters/rx_icrc_encapsulated"),
            dropped=_count(counters / "port_xmit_discards"),
            is_rdma=True,
        )

    def _in_words(self, readings: Sequence[PortReading], segments: tuple[int, int] | None) -> str:
        """`segments`: of the look before."""
        words = []
        for one in readings:
            speed = f" {one.speed_mbps / 1000:g} Gb/s" if one.speed_mbps is not None and one.is_up else ""
            words.append(f"{one.name} {'up' if one.is_up else 'down'}{speed}")
        if segments is not None and self._segments is not None:
            sent, again = (now - then for now, then in zip(self._segments, segments, strict=True))
            if sent > 0 and again >= 0:
                words.append(f"TCP has sent {again / sent:.1%} of {sent:,} segments again")
        return ", ".join(words)

    def _count_segments(self) -> tuple[int, int] | None:
        """What TCP has sent, and sent again; None where the kernel does not say."""
        lines = [
            line.split() for line in (_text(self._proc / "net/snmp") or "").splitlines() if line.startswith("Tcp:")
        ]
        if len(lines) != 2 or len(lines[0]) != len(lines[1]):
            return None
        table = dict(zip(lines[0], lines[1], strict=True))
        if not {"OutSegs", "RetransSegs"} <= table.keys():
            return None
        return int(table["OutSegs"]), int(table["RetransSegs"])


def _own_addresses() -> dict[str, list[str]]:
    return {
        name: [one.address.partition("%")[0] for one in has if one.family in (socket.AF_INET, socket.AF_INET6)]
        for name, has in psutil.net_if_addrs().items()
    }


def _resolved(address: str) -> frozenset[str]:
    """The user may have given a name."""
    if not address:
        return frozenset()
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:
        return frozenset((address,))
    return frozenset(str(one[4][0]).partition("%")[0] for one in found)


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.removeprefix("-").isdecimal() else None


def _count(path: Path) -> int:
    """0 where there is no such counter; one that cannot be read just now must not seem to have been reset."""
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return 0
    except ValueError as error:
        raise OSError(None, f"no number: {error}", str(path)) from None
