"""A job as the ladder sees it: records in, decisions out, in virtual time; tests say what happens to it."""

from __future__ import annotations

from typing import Any

from evertrain.decide import changes, ladder
from evertrain.decide.applying import apply
from evertrain.decide.state import JobState
from evertrain.model import decisions as d
from evertrain.model import records as r
from evertrain.model.change_records import ChangeAsked, VersionKept
from evertrain.model.code import Code, Version
from evertrain.model.decisions import AnyAction, Policy
from evertrain.model.spec import Seats

EVIDENCE = "seen with these eyes"


class Job:
    """`nodes` active nodes, then `standby` that wait and are ready; training from the first moment."""

    def __init__(
        self,
        nodes: int = 4,
        standby: int = 0,
        *,
        policy: Policy | None = None,
        least: int | None = None,
        has_platform: bool = False,
        is_stored: bool = False,
        nproc: int = 2,
        takes_replays: bool = True,
        **run: Any,
    ) -> None:
        self.script = {"takes_replays": takes_replays, "mesh": f"dp={nodes * nproc}"}
        self.now = 1000.0
        self.policy = policy or Policy()
        self.log: list[r.AnyRecord] = []
        self.state = JobState()
        self.step = 0
        names = tuple(f"node-{index}" for index in range(nodes + standby))
        seats = Seats(least or nodes, nodes, standby) if has_platform else None
        self.write(
            r.RunStarted(
                time=self.now, run_id="job-1", nodes=names, standby=standby, nproc_per_node=nproc, fresh=False,
                start="zygote", command="t.py", least=least, seats=seats, **run,
            )
        )  # fmt: skip
        if has_platform:
            self.write(r.NodesSettled(time=self.now, nodes=names, standby=standby))
        self.hash = ladder.policy_hash(self.policy)
        self.write(r.PolicyAdopted(time=self.now, hash=self.hash, policy=self.policy))
        for name in names:
            self.becomes(name, "standby" if name in names[nodes:] else "active")
        if is_stored:
            self.write(
                r.StoreCommitted(
                    time=self.now, url="/store", folder="step-1", attempt=1, step=1, world_size=nodes * nproc, bytes=1,
                    seconds=1.0,
                )
            )  # fmt: skip
        self.start()
        if "roll_back" in self.policy.sources:
            self.update()

    def write(self, record: r.AnyRecord) -> None:
        self.log.append(record)
        self.state = apply(self.state, record)

    def update(self) -> None:
        """The user has changed the code, and it runs."""
        self.asks_for_update(urgent=True)
        attempt = self.state.attempt
        assert attempt is not None
        self.write(
            r.AttemptEnded(
                time=self.now, attempt=attempt.number, outcome="restarted", step=None, relative_step=0, progress=False
            )
        )
        self.start()

    def asks_for_update(self, *, urgent: bool) -> None:
        if not self.state.versions:
            self._know(1)
        number = max(self.state.versions) + 1
        self._know(number)
        self.write(
            ChangeAsked(
                time=self.now, change=f"update-{number}", act="update", version=number,
                parent=changes.in_force(self.state), latest=self.now if urgent else self.now + 1e6,
            )
        )  # fmt: skip

    def _know(self, number: int) -> None:
        version = Version(number=number, code=Code(digest=f"code {number}", files=1, bytes=1))
        self.write(VersionKept(time=self.now, version=version, is_own=number == 1))

    def becomes(self, node: str, state: Any) -> None:
        self.write(r.NodeChanged(time=self.now, node=node, state=state, because=f"it is {state}"))

    def start(self) -> None:
        self.write(next_attempt(self.state, self.now))

    def tell(self, event: d.AnyEvent) -> tuple[AnyAction, ...]:
        decided = ladder.decision(self.state, event, self.policy, self.hash, self._incident_of(event))
        self.write(decided)
        return decided.actions

    def _incident_of(self, event: d.AnyEvent) -> int | None:
        """What a decision belongs to, as those who ask for it say."""
        if isinstance(event, d.AttemptFailed | d.Answered | d.NobodyCame):
            return event.incident
        incident = self.state.incident
        if isinstance(event, d.NodeFault | d.NetworkAlert | d.NodeReady) and incident is not None:
            return incident.number if incident.decided is None else None
        return None

    # -- events --------------------------------------------------------------------------------------------------------

    def fault(self, node: str = "node-1", signal: str = "gpu_lost") -> tuple[AnyAction, ...]:
        return self.tell(d.NodeFault(time=self.now, node=node, signal=signal, evidence=EVIDENCE))

    def alert(self, node: str = "node-1") -> tuple[AnyAction, ...]:
        evidence = f"link down at {self.now:.0f} s"
        return self.tell(d.NetworkAlert(time=self.now, node=node, signal="link_down", evidence=evidence))

    def reading(self, node: str = "node-1") -> tuple[AnyAction, ...]:
        return self.tell(d.HardwareReading(time=self.now, node=node, signal="xid", evidence="Xid 63"))

    def blind(self, node: str = "node-1") -> tuple[AnyAction, ...]:
        return self.tell(d.SensorBlind(time=self.now, node=node, sensor="nvml", evidence="no answer"))

    def opens(self, node: str, cause: str = "gpu lost") -> int:
        """An incident that begins with a sign and not with the end of an attempt."""
        number = max(self.state.incidents, default=0) + 1
        attempt = self.state.attempt
        assert attempt is not None
        self._close()
        self.write(
            r.IncidentOpened(
                time=self.now, incident=number, attempt=attempt.number, fault_time=self.now, cause=cause,
                category="gpu_hardware", ranks=(), nodes=(node,), confidence=1.0, evidence=(EVIDENCE,), step=None,
                source="signal",
            )
        )  # fmt: skip
        return number

    def fails(
        self,
        source: Any = "exit",
        *,
        nodes: tuple[str, ...] = ("node-1",),
        ranks: tuple[int, ...] = (2,),
        cause: str = "killed (SIGKILL)",
        category: str = "unknown",
        progress: bool = False,
        evidence: tuple[str, ...] = ("rank 2 on node-1: killed (SIGKILL)",),
        **more: Any,
    ) -> tuple[AnyAction, ...]:
        """The attempt ends and is judged; `step` says at which step, by default at the next with progress only."""
        attempt = self.state.attempt
        assert attempt is not None
        self._close()
        self.step += progress
        step = more.pop("step", self.step)
        number = max(self.state.incidents, default=0) + 1
        self.write(
            r.IncidentOpened(
                time=self.now, incident=number, attempt=attempt.number, fault_time=self.now, cause=cause,
                category=category, ranks=ranks, nodes=nodes, confidence=1.0, evidence=evidence, step=step,
                source=source,
            )
        )  # fmt: skip
        self.write(
            r.AttemptEnded(
                time=self.now,
                attempt=attempt.number,
                outcome="failed",
                step=step,
                relative_step=0,
                progress=progress,
                **self.script,
            )
        )
        return self.tell(
            d.AttemptFailed(
                time=self.now, incident=number, source=source, cause=cause, category=category, ranks=ranks,
                nodes=nodes, step=step, evidence=evidence, **more,
            )
        )  # fmt: skip

    def _close(self) -> None:
        if (before := self.state.incident) is not None:
            self.write(r.IncidentClosed(time=self.now, incident=before.number, first_new_step=None, passed_time=None))

    def restarts(self) -> None:
        """What was decided is done."""
        self.now += 1.0
        self.start()

    def answers(self, rung: Any, outcome: Any, *nodes: str) -> tuple[AnyAction, ...]:
        number = max(self.state.incidents)
        evidence = tuple(f"{node} failed" for node in nodes)
        return self.tell(
            d.Answered(time=self.now, incident=number, rung=rung, outcome=outcome, nodes=nodes, evidence=evidence)
        )

    def is_proven(self) -> None:
        number = max(self.state.incidents)
        self.tell(d.Proven(time=self.now, incident=number))
        self.write(r.IncidentClosed(time=self.now, incident=number, first_new_step=None, passed_time=self.now))

    def ready(self, node: str) -> tuple[AnyAction, ...]:
        self.becomes(node, "standby")
        return self.tell(d.NodeReady(time=self.now, node=node))

    def arrives(self, node: str) -> tuple[AnyAction, ...]:
        return self.tell(d.NodeArrived(time=self.now, node=node))

    def nobody_came(self) -> tuple[AnyAction, ...]:
        return self.tell(d.NobodyCame(time=self.now, incident=max(self.state.incidents)))

    def tested(self, node: str = "node-1", *, passed: bool = True) -> tuple[AnyAction, ...]:
        return self.tell(d.NodeTested(time=self.now, node=node, passed=passed, evidence=("matmul differs",)))

    def allowed(self, node: str = "node-1") -> tuple[AnyAction, ...]:
        return self.tell(d.NodeAllowed(time=self.now, node=node, because="repaired"))

    def drain(self, node: str = "node-1") -> tuple[AnyAction, ...]:
        return self.tell(d.DrainRequested(time=self.now, node=node, because="service"))


def names(actions: tuple[AnyAction, ...]) -> list[str]:
    return [type(action).__name__ for action in actions]


def next_attempt(state: JobState, now: float) -> r.AttemptStarted:
    change = changes.pending(state)
    return r.AttemptStarted(
        time=now, attempt=state.next_attempt, restart_count=len(state.attempts), placement=state.placement(),
        keepers={}, master_addr="", master_port=1, resume=None, tiers={}, reached=state.best_step,
        version=changes.next_version(state), change=change.asked.change if change is not None else None,
    )  # fmt: skip
