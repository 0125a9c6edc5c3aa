"""How do ranks come into being in milliseconds? By fork from a process that has imported torch and nothing else done.

One middle process forks all ranks of a request and ends, so they become the keeper's own children; only then the
keeper is told. A rank copies nothing of what the zygote holds but its imports.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from evertrain.worker import disguise, environment, freshness, hugepages, launch, preload, store, talk, version
from evertrain.worker.launch import Given, Go

MOST_DESCRIPTORS = 253
"""The kernel passes no more at once."""


def main(given: Given, startup: frozenset[str]) -> None:
    """Serve forks. Returns in ranks only, when their script is done."""
    disguise.take_stdin(given["stdin"])
    disguise.die_with_parent(given["keeper"])
    disguise.name_process("evertrain-zygote")
    given = version.enter(given)
    channel, command = given["channel"], given["command"]
    try:
        environment.check(command)
        preload.load(command, given["preload"], startup)
    except preload.Unfit as unfit:
        talk.refuse(channel, str(unfit), unfit.instead)
    preload.end_idle_threads()
    if reason := preload.why_not_fork():
        talk.refuse(channel, reason, "parked")
    hugepages.gather()
    imported = freshness.Imported(command, given.get("code_root", ""))
    channel, go = _serve(given, imported)
    launch.run(go, {**given, "channel": channel}, startup)


def _serve(given: Given, imported: freshness.Imported) -> tuple[int, Go]:
    """Fork whenever the keeper asks. In a rank: its channel, and what it was told at `go`."""
    control: int = given["channel"]
    _say(control, {"is": "ready"})
    while True:
        request, descriptors = _receive(control)
        _stop_if_stale(given, imported, request.get("code", ""))
        ranks: int = request["ranks"]
        channels, listener = descriptors, None
        if len(descriptors) > ranks + 1:
            *channels, listener = descriptors
        told, tell = os.pipe()
        middle = os.fork()
        if middle == 0:
            number = _fork_all(len(channels), tell)
            channel = channels[number]
            is_store = number == ranks
            os.setsid()
            for descriptor in {control, told, tell, *descriptors} - {channel, listener if is_store else None}:
                os.close(descriptor)
            if is_store:
                assert listener is not None
                store.serve(channel, listener)
            if reason := preload.why_not_fork():
                talk.refuse(channel, reason, "parked")
            return channel, launch.wait(channel, given["keeper"])
        os.close(tell)
        with open(told, "rb") as lines:
            *pids, last = [*lines.read().split(b"\n")]
        os.waitpid(middle, 0)
        for descriptor in descriptors:
            os.close(descriptor)
        _say(control, {"is": "forked", "pids": [int(pid) for pid in pids], "error": last.decode()})


def _stop_if_stale(given: Given, imported: freshness.Imported, digest: str) -> None:
    """The user has edited something: what it would be like to start now is not what this process is like."""
    control = given["channel"]
    if digest != version.digest(given):
        talk.last_words(control, {"is": "stale", "reason": "it has imported another version of the code"})
    try:
        environment.check(given["command"])
    except preload.Unfit as unfit:
        talk.refuse(control, str(unfit), unfit.instead)
    if file := imported.changed():
        talk.last_words(control, {"is": "stale", "reason": f"{file} has changed"})


def _fork_all(number: int, tell: int) -> int:
    """In the middle process: fork so many, tell their pids, end. Returns in the children: which one it is."""
    for index in range(number):
        try:
            pid = os.fork()
        except OSError as error:
            os.write(tell, str(error).encode())
            break
        if pid == 0:
            return index
        os.write(tell, b"%d\n" % pid)
    os._exit(0)


def _receive(control: int) -> tuple[dict[str, Any], list[int]]:
    """The next request and the descriptors that came with it. Without a keeper there is none, and no zygote."""
    sock = socket.socket(fileno=control)
    try:
        line, descriptors = b"", []
        while not line.endswith(b"\n"):
            received, more, _, _ = socket.recv_fds(sock, 1 << 16, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
            if not received:
                sys.stderr.flush()
                os._exit(0)
            line += received
            descriptors += more
    finally:
        # the number is not the object's to close: a rank may use it for something else by then
        sock.detach()
    return json.loads(line), descriptors


def _say(control: int, message: dict[str, Any]) -> None:
    os.write(control, json.dumps(message).encode() + b"\n")
