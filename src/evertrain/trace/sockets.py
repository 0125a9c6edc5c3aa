"""How are the TCP connections of a network namespace doing, and which of its interfaces has which address?

By the kernel's own word: sock_diag with TCP_INFO, and rtnetlink for interfaces. It takes no privileges, and nobody
else's help. To list all connections the kernel goes through a table that is large on a large machine (a millisecond or
two, however few there are); to ask again for one that is known takes it three microseconds. A namespace that is not our
own is entered by a thread, once, to open two sockets there; that does take the right to (CAP_SYS_ADMIN).
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import threading
from collections.abc import Sequence
from typing import NamedTuple

Address = tuple[bytes, int]
"""4 or 16 bytes, and the port; an IPv4 address inside IPv6 is an IPv4 address."""

_SOCK_DIAG, _ROUTE = 4, 0
_SOCK_DIAG_BY_FAMILY, _GETLINK, _GETADDR = 20, 18, 22
_REQUEST, _DUMP = 1, 0x300
_ERROR, _DONE = 2, 3
_INFO = 2
_ATTRIBUTE_TYPE = 0x3FFF
_IFA_ADDRESS, _IFA_LOCAL, _IFLA_CARRIER = 1, 2, 33
_CLONE_NEWNET = 0x40000000
_MAPPED = bytes(10) + b"\xff\xff"
_ANSWER_S = 1.0
_BUFFER_BYTES = 1 << 16
_ONE_BYTES = 4096
_AT_ONCE = 32
"""So many questions before their answers are read: they must fit into the socket's buffer."""

_ESTABLISHED, _SYN_SENT, _FIN_WAIT1, _CLOSE_WAIT, _LAST_ACK = 1, 2, 4, 8, 9
_STATES = sum(1 << state for state in (_ESTABLISHED, _SYN_SENT, _FIN_WAIT1, _CLOSE_WAIT, _LAST_ACK))
"""Those in which something can be on its way."""

_GONE = frozenset({errno.ENOENT, errno.ESTALE})
_HEAD = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_QUEUES = struct.Struct("=IIIII")  # expires, receive queue, send queue, uid, inode
_PORTS = struct.Struct(">HH")
_SOCKET_BYTES = 72
# of `struct tcp_info`, as it has been since Linux 4.19; what later ones add stands behind it
_FIXED = struct.Struct("=BBBBBBBB24I4Q6I4Q2IQ")


class Connection(NamedTuple):
    """One end of a connection. What counts up does so since it was made."""

    inode: int
    own: Address
    peer: Address
    state: int
    rqueue: int
    """Bytes that have come and were not read."""
    backoff: int
    """So often the time until something is sent again was doubled."""
    unacked: int
    """Segments."""
    notsent: int
    """Bytes."""
    rtt_us: int
    cwnd: int
    rate: int
    """Bytes a second, as the kernel measured it last."""
    last_ack_ms: int
    """Ago."""
    sent: int
    """Bytes, those sent again included; counts up."""
    acked: int
    """Bytes; counts up."""
    received: int
    """Bytes; counts up."""
    resent: int
    """Segments; counts up."""
    busy_us: int
    """In so much time there was something to send; counts up, as the next two do."""
    rwnd_us: int
    """... and the receiver had no room,"""
    sndbuf_us: int
    """... or the own buffer had none."""
    question: bytes
    """To ask for it again."""


