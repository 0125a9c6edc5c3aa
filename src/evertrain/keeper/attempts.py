"""Which attempts are there on this node, and how far are they?

    preparing ──all ranks wait──▶ prepared ──go──▶ running ──every rank has ended──▶ ended ──forget──▶ (gone)

Two coexist: one runs, the next has been started ahead and waits. Every command says what should be, so hearing it twice
changes nothing. `end` works in every phase.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from evertrain.keeper.children import Child, Children, Exit
from evertrain.keeper.early import Early
from evertrain.keeper.lines import Message
from evertrain.keeper.log import log
from evertrain.keeper.loop import Loop
from evertrain.keeper.starter import Starter
from evertrain.keeper.waiting import Started, Waiting

STUCK_AFTER_S = 5.0
"""A process that is still there so long after SIGKILL hangs in the kernel."""
SWEEP_AGAIN_S = 0.01
STORE_BACKLOG = 4096
"""All ranks of a job connect in the same instant."""


class Refused(Exception):
    """A command that cannot be followed; the text goes back to the agent."""


@dataclass
class Rank:
    """One rank of this node in one attempt, from the process that waits to the record of its end."""

    waiting: Waiting
    state: str = "waiting"
    killed: bool = False
    exit: Exit | None = None

    @property
    def child(self) -> Child:
        return self.waiting.child

    @property
    def has_ended(self) -> bool:
        return self.exit is not None

    def report(self) -> Message:
        exit = self.exit and {"status": self.exit.status, "time": self.exit.time, "core": self.exit.core}
        pid, ticks = self.child.pid, self.child.start_ticks
        return {"pid": pid, "start_ticks": ticks, "state": self.state, "killed": self.killed, "exit": exit}


@dataclass
class Attempt:
    """One attempt, as far as this node has a part in it."""

    number: int
    term: int
    wanted: list[int]
    wants_store: bool
    store_port: int | None = None
    store: Waiting | None = None
    ranks: dict[int, Rank] = field(default_factory=dict)
    gone: bool = False
    """`go` has been given."""
    ending: bool = False
    """Everything of it is to be killed, whatever comes to light later."""
    error: str = ""

    @property
    def phase(self) -> str:
        if all(rank.has_ended for rank in self.ranks.values()) and (self.ranks or self.ending or self.error):
            return "ended"
        if self.gone:
            return "running"
        is_whole = len(self.ranks) == len(self.wanted)
        return "prepared" if is_whole and all(rank.waiting.is_ready for rank in self.ranks.values()) else "preparing"

    def report(self) -> Message:
        return {
            "term": self.term,
            "phase": self.phase,
            "store_port": self.store_port,
            "error": self.error,
            "ranks": {str(number): rank.report() for number, rank in self.ranks.items()},
        }


class Attempts:
    """All attempts of this node, and what is done with them."""

    def __init__(self, loop: Loop, children: Children, starter: Starter, changed: Callable[[], None]) -> None:
        self._loop = loop
        self._children = children
        self._starter = starter
        self._changed = changed
        self._attempts: dict[int, Attempt] = {}
        self._early = Early(loop, starter, changed=changed, end=self._end_early)
        self._sweep_planned = False
        self._past_sessions: set[int] = set()
        """Sessions of ranks of forgotten attempts, and of what ranks had started apart from themselves."""

    def report(self) -> Message:
        return {str(number): attempt.report() for number, attempt in self._attempts.items()}

    def report_early(self) -> Message:
        return self._early.report()

    # -- commands ----------------------------------------------------------------------------------------------------

    def prepare(self, number: int, term: int, ranks: list[int], *, store: bool, store_port: int = 0) -> None:
        """Have a process wait for each of `ranks`, and if `store` one that serves the attempt's TCPStore."""
        if known := self._attempts.get(number):
            if (known.wanted, known.wants_store) != (ranks, store):
                raise Refused(f"attempt {number} has been prepared for ranks {known.wanted}")
            return
        attempt = self._attempts[number] = Attempt(number, term, ranks, store)
        self._changed()
        listener = None
        if store:
            try:
                listener = _listen(store_port)
            except OSError as error:
                attempt.error = f"no port for the store ({store_port or 'any'}): {error.strerror}"
                return
            attempt.store_port = listener.getsockname()[1]
        self._start(attempt, listener)

    def go(self, number: int, orders: dict[str, Message], digest: str) -> None:
        """Let the ranks of a prepared attempt run, which have to be of the code `digest` (empty: the user's files)."""
        attempt = self._attempts.get(number)
        if attempt is None or attempt.phase in ("preparing", "ended"):
            raise Refused(f"attempt {number} is not prepared but {attempt.phase if attempt else 'unknown'}")
        if attempt.gone:
            return
        if others := {rank.waiting.digest for rank in attempt.ranks.values()} - {digest}:
            raise Refused(f"attempt {number} waits with {_code(*others)}, not with {_code(digest)}")
        if missing := [rank for rank in attempt.ranks if str(rank) not in orders]:
            raise Refused(f"go without orders for ranks {missing} of attempt {number}")
        if changed := [rank for number, rank in attempt.ranks.items() if not _still_holds(rank, orders[str(number)])]:
            self._kill_waiting(attempt)
            self._start(attempt, None)
            raise Refused(f"{len(changed)} ranks of attempt {number} had run ahead with what no longer holds")
        attempt.gone = True
        for rank_number, rank in attempt.ranks.items():
            if not rank.has_ended:
                rank.state = "running"
                rank.waiting.line.say(orders[str(rank_number)])
                rank.waiting.line.close_when_sent()
        self._changed()

    def end(self, number: int, signal_number: int) -> None:
        """SIGTERM tells the ranks; SIGKILL ends them with all that they have started, and the store."""
        attempt = self._attempts.get(number)
        if attempt is None:
            return
        living = [rank for rank in attempt.ranks.values() if not rank.has_ended]
        for rank in living:
            if signal_number == signal.SIGKILL or not rank.killed:
                rank.child.send(signal_number)
            rank.killed = True
        if signal_number == signal.SIGKILL and not attempt.ending:
            attempt.ending = True
            if attempt.store:
                attempt.store.kill()
                attempt.store = None
            self._loop.after(STUCK_AFTER_S, lambda: self._find_stuck(attempt))
            self._plan_sweep()
        self._changed()

    def forget(self, number: int) -> None:
        """Drop an attempt that has ended from the reports."""
        attempt = self._attempts.get(number)
        if attempt is None:
            return
        if attempt.phase != "ended":
            raise Refused(f"attempt {number} has not ended but is {attempt.phase}")
        self.end(number, signal.SIGKILL)
        self._past_sessions.update(rank.child.pid for rank in attempt.ranks.values())
        del self._attempts[number]
        self._changed()

    def run_ahead(self, asked: Message | None) -> None:
        """Have the ranks of attempts to come run ahead of their start; None: no longer."""
        self._early.want(asked)

    def refused(self, reason: str, instead: str) -> None:
        """What waits must not become ranks: prepare the same attempts once more, started in another way."""
        self._starter.refused(reason, instead)
        self._start_anew()

    def renew(self) -> None:
        """What waits has an environment that no longer holds: prepare the same attempts once more."""
        self._starter.renew()
        self._start_anew()

    def begin_anew(self) -> None:
        """What waits has code that is not wanted any more: prepare the same attempts with what is."""
        self._starter.begin_anew()
        self._start_anew()

    def _start_anew(self) -> None:
        self._early.renew()
        for attempt in self._attempts.values():
            if attempt.ranks and not attempt.gone and not attempt.ending and attempt.phase != "ended":
                self._kill_waiting(attempt)
                self._start(attempt, None)

    def _kill_waiting(self, attempt: Attempt) -> None:
        for rank in attempt.ranks.values():
            if not rank.has_ended:
                self._end_early(rank.waiting) if rank.waiting.early else rank.waiting.kill()
        attempt.ranks.clear()
        self._changed()

    def end_all(self) -> None:
        for number in self._attempts:
            self.end(number, signal.SIGKILL)

    # -- starting ----------------------------------------------------------------------------------------------------

    def _start(self, attempt: Attempt, listener: socket.socket | None) -> None:
        def started(made: Started) -> None:
            if listener:
                # the store's process alone may hold it: clients of a dead store must be refused, not left waiting
                listener.close()
            attempt.error = attempt.error or made.error
            if attempt.ending or attempt.error:
                for waiting in (*made.ranks, *([made.store] if made.store else [])):
                    waiting.kill()
            else:
                self._adopt(attempt, made)
            self._changed()

        # they are ready now; a process that serves the store may come later
        if ahead := self._early.take(len(attempt.wanted)):
            self._adopt(attempt, Started(ahead))
            self._changed()
        if not ahead or listener:
            self._starter.start(0 if ahead else len(attempt.wanted), listener, started)

    def _adopt(self, attempt: Attempt, made: Started) -> None:
        for number, waiting in zip(attempt.wanted if made.ranks else (), made.ranks, strict=True):
            rank = attempt.ranks[number] = Rank(waiting)
            self._past_sessions.discard(waiting.child.pid)
            waiting.said = lambda message: self._said(attempt, message)
            waiting.ended = lambda exit, rank=rank: self._rank_ended(attempt, rank, exit)  # type: ignore[misc]
        if made.store:
            attempt.store = made.store
            made.store.ended = lambda exit: self._store_ended(attempt, exit)

    def _said(self, attempt: Attempt, message: Message) -> None:
        if message["is"] == "refused" and not attempt.gone:
            self.refused(message["reason"], message["instead"])
        if message["is"] == "cannot_wait" and not attempt.gone and not attempt.ending:
            # it ran ahead of its start, and its files have changed since
            self._kill_waiting(attempt)
            self._start(attempt, None)
        self._changed()

    # -- ends --------------------------------------------------------------------------------------------------------

    def _rank_ended(self, attempt: Attempt, rank: Rank, exit: Exit) -> None:
        rank.exit = exit
        rank.state = "ended"
        rank.waiting.line.close()
        self._plan_sweep()
        log(f"attempt {attempt.number}: pid {rank.child.pid} ended with {exit}{' on command' if rank.killed else ''}")
        self._changed()

    def _store_ended(self, attempt: Attempt, exit: Exit) -> None:
        attempt.store = None
        attempt.error = f"the process that served the store ended with {exit}"
        log(f"attempt {attempt.number}: {attempt.error}")
        self._changed()

    def _find_stuck(self, attempt: Attempt) -> None:
        for number, rank in attempt.ranks.items():
            if not rank.has_ended:
                rank.state = "stuck"
                # its children will not become the keeper's
                rank.child.send_group(signal.SIGKILL)
                log(f"rank {number} (pid {rank.child.pid}) is still there {STUCK_AFTER_S:g} s after SIGKILL")
                self._changed()

    def _end_early(self, waiting: Waiting) -> None:
        """Kill one that had begun its script: what it has started goes as well, as soon as that comes to light."""
        waiting.kill()
        waiting.ended = lambda _: self._plan_sweep()
        self._past_sessions.add(waiting.child.pid)
        self._plan_sweep()

    def _plan_sweep(self, after_s: float = 0.0) -> None:
        if not self._sweep_planned:
            self._sweep_planned = True
            self._loop.after(after_s, self._sweep)

    def _sweep(self) -> None:
        """Kill what dead ranks have left behind: it has become the keeper's own child.

        What is killed may have children in turn, which come to light when it is gone: so until there are none.
        A process that has left its rank's session cannot be told from those of other ranks; it goes with the attempt.
        """
        self._sweep_planned = False
        ranks = {rank.child.pid: rank for attempt in self._attempts.values() for rank in attempt.ranks.values()}
        ahead = self._early.pids
        is_one_running = any(each.phase == "running" and not each.ending for each in self._attempts.values())

        def is_doomed(pid: int, session: int) -> bool:
            if session in ranks:
                return ranks[session].has_ended
            if session in ahead:
                return False
            if session in self._past_sessions or not is_one_running:
                self._past_sessions.add(session)
                return True
            return False

        if self._children.kill_orphans(is_doomed):
            self._plan_sweep(SWEEP_AGAIN_S)


def _still_holds(rank: Rank, order: Message) -> bool:
    """Whether a rank that ran ahead of its start did so with the arguments and variables that it is to have."""
    early = rank.waiting.early
    return early is None or (early.get("args") == order.get("args") and early["env"].items() <= order["env"].items())


def _code(*digests: str) -> str:
    return " and ".join(f"code {digest[:12]}" if digest else "the files in place" for digest in sorted(digests))


def _listen(port: int) -> socket.socket:
    """A listening socket on every address of this machine, for both versions of the protocol where there are two."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=STORE_BACKLOG)
    return socket.create_server(("", port), backlog=STORE_BACKLOG)
