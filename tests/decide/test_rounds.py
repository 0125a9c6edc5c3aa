"""One save at a time is made safe; what was safe stays so, whatever comes in between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from evertrain.decide import resume, rounds
from evertrain.decide.applying import apply
from evertrain.decide.picture import NodePicture, Picture
from evertrain.decide.rounds import Placed, Rounds, Shard
from evertrain.decide.state import JobState
from evertrain.model import records as r
from evertrain.model.config import CheckpointConfig
from evertrain.model.copies import Backup, Copy, Part, Pinned, RoundOrder, Save
from evertrain.model.report import Identity, NodeReport, PageReport
from support.effort import examples

STEP_S = 0.1
KEEPER = Identity(1, 1)


def beside(shards: tuple[Shard, ...], node_of: Mapping[int, str], groups: rounds.Groups) -> tuple[Placed, ...]:
    """The next node keeps it."""
    nodes = list(dict.fromkeys(node_of.values()))
    following = {node: nodes[(index + 1) % len(nodes)] for index, node in enumerate(nodes)}
    return tuple(Placed(following[node_of[shard.owners[0]]], shard.owners[0]) for shard in shards)


@dataclass
class Node:
    """Saves of its ranks, and what it does for others."""

    name: str
    ranks: tuple[int, ...]
    connected: bool = True
    order: RoundOrder | None = None
    backups: dict[Save, tuple[set[int], set[str]]] = field(default_factory=dict)
    pinned: set[tuple[int, Save]] = field(default_factory=set)
    disk_tried: Save | None = None
    refused: Save | None = None
    port: int = 7


class Cluster:
    """Nodes of two ranks each that save at every step, all at once."""

    def __init__(self, nodes: int, config: CheckpointConfig | None = None) -> None:
        self.config = config or CheckpointConfig()
        self.now, self.step = 1000.0, 10
        self.attempt = 0
        self.nodes = {f"n{i}": Node(f"n{i}", (2 * i, 2 * i + 1)) for i in range(nodes)}
        self.rounds = Rounds()
        self.heard: dict[str, NodeReport] = {}
        self.state = JobState()
        run = r.RunStarted(
            time=self.now, run_id="1", nodes=tuple(self.nodes), standby=0, nproc_per_node=2, fresh=False,
            start="zygote", command="t",
        )  # fmt: skip
        self.write(run)
        self.start(None)

    def write(self, record: r.AnyRecord) -> None:
        self.state = apply(self.state, record)

    def start(self, resume_step: int | None) -> None:
        self.attempt += 1
        self.write(
            r.AttemptStarted(
                time=self.now, attempt=self.attempt, restart_count=0, placement=self.placement, tiers={},
                keepers=dict.fromkeys(self.nodes, KEEPER), master_addr="", master_port=1, resume=resume_step,
                reached=None,
            )
        )  # fmt: skip
        self.write(r.AttemptResumed(time=self.now, attempt=self.attempt, resumed_time=self.now))
        self.hear()

    def end(self) -> None:
        self.write(
            r.AttemptEnded(
                time=self.now, attempt=self.attempt, outcome="failed", step=self.step, relative_step=1, progress=True
            )
        )

    @property
    def placement(self) -> dict[int, str]:
        return {rank: node.name for node in self.nodes.values() for rank in node.ranks}

    def parts(self, rank: int, save: Save) -> tuple[Part, ...]:
        """One that is the same on all ranks, and one of its own."""
        return (Part(f"model-{save[0]}-{save[1]}", 100), Part(f"rank{rank}-{save[0]}-{save[1]}", 50))

    def report(self, node: Node) -> NodeReport:
        return NodeReport(
            node=node.name,
            keeper=KEEPER,
            transfer_port=node.port,
            copies=tuple(
                Copy(rank=rank, step=self.step, attempt=self.attempt, world_size=len(self.placement), tier="memory")
                for rank in node.ranks
            ),
            copies_after_attempt=self.attempt,
            pages=tuple(
                PageReport(
                    rank=rank, attempt=self.attempt, pid=1, step=self.step, progress_time=self.now, step_s=STEP_S
                )
                for rank in node.ranks
            ),
            pinned=tuple(
                Pinned(
                    rank=rank, attempt=save[0], step=save[1], world_size=len(self.placement), head_bytes=9,
                    parts=self.parts(rank, save),
                )
                for rank, save in sorted(node.pinned)
            ),
            backups=tuple(
                Backup(
                    attempt=save[0], step=save[1], world_size=len(self.placement),
                    heads={rank: self.parts(rank, save) for rank in heads},
                    parts=tuple(Part(digest, 1) for digest in digests),
                )
                for save, (heads, digests) in node.backups.items()
            ),
            disk_tried=node.disk_tried,
            refused=node.refused,
        )  # fmt: skip

    # -- what happens

    def train(self, steps: int = 1) -> None:
        """Every rank does a step and saves it; what is wanted of it stays, what is not needed goes."""
        for _ in range(steps):
            self.now += STEP_S
            self.step += 1
            for node in self.nodes.values():
                self.keep(node)

    def keep(self, node: Node) -> None:
        order = node.order
        kept = set(order.kept) if order is not None else set()
        for rank in node.ranks:
            if order is not None and order.wanted is not None and order.wanted[0] == self.attempt:
                has = [save for of, save in node.pinned if of == rank and save >= order.wanted]
                if self.step >= order.wanted[1] and not has:
                    node.pinned.add((rank, (self.attempt, self.step)))
                kept |= {min(has)} if has else {(self.attempt, self.step)}
        node.pinned = {(rank, save) for rank, save in node.pinned if save in kept}

    def pull(self, node: Node, most: int = 99) -> None:
        order = node.order
        if order is None:
            return
        node.backups = {save: kept for save, kept in node.backups.items() if save in order.backups}
        for one in order.pulls[:most]:
            source = next(other for other in self.nodes.values() if one.rank in other.ranks)
            if (one.rank, one.save) not in source.pinned:
                continue  # the peer has nothing of it any more
            heads, digests = node.backups.setdefault(one.save, (set(), set()))
            if one.digest:
                digests.add(one.digest)
            else:
                heads.add(one.rank)

    def hear(self, *names: str) -> None:
        for name in names or self.nodes:
            if self.nodes[name].connected:
                self.heard[name] = self.report(self.nodes[name])

    def picture(self) -> Picture:
        return Picture(
            {
                name: NodePicture(report, connected=self.nodes[name].connected, since=0.0)
                for name, report in self.heard.items()
            }
        )

    def decide(self) -> None:
        self.rounds = rounds.advance(self.rounds, self.state, self.picture(), self.config, beside, (), self.now)

    def obey(self, *names: str) -> None:
        for name in names or self.nodes:
            node = self.nodes[name]
            if node.connected:
                node.order = rounds.order(self.rounds, name, self.config) or node.order
                self.keep(node)

    def turn(self, steps: int = 1) -> None:
        self.train(steps)
        for node in self.nodes.values():
            self.pull(node)
        self.hear()
        self.decide()
        self.obey()

    def safe_step(self) -> int | None:
        """By what nodes really have."""
        reports = {name: self.report(node) for name, node in self.nodes.items()}
        return resume.survives_any_node(reports, self.placement, resume.rules(self.state))

    def until_safe(self) -> Save:
        for _ in range(100):
            self.turn()
            if self.rounds.last is not None and self.rounds.last[0] == self.attempt:
                return self.rounds.last
        raise AssertionError(self.rounds)


def test_a_save_that_lies_ahead_is_pinned_copied_and_then_safe() -> None:
    cluster = Cluster(2)
    cluster.turn()
    cluster.turn()
    order = cluster.nodes["n0"].order
    assert order is not None and order.wanted is not None and order.wanted[1] > cluster.step + 8
    save = cluster.until_safe()
    assert save >= order.wanted
    assert cluster.safe_step() == save[1]
    # each node keeps the heads and own parts of the other's ranks; the common part lies on both already
    assert [sorted(heads) for node in cluster.nodes.values() for heads, _ in node.backups.values()] == [[2, 3], [0, 1]]


def test_what_is_safe_stays_until_something_newer_is() -> None:
    cluster = Cluster(3, CheckpointConfig(disk_every_s=1e9))
    before = cluster.until_safe()
    for _ in range(200):
        cluster.turn()
        safe = cluster.safe_step()
        assert safe is not None and safe >= before[1]
    assert cluster.step - safe < 60, "rounds go on"


def test_a_slow_peer_delays_the_round_and_nothing_else() -> None:
    cluster = Cluster(2)
    save = cluster.until_safe()
    cluster.nodes["n1"].connected = False
    for _ in range(50):
        cluster.train()
        cluster.pull(cluster.nodes["n0"])
        cluster.hear()
        cluster.decide()
        cluster.obey()
    assert cluster.rounds.last == save and cluster.safe_step() == save[1]
    cluster.nodes["n1"].connected = True
    for _ in range(60):
        cluster.turn()
    assert cluster.rounds.last is not None and cluster.rounds.last > save


def test_ranks_that_keep_different_saves_are_asked_again_further_ahead() -> None:
    cluster = Cluster(2)
    while cluster.rounds.attempt == 0:
        cluster.turn()
    first = cluster.rounds.wanted
    cluster.train(first - cluster.step)  # node 1 hears of it too late
    cluster.nodes["n1"].order = None
    cluster.train(2)
    cluster.obey()
    cluster.train(2)
    cluster.hear()
    cluster.decide()
    assert cluster.rounds.attempt == 0 and cluster.rounds.misses == 1
    while cluster.rounds.attempt == 0:
        cluster.turn()
    assert cluster.rounds.wanted - cluster.step > first - 12
    cluster.until_safe()
    assert cluster.rounds.misses == 0


def test_an_agent_that_was_started_again_is_asked_where_it_listens_now() -> None:
    cluster = Cluster(2)
    while not cluster.rounds.pulls:
        cluster.turn()
    cluster.nodes["n1"].port = 8
    cluster.hear()
    cluster.decide()
    assert cluster.rounds.pulls is not None
    assert {pull.peer.port for pull in cluster.rounds.pulls["n0"]} == {8}


def test_a_node_that_has_no_room_ends_the_round() -> None:
    cluster = Cluster(2)
    while cluster.rounds.save is None:
        cluster.turn()
    cluster.nodes["n0"].refused = cluster.rounds.save
    cluster.turn()
    assert cluster.rounds.attempt == 0 and cluster.rounds.next_time > cluster.now + 5


def test_a_node_alone_goes_to_disk_now_and_then() -> None:
    cluster = Cluster(1, CheckpointConfig(disk_every_s=5.0))
    written = []
    for _ in range(300):
        cluster.turn()
        (node,) = cluster.nodes.values()
        assert node.order is None or (not node.order.pulls and not node.order.backups)
        if node.order is not None and node.order.disk not in (None, node.disk_tried):
            assert {(rank, node.order.disk) for rank in node.ranks} <= node.pinned
            written.append(cluster.now)
            node.disk_tried = node.order.disk
    assert 3 <= len(written) <= 6
    assert len(cluster.rounds.kept) <= 1


def test_a_node_without_ranks_has_nothing_to_write() -> None:
    cluster = Cluster(2, CheckpointConfig(disk_every_s=2.0))
    while cluster.rounds.disk is None:
        cluster.turn()
    mine = rounds.order(cluster.rounds, "n0", cluster.config)
    other = rounds.order(cluster.rounds, "waits", cluster.config, has_ranks=False)
    assert mine is not None and mine.disk == cluster.rounds.disk
    assert other is not None and other.disk is None


def test_a_slow_disk_gets_less_to_do() -> None:
    cluster = Cluster(2, CheckpointConfig(disk_every_s=5.0))
    began: list[float] = []
    last: Save | None = None
    for _ in range(1500):
        cluster.turn()
        order = cluster.nodes["n0"].order
        if order is not None and order.disk is not None and order.disk != last:
            last = order.disk
            began.append(cluster.now)
        if began and cluster.now > began[-1] + 20:
            for node in cluster.nodes.values():
                node.disk_tried = last
        assert len(cluster.rounds.kept) <= 2
    assert all(later - earlier >= 39 for earlier, later in pairwise(began)) and len(began) >= 3
    assert cluster.rounds.last is not None and cluster.step - cluster.rounds.last[1] < 260


def test_a_disk_that_never_comes_back_holds_nothing_up() -> None:
    cluster = Cluster(2, CheckpointConfig(disk_every_s=2.0))
    for _ in range(400):
        cluster.turn()
    assert cluster.rounds.last is not None and cluster.step - cluster.rounds.last[1] < 160


def test_after_a_take_over_what_is_safe_is_known_from_the_nodes() -> None:
    cluster = Cluster(2)
    save = cluster.until_safe()
    cluster.rounds = Rounds()
    cluster.nodes["n1"].connected = False
    cluster.decide()
    order = rounds.order(cluster.rounds, "n0", cluster.config)
    assert order is None, "nothing is dropped before all have spoken"
    cluster.nodes["n1"].connected = True
    cluster.decide()
    assert cluster.rounds.last == save
    assert all(save in cluster.nodes[name].backups for name in cluster.nodes)


def test_an_attempt_that_ends_ends_its_round_and_what_is_safe_stays() -> None:
    cluster = Cluster(2)
    save = cluster.until_safe()
    while cluster.rounds.attempt == 0:
        cluster.turn()
    cluster.end()
    cluster.decide()
    assert (cluster.rounds.attempt, cluster.rounds.kept) == (0, (save,))
    cluster.start(cluster.step)
    assert cluster.until_safe() > save


def test_copies_that_are_all_there_when_the_attempt_ends_are_not_given_up() -> None:
    cluster = Cluster(2)
    save = cluster.until_safe()
    while not cluster.rounds.pulls:
        cluster.turn()
    newer = cluster.rounds.save
    assert newer is not None
    for node in cluster.nodes.values():
        cluster.pull(node)
    cluster.hear()  # status calls it safe from here on
    cluster.end()
    cluster.decide()
    cluster.obey()
    assert cluster.rounds.kept == (save, newer) and cluster.safe_step() == newer[1]
    cluster.start(cluster.step)
    cluster.decide()
    assert cluster.rounds.last == newer


def test_a_save_that_was_gone_back_behind_is_safe_no_more() -> None:
    cluster = Cluster(2)
    save = cluster.until_safe()
    cluster.end()
    cluster.start(save[1] - 1)
    cluster.decide()
    assert cluster.rounds.last is None


class AnyOrder(RuleBasedStateMachine):
    """Reports, orders and copies in any order, nodes that come and go, controllers that take over."""

    @initialize(nodes=st.integers(2, 4))
    def begin(self, nodes: int) -> None:
        self.cluster = Cluster(nodes, CheckpointConfig(round_s=0.5))
        self.cluster.hear()
        self.promised: Save | None = None
        self.left: set[str] = set()

    def name(self, number: int) -> str:
        return f"n{number % len(self.cluster.nodes)}"

    @rule(steps=st.integers(1, 12))
    def train(self, steps: int) -> None:
        self.cluster.train(steps)

    @rule(number=st.integers(0, 3), most=st.integers(1, 9))
    def pull(self, number: int, most: int) -> None:
        self.cluster.pull(self.cluster.nodes[self.name(number)], most)

    @rule(number=st.integers(0, 3))
    def hear(self, number: int) -> None:
        self.cluster.hear(self.name(number))

    @rule()
    def decide(self) -> None:
        self.cluster.decide()

    @rule(number=st.integers(0, 3))
    def obey(self, number: int) -> None:
        self.cluster.obey(self.name(number))

    @rule(turns=st.integers(1, 30))
    def all_goes_well(self, turns: int) -> None:
        for _ in range(turns):
            self.cluster.turn()

    @rule(number=st.integers(0, 3))
    def come_or_go(self, number: int) -> None:
        node = self.cluster.nodes[self.name(number)]
        node.connected = not node.connected

    @rule()
    def another_controller(self) -> None:
        self.cluster.rounds = Rounds()

    @rule(copied=st.booleans())
    def fail(self, copied: bool) -> None:
        """Just then, it may be, all copies have arrived and been reported."""
        if copied:
            for _ in range(40):
                if self.cluster.rounds.pulls:
                    break
                self.cluster.turn()
            for node in self.cluster.nodes.values():
                self.cluster.pull(node)
            self.cluster.hear()
        self.cluster.end()
        self.what_was_safe_is_kept()
        self.cluster.decide()
        self.cluster.obey()
        self.what_was_safe_is_kept()
        self.cluster.start(self.cluster.step)

    def said(self) -> int | None:
        """The step that status calls safe."""
        picture = self.cluster.picture()
        reports = {name: seen.report for name, seen in picture.nodes.items() if seen.connected}
        return resume.survives_any_node(reports, self.cluster.placement, resume.rules(self.cluster.state))

    @invariant()
    def what_was_safe_is_kept(self) -> None:
        """Ranks keep it and nodes hold it, from the moment it is complete, until a newer one is."""
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        if (said := self.said()) is not None and (self.promised is None or said > self.promised[1]):
            self.promised = next(save for node in cluster.nodes.values() for save in node.backups if save[1] == said)
        if self.promised is None:
            return
        safe = cluster.safe_step()
        assert safe is not None and safe >= self.promised[1]
        for node in cluster.nodes.values():
            assert {rank for rank, save in node.pinned if save >= self.promised} == set(node.ranks)
        assert len(cluster.rounds.kept) <= 2


AnyOrder.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