class Namespace:
    """A network namespace. Not for several threads at once."""

    def __init__(self, pid: int | None = None) -> None:
        """Of the process; None: our own. Raises OSError where it may not be entered."""
        self._diag, self._route = _opened(pid)
        self._has_ipv6 = True

    def close(self) -> None:
        self._diag.close()
        self._route.close()

    def connections(self) -> list[Connection]:
        """All TCP connections. Raises OSError."""
        found: list[Connection] = []
        self._list(socket.AF_INET, found)
        if self._has_ipv6:
            try:
                self._list(socket.AF_INET6, found)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.EOPNOTSUPP):
                    raise
                self._has_ipv6 = False  # the kernel has none
        return found

    def again(self, known: Sequence[Connection]) -> list[Connection]:
        """These connections as they are now; without those that are gone. Raises OSError."""
        found: list[Connection] = []
        for first in range(0, len(known), _AT_ONCE):
            some = known[first : first + _AT_ONCE]
            self._diag.send(b"".join([one.question for one in some]))
            for _ in some:
                try:
                    _take_connections(self._diag.recv(_ONE_BYTES), found)
                except OSError as error:
                    if error.errno not in _GONE:
                        raise
        return found

    def addresses(self) -> dict[bytes, int]:
        """Which interface, by its number, has which address. Raises OSError."""
        found: dict[bytes, int] = {}
        self._ask(self._route, _GETADDR, _DUMP, struct.pack("=BBBBI", 0, 0, 0, 0, 0))
        done = False
        while not done:
            done = _take_addresses(self._route.recv(_BUFFER_BYTES), found)
        return found

    def has_carrier(self, interface: int) -> bool | None:
        """Whether there is somebody at the other end of the cable; None: it has gone, or nobody knows."""
        self._ask(self._route, _GETLINK, 0, struct.pack("=BBHiII", 0, 0, 0, interface, 0, 0))
        try:
            return _carrier(self._route.recv(_BUFFER_BYTES))
        except OSError as error:
            if error.errno == errno.ENODEV:
                return None
            raise

    def _list(self, family: int, found: list[Connection]) -> None:
        asked = _asked(family) + bytes(48)
        self._ask(self._diag, _SOCK_DIAG_BY_FAMILY, _DUMP, asked)
        done = False
        while not done:
            done = _take_connections(self._diag.recv(_BUFFER_BYTES), found)

    def _ask(self, link: socket.socket, kind: int, flags: int, body: bytes) -> None:
        link.send(_HEAD.pack(_HEAD.size + len(body), kind, _REQUEST | flags, 0, 0) + body)


def _opened(pid: int | None) -> tuple[socket.socket, socket.socket]:
    """A thread that has entered a namespace stays there, so it is one that ends."""
    found: list[socket.socket] = []
    trouble: list[OSError] = []

    def work() -> None:
        try:
            if pid is not None:
                _enter(pid)
            for protocol in (_SOCK_DIAG, _ROUTE):
                found.append(link := socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol))
                link.bind((0, 0))
                link.settimeout(_ANSWER_S)
        except OSError as error:
            trouble.append(error)

    thread = threading.Thread(target=work, name="network namespace", daemon=True)
    thread.start()
    thread.join()
    if trouble:
        for link in found:
            link.close()
        raise trouble[0]
    return found[0], found[1]


