"""How many events a second does the ladder judge, on one core, for a job of 1,250 nodes with 8 ranks each?

Each event is decided and its decision applied to the job (`ladder.step`), as the controller does between reading a
report and writing the log; the log's own cost is not in it. The mix is that of a bad day: mostly readings, blind
sensors and single alerts, now and then a crash or a hang with what follows from it, faults, evictions, nodes that come
and go. What the conductor would do in between (an attempt that ends, one that starts) is done as well, and not timed.

    figures: events_per_s; and for the record evictions, failures and the slowest kinds of event
"""

from __future__ import annotations

import gc
import random
import time
from collections import defaultdict

from evertrain.decide import ladder
from evertrain.decide.applying import apply
from evertrain.decide.state import JobState
from evertrain.model import decisions as d
from evertrain.model import records as r
from evertrain.model.decisions import AnyEvent, Policy
from harness import medians, parser, print_table, write_report

NODES, NPROC, STANDBY = 1250, 8, 16
POLICY = Policy(sources=("inspect",))
# of 1,000 events; the rest are readings
MIX = {
    d.SensorBlind: 200, d.NetworkAlert: 200, d.NodeTested: 20, d.NodeReady: 10, d.NodeArrived: 5, d.NodeFault: 1,
    d.AttemptFailed: 4, d.DrainRequested: 1, d.NodeAllowed: 1,
}  # fmt: skip


class Day:
    """A job to which things happen, in virtual time: one event after another, and what a conductor does about them."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now = 1000.0
        self.names = tuple(f"node-{index:04d}" for index in range(NODES + STANDBY))
        self.next_name = len(self.names)
        self.state = JobState()
        self.write(
            r.RunStarted(
                time=self.now, run_id="job-1", nodes=self.names, standby=STANDBY, nproc_per_node=NPROC, fresh=False,
                start="zygote", command="train.py",
            )
        )  # fmt: skip
        for index, node in enumerate(self.names):
            self.becomes(node, "active" if index < NODES else "standby")
        self.step = 0
        self.start()
        self.seconds: dict[str, float] = defaultdict(float)
        self.count: dict[str, int] = defaultdict(int)
        self.evictions = 0

    def write(self, record: r.AnyRecord) -> None:
        self.state = apply(self.state, record)

    def becomes(self, node: str, state: str) -> None:
        self.write(r.NodeChanged(time=self.now, node=node, state=state, because=""))  # type: ignore[arg-type]

    def start(self) -> None:
        self.write(
            r.AttemptStarted(
                time=self.now, attempt=self.state.next_attempt, restart_count=len(self.state.attempts),
                placement=self.state.placement(), keepers={}, master_addr="", master_port=1, resume=None, tiers={},
                reached=self.state.best_step,
            )
        )  # fmt: skip

    def events(self, count: int) -> None:
        """Let so many events happen."""
        kinds = [*MIX, d.HardwareReading]
        weights = [*MIX.values(), 1000 - sum(MIX.values())]
        for kind in self.draw.choices(kinds, weights, k=count):
            self.now += self.draw.expovariate(1.0)
            node = self.names[self.draw.randrange(len(self.names))]
            if kind is d.AttemptFailed:
                self.fails(node)
            elif kind is d.NodeReady:
                if standbys := self.state.standbys():
                    node = self.draw.choice(standbys)
                    self.becomes(node, "standby")
                self.judge(d.NodeReady(time=self.now, node=node))
            elif kind is d.NodeTested:
                node = self.draw.choice([*self.state.memory.blocked]) if self.state.memory.blocked else node
                self.judge(d.NodeTested(time=self.now, node=node, passed=True))
            elif kind is d.NodeArrived:
                self.next_name += 1
                node = f"node-{self.next_name:04d}" if len(self.state.standbys()) < STANDBY else node
                self.judge(d.NodeArrived(time=self.now, node=node))
            elif kind in (d.DrainRequested, d.NodeAllowed):
                self.judge(kind(time=self.now, node=node, because="asked for"))
            elif kind is d.SensorBlind:
                self.judge(d.SensorBlind(time=self.now, node=node, sensor="nvml", evidence="no answer in 5 s"))
            else:
                self.judge(kind(time=self.now, node=node, signal="link_down", evidence="seen once"))

    def fails(self, node: str) -> None:
        """An attempt ends, its decision is taken, and the next one starts."""
        if (before := self.state.incident) is not None:
            self.judge(d.Proven(time=self.now, incident=before.number))
            self.write(r.IncidentClosed(time=self.now, incident=before.number, first_new_step=1, passed_time=self.now))
        attempt, number = self.state.active, max(self.state.incidents, default=0) + 1
        assert attempt is not None
        source, cause = self.draw.choice([("exit", "killed (SIGKILL)"), ("hang", "hang (still)")])
        self.step += 1
        self.write(
            r.IncidentOpened(
                time=self.now, incident=number, attempt=attempt.number, fault_time=self.now, cause=cause,
                category="unknown", ranks=(1,), nodes=(node,), confidence=1.0, evidence=("as it was seen",),
                step=self.step, source=source,  # type: ignore[arg-type]
            )
        )  # fmt: skip
        self.write(
            r.AttemptEnded(
                time=self.now, attempt=attempt.number, outcome="failed", step=self.step, relative_step=0, progress=True
            )
        )
        self.judge(
            d.AttemptFailed(
                time=self.now, incident=number, source=source, cause=cause, category="unknown",  # type: ignore[arg-type]
                ranks=(1,), nodes=(node,), step=self.step, evidence=("as it was seen",),
            )
        )  # fmt: skip
        incident = self.state.incident
        if incident is not None and incident.decided is None:
            self.judge(d.Answered(time=self.now, incident=number, rung="inspect", outcome="clean"))
        self.start()

    def judge(self, event: AnyEvent) -> None:
        began = time.perf_counter()
        self.state, actions = ladder.step(self.state, event, POLICY)
        kind = type(event).__name__
        self.seconds[kind] += time.perf_counter() - began
        self.count[kind] += 1
        self.evictions += any(isinstance(action, d.Evict) for action in actions)


def main() -> None:
    flags = parser(__doc__).parse_args()
    rounds, events = (3, 30_000) if flags.quick else (7, 100_000)
    rates: dict[str, list[float]] = defaultdict(list)
    kinds: dict[str, list[float]] = defaultdict(list)
    for seed in range(rounds):
        gc.collect()
        day = Day(seed)
        day.events(events)
        total = sum(day.count.values())
        rates["events_per_s"].append(total / sum(day.seconds.values()))
        rates["evictions"].append(day.evictions)
        rates["failures"].append(day.count["AttemptFailed"])
        for kind, seconds in day.seconds.items():
            kinds[kind].append(1e6 * seconds / day.count[kind])
    figures = medians(rates)
    costs = medians(kinds)
    print_table(
        ("event", "µs each"), [(kind, f"{cost:.1f}") for kind, cost in sorted(costs.items(), key=lambda one: -one[1])]
    )
    print(
        f"\n{figures['events_per_s']:,.0f} events/s: {NODES} nodes x {NPROC} ranks, {rounds} rounds of {events:,}, "
        f"with {figures['failures']:.0f} failed attempts and {figures['evictions']:.0f} evictions in each"
    )
    more = {f"us_{kind}": cost for kind, cost in costs.items()}
    write_report(flags.json, {**figures, **more}, dict.fromkeys((*figures, *more), rounds))


if __name__ == "__main__":
    main()
