"""Nodes that are examined as in a live job: real test programs, the real rules, and no job around them.

found = examined.run(state_nodes, {"a": node, "b": node}, addresses, store, "nccl")
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from evertrain.agent.diagnosing import _reading
from evertrain.decide import examining
from evertrain.decide.applying import fold
from evertrain.decide.picture import NodePicture, Picture
from evertrain.decide.state import Exam, JobState
from evertrain.model.clocks import Clock
from evertrain.model.config import Config
from evertrain.model.diagnosis import Inspected, InspectOrder, Run, Setting, Symptom
from evertrain.model.records import RunStarted, TermStarted
from evertrain.model.report import AttemptReport, NodeReport
from support.fleet import Node

_POLL_S = 0.02


class Job:
    """Knows its nodes, and no more."""

    def __init__(
        self,
        nodes: Mapping[str, Node],
        *,
        store: Mapping[str, Any] | None = None,
        addresses: Mapping[str, str] | None = None,
        ranks: int = 1,
        golden: Mapping[Setting, Run] | None = None,
    ) -> None:
        """`store`: where they find each other; `addresses`: by node, where each stands (all here)."""
        self.nodes = nodes
        self._addresses = addresses or dict.fromkeys(nodes, "127.0.0.1")
        self._store = store
        started = RunStarted(
            time=0.0, run_id="job-1", nodes=tuple(nodes), standby=0, nproc_per_node=ranks, fresh=True, start="zygote",
            command="train.py",
        )  # fmt: skip
        state = fold([started, TermStarted(time=0.0, term=1, clock=Clock("boot", 0.0))])
        self.state: JobState = msgspec.structs.replace(state, golden=dict(golden or {}))
        self._asked: dict[str, tuple[int, Future[Inspected]]] = {}

    def examine(self, symptom: Symptom, budget_s: float = 120.0) -> Exam:
        """All nodes at the same time, to the end."""
        began = time.monotonic()
        with ThreadPoolExecutor(len(self.nodes)) as threads:
            self._take(examining.ask(self.state, self._picture(), (), symptom, budget_s, 0.0))
            while self.state.exam is not None:
                for node in self.nodes:
                    order = examining.order(self.state, node)
                    number = self._asked[node][0] if node in self._asked else 0
                    if order is not None and order.program and order.number != number:
                        self._asked[node] = (order.number, threads.submit(self._ask, node, order))
                time.sleep(_POLL_S)
                while records := examining.look(self.state, self._picture(), Config(), time.monotonic() - began):
                    self._take(records)
        return self.state.exams[-1]

    def _take(self, records: Iterable[Any] | str) -> None:
        assert not isinstance(records, str), records
        self.state = fold(records, self.state)

    def _picture(self) -> Picture:
        port = self._store["port"] if self._store is not None else None
        prepared = AttemptReport(attempt=self.state.next_attempt, phase="prepared", store_port=port)
        found = {}
        for node, address in self._addresses.items():
            future = self._asked[node][1] if node in self._asked else None
            answer = future.result() if future is not None and future.done() else None
            report = NodeReport(node=node, address=address, attempts=(prepared,), inspected=answer)
            found[node] = NodePicture(report, connected=True, since=0.0)
        return Picture(found)

    def _ask(self, node: str, order: InspectOrder) -> Inspected:
        done = self.nodes[node].test(order.program, budget_s=order.budget_s, **order.parameters)
        return Inspected(
            number=order.number,
            outcome=done.outcome,  # type: ignore[arg-type]
            because=done.because,
            seconds=done.seconds,
            readings=tuple(map(_reading, done.readings)),
        )


def notes(exam: Exam) -> list[str]:
    """What was seen that accuses nobody."""
    return [line for one in exam.stages if one.done is not None for line in one.done.notes]