def _enter(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(descriptor)


def of_process(pid: int) -> int:
    """The namespace that a process is in, by its number. Raises OSError."""
    return os.stat(f"/proc/{pid}/ns/net").st_ino


def descriptors(pid: int) -> frozenset[str]:
    """What a process has open, by numbers; nothing where it has ended."""
    try:
        return frozenset(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return frozenset()


def inodes(pid: int) -> set[int]:
    """The sockets that a process holds. Raises OSError."""
    found = set()
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        try:
            target = os.readlink(f"{folder}/{name}")
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return found


def in_words(address: Address) -> str:
    """As it is usually written."""
    host, port = address
    family = socket.AF_INET if len(host) == 4 else socket.AF_INET6
    return (
        f"{socket.inet_ntop(family, host)}:{port}" if len(host) == 4 else f"[{socket.inet_ntop(family, host)}]:{port}"
    )


# -- what the kernel answers -------------------------------------------------------------------------------------------


def _take_connections(data: bytes, found: list[Connection]) -> bool:
    """Whether that was all."""
    at, size = 0, len(data)
    while at < size:
        length, kind, _, _, _ = _HEAD.unpack_from(data, at)
        if kind == _DONE:
            return True
        if kind == _ERROR:
            _raise(data, at)
        body, end = at + 16, at + length
        attribute = body + _SOCKET_BYTES
        while attribute < end:
            bytes_, which = _ATTRIBUTE.unpack_from(data, attribute)
            if which == _INFO:
                if bytes_ - 4 < _FIXED.size:
                    raise OSError(errno.EOPNOTSUPP, "this kernel's TCP does not count the bytes that it sends")
                if (one := _connection(data, body, attribute + 4)).inode:  # else nobody has it open any more
                    found.append(one)
            attribute += bytes_ + 3 & ~3
        at += length + 3 & ~3
    return False


def _connection(data: bytes, body: int, at: int) -> Connection:
    # struct tcp_info: 8 bytes, backoff among them; rto, ato, snd_mss, rcv_mss, unacked, sacked, lost, retrans, fackets,
    # last_data_sent, last_ack_sent, last_data_recv, last_ack_recv, pmtu, rcv_ssthresh, rtt, rttvar, snd_ssthresh,
    # snd_cwnd, advmss, reordering, rcv_rtt, rcv_space, total_retrans; pacing_rate, max_pacing_rate, bytes_acked,
    # bytes_received; segs_out, segs_in, notsent_bytes, min_rtt, data_segs_in, data_segs_out; delivery_rate, busy_time,
    # rwnd_limited, sndbuf_limited; delivered, delivered_ce; bytes_sent
    info = _FIXED.unpack_from(data, at)
    family, state = data[body], data[body + 1]
    _, rqueue, _, _, inode = _QUEUES.unpack_from(data, body + 52)
    # its addresses, its interface, and a cookie that no other one ever has
    name = data[body + 4 : body + 52]
    own_port, peer_port = _PORTS.unpack_from(name)
    if family == socket.AF_INET:
        own, peer = name[4:8], name[20:24]
    else:
        own, peer = _shortest(name[4:20]), _shortest(name[20:36])
    question = _HEAD.pack(72, _SOCK_DIAG_BY_FAMILY, _REQUEST, 0, 0) + _asked(family) + name
    return Connection(
        inode, (own, own_port), (peer, peer_port), state, rqueue,
        info[4], info[12], info[38], info[23], info[26], info[42], info[20],
        info[48], info[34], info[35], info[31], info[43], info[44], info[45], question,
    )  # fmt: skip


def _asked(family: int) -> bytes:
    return struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 1 << _INFO - 1, 0, _STATES)


def _shortest(address: bytes) -> bytes:
    return address[12:] if address.startswith(_MAPPED) else address


def _take_addresses(data: bytes, found: dict[bytes, int]) -> bool:
    at = 0
    while at < len(data):
        length, kind, _, _, _ = _HEAD.unpack_from(data, at)
        if kind == _DONE:
            return True
        if kind == _ERROR:
            _raise(data, at)
        (interface,) = struct.unpack_from("=I", data, at + 20)
        attribute = at + 24
        while attribute < at + length:
            bytes_, which = _ATTRIBUTE.unpack_from(data, attribute)
            # of a cable with two names on it, LOCAL is this end
            if which in (_IFA_ADDRESS, _IFA_LOCAL):
                found[bytes(data[attribute + 4 : attribute + bytes_])] = interface
            attribute += bytes_ + 3 & ~3
        at += length + 3 & ~3
    return False


def _carrier(data: bytes) -> bool | None:
    length, kind, _, _, _ = _HEAD.unpack_from(data, 0)
    if kind == _ERROR:
        _raise(data, 0)
    attribute = 32
    while attribute < length:
        bytes_, which = _ATTRIBUTE.unpack_from(data, attribute)
        if which & _ATTRIBUTE_TYPE == _IFLA_CARRIER:
            return bool(data[attribute + 4])
        attribute += bytes_ + 3 & ~3
    return None


def _raise(data: bytes, at: int) -> None:
    (number,) = struct.unpack_from("=i", data, at + 16)
    raise OSError(-number, os.strerror(-number))
