"""Where does a process stand? Stack dumps in any form, read into one shape.

py-spy (text of every version, `--native`, `--locals`, `--json`), faulthandler, gdb (`bt`, `py-bt`), kernel stacks, the
"failed collective" of PyTorch's time-outs, and ordinary tracebacks, alone or one after the other in one text. A dump
that failed is a dump too: that a process could not be read says something about it.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from evertrain.model.stacks import Dump, Frame, Thread

_LONGEST_LINE = 2_000
"""Characters of a line that are looked at; longer ones carry arguments, which nobody needs here."""


def read(text: str) -> tuple[Dump, ...]:
    """Every process whose stack `text` shows, in order; empty if it shows none."""
    if text.lstrip().startswith(("[", "{")) and (found := _read_json(text)):
        return found
    reader = _Reader()
    for line in text.splitlines():
        reader.take(line[:_LONGEST_LINE])
    return reader.finish()


# --- py-spy dump --json


class _JsonFrame(msgspec.Struct):
    name: str = ""
    filename: str = ""
    short_filename: str | None = None
    line: int = 0


class _JsonThread(msgspec.Struct):
    frames: list[_JsonFrame]
    pid: int | None = None
    thread_name: str | None = None
    os_thread_id: int | None = None
    active: bool = False
    owns_gil: bool = False


def _read_json(text: str) -> tuple[Dump, ...]:
    try:
        threads = msgspec.json.decode(text.encode(errors="replace"), type=list[_JsonThread])
    except (msgspec.MsgspecError, RecursionError):
        return ()
    by_pid: dict[int | None, list[Thread]] = {}
    for one in threads:
        frames = tuple(Frame(f.name, f.short_filename or f.filename, f.line or None) for f in one.frames)
        main = one.thread_name == "MainThread" or (one.thread_name is None and one.os_thread_id == one.pid is not None)
        state: Literal["active", "idle"] = "active" if one.active else "idle"
        by_pid.setdefault(one.pid, []).append(Thread(frames, one.thread_name or "", main, state, one.owns_gil))
    return tuple(Dump(tuple(found), pid) for pid, found in by_pid.items())


# --- everything that is text

# a collector may put the node's name or a time before every line, so only what begins a dump may stand anywhere
_PROCESS = re.compile(r"^(?P<prefix>(?:[\w.:\[\]/-]+\s+){0,3})Process (?P<pid>\d+)(?:: (?P<command>.*))?$")
_PY_SPY_THREAD = re.compile(
    r'^Thread (?P<id>\d+|0x[0-9a-fA-F]+) \((?P<state>active|idle)(?P<gil>\+gil)?\)(?:: "(?P<name>.*)")?$'
)
_FAULT_THREAD = re.compile(
    r"^(?:Stack|(?:(?P<current>Current thread)|Thread) 0x[0-9a-f]+(?: \[(?P<name>[^\]]*)\])?)"
    r" \(most recent call first\):"
)
_GDB_THREAD = re.compile(
    r"^Thread (?P<number>\d+) \((?:Thread 0x[0-9a-f]+ )?\(?LWP (?P<lwp>\d+)\)?(?: \"(?P<name>[^\"]*)\")?"
)
_KERNEL_STACK = re.compile(r"^\[<[0-9a-fx]+>\] (?P<function>[\w.]+)(?:\+0x|$)")
_TRACEBACK = re.compile(r"^Traceback \(most recent call (?P<order>first|last)\)")
_FAILED_COLLECTIVE = re.compile(r"Stack trace of the failed collective:(?P<first>.*)$")
_FAILURE = re.compile(
    r"Error: (?:Failed to |No such process|Could not |Permission)|^(?:Reason: )?(?:EPERM|ESRCH)\b"
    r"|Permission denied \(os error 13\)|Operation not permitted|ptrace: |Could not attach to process"
    r"|(?:timed? ?out|no answer|no output|no dump).{0,40}$",
    re.IGNORECASE,
)

_PY_SPY_FRAME = re.compile(r"^ {3,}(?P<function>\S.*?) \((?P<file>[^()]+?)(?::(?P<line>\d+))?\)$")
_FILE_FRAME = re.compile(r'^\s*File "(?P<file>[^"]*)", line (?P<line>\d+|\?+),? in (?P<function>.+)$')
_FROM_FRAME = re.compile(r"^\s*#\d+ (?P<function>\S+) from (?P<file>\S+):(?P<line>\d+)$")
_GDB_FRAME = re.compile(r"^\s*#\d+\s+(?:0x[0-9a-f]+ in )?(?P<function>[^\s(][^(]*?) ?(?:\(|$)")
_GDB_FIRST = re.compile(r"^\s*#\d+\s+(?:0x[0-9a-f]+ in |.+ from /|.+ at .+:\d+$)")
_GDB_PLACE = re.compile(r" (?:from (?P<library>\S+)|at (?P<file>\S+?):(?P<line>\d+))$")

_LOCALS = re.compile(r"^\s+(?:Arguments|Locals):$")


class _Reader:
    """Takes lines in order; a header begins a thread, what looks like a frame belongs to the last header."""

    def __init__(self) -> None:
        self._dumps: list[Dump] = []
        self._threads: list[Thread] = []
        self._frames: list[Frame] = []
        self._head = Thread()
        self._is_open = False
        """Whether a header announced the frames: without one, only frames that cannot be anything else count."""
        self._is_outermost_first = False
        self._form = ""
        self._pid: int | None = None
        self._command = ""
        self._failure = ""
        self._prefix = ""
        self._locals_indent = 0

    def take(self, line: str) -> None:
        line = line.rstrip()
        prefix = self._prefix
        if prefix and line.startswith(prefix):
            line = line[len(prefix) :]
        else:
            prefix = ""
        if found := _PROCESS.match(line):
            self._end_process()
            self._prefix = prefix or found["prefix"]
            self._pid, self._command = int(found["pid"]), found["command"] or ""
        elif found := _PY_SPY_THREAD.match(line):
            name = found["name"] or ""
            is_main = name == "MainThread" or (not name and found["id"] == str(self._pid))
            state: Literal["active", "idle"] = "active" if found["state"] == "active" else "idle"
            self._begin("py-spy", Thread((), name, is_main, state, bool(found["gil"])))
        elif found := _FAULT_THREAD.match(line):
            self._begin("faulthandler", Thread((), found["name"] or "", False, "active" if found["current"] else ""))
        elif found := _GDB_THREAD.match(line):
            is_main = found["number"] == "1" or found["lwp"] == str(self._pid)
            self._begin("gdb", Thread((), found["name"] or "", is_main))
        elif found := _TRACEBACK.match(line.lstrip()):
            # py-bt after bt shows the same thread once more, in Python's words
            if not (self._form == "gdb" and found["order"] == "first"):
                self._begin("traceback", Thread(is_main=True))
            self._is_outermost_first = found["order"] == "last"
        elif found := _FAILED_COLLECTIVE.search(line):
            self._begin("collective", Thread(is_main=True))
            self._take_frame(found["first"].strip())
        elif self._take_frame(line):
            pass
        elif not self._frames and not self._threads and _FAILURE.search(line) and line.strip() not in self._failure:
            self._failure = f"{self._failure}; {line.strip()}" if self._failure else line.strip()

    def finish(self) -> tuple[Dump, ...]:
        self._end_process()
        return tuple(self._dumps)

    def _take_frame(self, line: str) -> bool:
        if _LOCALS.match(line):
            self._locals_indent = len(line) - len(line.lstrip())
            return True
        if self._locals_indent:
            if len(line) - len(line.lstrip()) > self._locals_indent:
                return True
            self._locals_indent = 0
        frame = _frame(line, is_open=self._is_open or bool(self._frames))
        if frame is not None:
            self._frames.append(frame)
        return frame is not None

    def _begin(self, form: str, head: Thread) -> None:
        self._end_thread()
        self._form, self._head, self._is_open, self._is_outermost_first = form, head, True, False

    def _end_thread(self) -> None:
        if self._frames or self._is_open:
            frames = tuple(reversed(self._frames)) if self._is_outermost_first else tuple(self._frames)
            self._threads.append(msgspec.structs.replace(self._head, frames=frames))
        self._frames, self._head, self._is_open, self._locals_indent = [], Thread(), False, 0

    def _end_process(self) -> None:
        self._end_thread()
        threads = self._threads
        if self._form == "faulthandler" and threads:
            # newest thread first, so the main one comes last
            threads = [*threads[:-1], msgspec.structs.replace(threads[-1], is_main=True)]
        if threads or self._failure or self._pid is not None:
            failure = "" if threads else self._failure or "no thread in the dump"
            self._dumps.append(Dump(tuple(threads), self._pid, self._command, failure))
        self._threads, self._pid, self._command, self._failure, self._form, self._prefix = [], None, "", "", "", ""


def _frame(line: str, *, is_open: bool) -> Frame | None:
    if found := _FILE_FRAME.match(line):
        return Frame(found["function"], found["file"], int(found["line"]) if found["line"].isdecimal() else None)
    if found := _FROM_FRAME.match(line):
        return Frame(found["function"], found["file"], int(found["line"]))
    if (is_open or _GDB_FIRST.match(line)) and (found := _GDB_FRAME.match(line)):
        place = _GDB_PLACE.search(line)
        file = (place["library"] or place["file"]) if place else ""
        return Frame(found["function"], file, int(place["line"]) if place and place["line"] else None)
    if found := _KERNEL_STACK.match(line):
        return Frame(found["function"], "kernel")
    if is_open and (found := _PY_SPY_FRAME.match(line)):
        return Frame(found["function"], found["file"], int(found["line"]) if found["line"] else None)
    return None
