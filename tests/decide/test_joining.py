"""Who takes part in a job on several machines, and in which order: seats, refusals, and the numbers of the nodes."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from evertrain.decide import standbys
from evertrain.decide.applying import apply, fold
from evertrain.decide.conduct import decide
from evertrain.decide.joining import Refusal, Wish, admit, arrivals, missing, node_name, settle
from evertrain.decide.memory import Blocked, Memory
from evertrain.decide.picture import NodePicture, Picture
from evertrain.decide.state import JobState
from evertrain.model import records as r
from evertrain.model.config import Config, MachinesConfig
from evertrain.model.decisions import Enlist, Evict, NodeFault, WaitForNodes
from evertrain.model.records import AnyRecord
from evertrain.model.report import Check, NodeReport, SelfCheck
from evertrain.model.spec import Seats
from support.world import World

CONFIG = MachinesConfig(join_s=600.0, last_call_s=30.0)
BEGAN = 1000.0


def started(seats: Seats | None, **different: Any) -> r.RunStarted:
    usual: dict[str, Any] = {
        "time": BEGAN, "run_id": "job-1", "nodes": ("first",), "standby": 0, "nproc_per_node": 2, "fresh": False,
        "start": "zygote", "command": "t.py", "seats": seats,
    }  # fmt: skip
    return r.RunStarted(**{**usual, **different})


def wish(host: str = "second", **different: Any) -> Wish:
    usual: dict[str, Any] = {"host": host, "instance": f"call on {host}", "nproc_per_node": 2, "version": "1.0"}
    return Wish(**{**usual, **different})


def here(*nodes: str, gone: tuple[str, ...] = (), owner_gone: tuple[str, ...] = ()) -> Picture:
    """`nodes` are connected, `gone` were."""
    return Picture(
        {
            node: NodePicture(
                NodeReport(node=node, owner_gone=node in owner_gone, self_check=SelfCheck(number=-1, checks=())),
                node in nodes,
                BEGAN,
            )
            for node in (*nodes, *gone)
        }
    )


class Door:
    """A job that waits for its nodes: ask for a seat, let time pass, see who is numbered."""

    def __init__(self, seats: Seats, *log: AnyRecord, **run: Any) -> None:
        self.now = BEGAN
        self.state = fold([*log, started(seats, **run)])
        self.present = {self.run.nodes[0]}
        self.answers: dict[str, SelfCheck | None] = {}
        """Of nodes that have not just passed their test."""

    @property
    def run(self) -> r.RunStarted:
        assert self.state.run is not None
        return self.state.run

    @property
    def picture(self) -> Picture:
        seen = here(*self.present)
        for node in self.answers.keys() & seen.nodes.keys():
            answer, old = self.answers[node], seen.nodes[node]
            seen.nodes[node] = replace(old, report=replace(old.report, self_check=answer))
        return seen

    def ask(self, host: str = "second", **different: Any) -> r.NodeJoined | Refusal:
        answer = admit(self.state, self.picture, wish(host, **different), job="job", version="1.0", now=self.now)
        if isinstance(answer, r.NodeJoined):
            self.state = apply(self.state, answer)
        return answer

    def join(self, host: str = "second", **different: Any) -> str:
        """Ask for a seat, get it, and have the agent connect; the node's name."""
        answer = self.ask(host, **different)
        assert isinstance(answer, r.NodeJoined), answer
        self.present.add(answer.node)
        return answer.node

    def refused(self, host: str = "second", **different: Any) -> str:
        answer = self.ask(host, **different)
        assert isinstance(answer, Refusal), answer
        return answer.because

    def settle(self) -> list[AnyRecord]:
        records = settle(self.state, self.picture, CONFIG, self.now)
        for record in records:
            self.state = apply(self.state, record)
        return records

    def order(self) -> tuple[str, ...]:
        """The nodes in the order in which they are settled."""
        (settled,) = self.settle()
        assert isinstance(settled, r.NodesSettled)
        return settled.nodes


# --- a seat, or why there is none


def test_a_node_gets_a_seat_under_its_hosts_name() -> None:
    door = Door(Seats(2, 2))
    door.now += 5.0
    answer = door.ask("gpu-17.cluster.example", instance="a", node_rank=1)
    assert answer == r.NodeJoined(time=BEGAN + 5.0, node="gpu-17", instance="a", node_rank=1)
    assert door.state.known_nodes() == ("first", "gpu-17")


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("gpu-17.cluster.example", "gpu-17"),
        ("a_b", "a_b"),
        ("../x", "node"),
        ("kn\u00f6ten/1", "kn-ten-1"),
        ("", "node"),
    ],
)
def test_a_name_becomes_a_folder_and_is_fit_for_that(host: str, name: str) -> None:
    assert node_name(host) == name


@pytest.mark.parametrize(
    ("different", "because"),
    [
        ({"job": "other"}, "job job is served here, not other"),
        ({"version": "0.9"}, "evertrain 1.0 serves job job; this node has 0.9"),
        ({"seats": Seats(3, 3)}, "job job has 2 nodes, this node was told 3 nodes (--nnodes, --standby)"),
        ({"nproc_per_node": 4}, "job job has 2 ranks on each node, this one would have 4 (--nproc-per-node)"),
        ({"node_rank": 2}, "--node-rank 2: nodes are numbered 0 to 1"),
        ({"node_rank": -1}, "--node-rank -1: nodes are numbered 0 to 1"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_sides(different: dict[str, Any], because: str) -> None:
    door = Door(Seats(2, 2))
    assert door.refused(**different) == because
    assert door.state.joined == {}


def test_the_job_that_was_named_is_the_one_that_is_served() -> None:
    assert Door(Seats(2, 2)).join(job="job") == "second"


@pytest.mark.parametrize(
    "over",
    [
        r.StopRequested(time=BEGAN, signal=15, because="asked to"),
        r.JobEnded(time=BEGAN, state="done", exit_code=0, message=""),
    ],
)
def test_a_job_that_is_ending_takes_nobody_in(over: AnyRecord) -> None:
    door = Door(Seats(2, 2))
    door.state = apply(door.state, over)
    assert door.refused() == "job job is ending; run the command again when it has ended"


def test_a_job_of_one_machine_takes_nobody_in() -> None:
    alone = fold([started(None)])
    answer = admit(alone, here("first"), wish(), job="job", version="1.0", now=BEGAN)
    assert answer == Refusal("job job has all its nodes on one machine (there is no --nnodes)")


def test_a_job_that_has_not_begun_takes_nobody_in() -> None:
    answer = admit(JobState(), here(), wish(), job="job", version="1.0", now=BEGAN)
    assert isinstance(answer, Refusal)


def test_a_rank_that_is_taken_is_refused_with_the_name_of_its_holder() -> None:
    door = Door(Seats(3, 3), node_rank=0)
    door.join("second", node_rank=2)
    assert door.refused("third", node_rank=0) == "--node-rank 0 is taken by first"
    assert door.refused("third", node_rank=2) == "--node-rank 2 is taken by second"
    assert door.join("third", node_rank=1) == "third"


def test_the_rank_of_a_node_that_never_came_is_free_again() -> None:
    door = Door(Seats(2, 2))
    door.ask("second", node_rank=1)
    assert door.refused("third", node_rank=1) == "--node-rank 1 is taken by second"
    door.now += 11.0
    assert door.join("third", node_rank=1) == "third"
    assert door.order() == ("first", "third")


def test_the_same_call_may_ask_twice() -> None:
    door = Door(Seats(2, 2))
    first = door.ask(instance="a")
    door.now += 3.0
    assert door.ask(instance="a") == first
    assert list(door.state.joined) == ["second"]


def test_two_nodes_on_one_host_are_told_apart() -> None:
    door = Door(Seats(4, 4), nodes=("host",))
    assert door.join("host", instance="a") == "host-2"
    assert door.join("host", instance="b") == "host-3"
    assert door.join("host.example", instance="c") == "host-4"
    assert door.order() == ("host", "host-2", "host-3", "host-4")


def test_a_seat_whose_agent_is_on_its_way_is_not_given_away() -> None:
    door = Door(Seats(3, 3))
    assert isinstance(door.ask(instance="a"), r.NodeJoined)
    assert door.join(instance="b") == "second-2"


def test_one_that_came_back_gets_its_seat() -> None:
    door = Door(Seats(3, 3))
    door.join("second", instance="a")
    door.join("third")
    door.present.remove("second")
    door.now += 11.0
    assert door.join("second", instance="b") == "second"
    assert door.state.joined["second"].instance == "b"
    assert door.order() == ("first", "second", "third")


def test_seats_are_not_given_twice() -> None:
    door = Door(Seats(2, 2))
    assert isinstance(door.ask("second"), r.NodeJoined)
    assert door.refused("third") == "job job has its 2 nodes: first, second"
    door.now += 11.0
    assert door.join("third") == "third", "the second one never came"


def test_after_settling_only_those_who_belong_come_back() -> None:
    door = Door(Seats(2, 2))
    door.join("second", instance="a")
    door.order()
    assert door.refused("third") == "job job has its 2 nodes: first, second"
    assert door.refused("second", instance="b") == "job job has its 2 nodes: first, second", "it is there"
    door.present.remove("second")
    door.now += 11.0
    assert door.refused("third") == "job job has its 2 nodes: first, second"
    assert door.join("second", instance="b") == "second"
    assert door.state.known_nodes() == ("first", "second")


def test_of_two_on_one_host_the_one_that_is_gone_comes_back() -> None:
    door = Door(Seats(3, 3), nodes=("host",))
    door.join("host", instance="a")
    door.join("host", instance="b")
    door.order()
    door.present.remove("host-3")
    door.now += 11.0
    assert door.join("host", instance="c") == "host-3"
    assert isinstance(door.ask("host", instance="d"), Refusal)


# --- a job that has lost nodes


def evicted(node: str, replacement: str | None = None, *, lost: bool = False) -> r.Decided:
    """As the ladder decides it; of the event only the ladder's memory would know."""
    replacements = {} if replacement is None else {node: replacement}
    evict = Evict(because="gpu lost", nodes=(node,), replacements=replacements, evidence=("Xid 79",), lost=lost)
    return r.Decided(time=BEGAN, action="evict", because="gpu lost", actions=(evict,))


def blocked(*nodes: str) -> Memory:
    return Memory(blocked={node: Blocked(since=BEGAN, because="gpu lost", is_certain=True) for node in nodes})


def short_of_second(seats: Seats | None = None) -> Door:
    """Three nodes of which `second` was evicted; it is still there."""
    door = Door(seats or Seats(2, 3))
    door.join("second", instance="a")
    door.join("third", instance="b")
    assert door.order() == ("first", "second", "third")
    door.state = apply(door.state, evicted("second"))
    door.state = replace(door.state, memory=blocked("second"))
    return door


def test_an_evicted_node_may_still_speak_and_is_listed() -> None:
    door = short_of_second()
    assert door.state.roster == ("first", "third")
    assert door.state.known_nodes() == ("first", "third", "second")
    assert door.state.nodes["second"].state == "evicted"
    named = fold([started(None, nodes=("a", "b", "c"), standby=1), evicted("b", "c", lost=True)])
    assert (named.roster, named.known_nodes(), named.nodes["b"].state) == (("a", "c"), ("a", "c", "b"), "lost")


def test_a_stranger_takes_the_seat_of_an_evicted_node_but_no_place_yet() -> None:
    door = short_of_second()
    assert arrivals(door.state, door.picture) == []
    assert isinstance(door.ask("fourth"), r.NodeJoined)
    assert arrivals(door.state, door.picture) == [], "its agent has not spoken"
    door.present.add("fourth")
    assert arrivals(door.state, door.picture) == ["fourth"]
    assert door.state.roster == ("first", "third")
    assert door.refused("fifth") == "job job has its 2 nodes: first, third", "one seat was free"
    door.state = apply(
        door.state,
        r.Decided(time=BEGAN, action="none", because="", actions=(Enlist(node="fourth", because="it has come"),)),
    )
    assert arrivals(door.state, door.picture) == []
    assert door.state.standbys() == ("fourth",)


def test_a_stranger_that_never_speaks_leaves_its_seat_to_another() -> None:
    door = short_of_second()
    assert isinstance(door.ask("fourth"), r.NodeJoined)
    door.now += 11.0
    assert door.join("fifth") == "fifth"


def test_an_evicted_node_that_is_called_again_has_its_own_name_and_is_no_arrival() -> None:
    door = short_of_second()
    assert door.join("second", instance="c") == "second-2", "another node of that host: the evicted one is still there"
    door = short_of_second()
    door.present.remove("second")
    door.now += 11.0
    assert door.join("second", instance="c") == "second"
    assert arrivals(door.state, door.picture) == [], "it is kept out until it has passed a test, or is allowed"
    door.state = replace(door.state, memory=Memory())
    assert arrivals(door.state, door.picture) == ["second"]


def test_where_nobody_is_missing_an_evicted_node_is_not_let_in_again() -> None:
    door = Door(Seats(2, 2, standby=1))
    for host in ("second", "third"):
        door.join(host)
    door.order()
    door.state = replace(apply(door.state, evicted("second", "third")), memory=blocked("second"))
    assert door.join("fourth") == "fourth"
    enlist = Enlist(node="fourth", because="it has come")
    door.state = apply(door.state, r.Decided(time=BEGAN, action="none", because="", actions=(enlist,)))
    door.present.remove("second")
    door.now += 11.0
    assert door.refused("second", instance="c") == "job job has its 3 nodes: first, third, fourth"


def test_a_range_that_was_settled_with_fewer_takes_others_in_later() -> None:
    door = Door(Seats(2, 3))
    door.join("second")
    door.now += 30.0
    assert door.order() == ("first", "second")
    assert door.join("third") == "third"
    assert arrivals(door.state, door.picture) == ["third"]


def test_who_had_a_seat_and_did_not_come_is_a_stranger_once_the_nodes_are_settled() -> None:
    door = Door(Seats(2, 2))
    door.ask("second")
    door.now += 11.0
    door.join("third")
    assert door.order() == ("first", "third")
    assert door.state.known_nodes() == ("first", "third")
    assert door.refused("second") == "job job has its 2 nodes: first, third"


def test_more_than_are_missing_do_not_arrive() -> None:
    named = fold([started(None, nodes=("a", "b", "c"), standby=0), evicted("b", lost=True), evicted("c", lost=True)])
    assert arrivals(named, here("a", "b", "c")) == ["b", "c"]
    named = fold([started(None, nodes=("a", "b", "c"), standby=0), evicted("b", lost=True)])
    assert arrivals(named, here("a", "b", "c")) == ["b"]
    assert arrivals(named, here("a", "c", gone=("b",))) == []
    assert arrivals(apply(named, r.StopRequested(time=1.0, signal=15, because="")), here("a", "b", "c")) == []


def test_a_place_that_another_one_is_wanted_for_is_no_place_taken() -> None:
    door = Door(Seats(2, 2), node_rank=0)
    door.join("second", node_rank=1)
    door.order()
    assert door.refused("third", node_rank=1) == "--node-rank 1 is taken by second"
    settled = door.state
    incident = r.IncidentOpened(
        time=BEGAN, incident=1, attempt=0, fault_time=BEGAN, cause="gpu lost", category="gpu_hardware", ranks=(),
        nodes=("second",), confidence=1.0, evidence=("Xid 79",), step=None, source="signal",
    )  # fmt: skip
    wait = WaitForNodes(because="", nodes=1, until=BEGAN + 300.0, instead_of=("second",))
    fault = NodeFault(time=BEGAN, node="second", signal="gpu_lost", evidence="Xid 79")
    waits = r.Decided(time=BEGAN, incident=1, action="none", because="", event=fault, actions=(wait,))
    lost = r.NodeChanged(time=BEGAN, node="second", state="lost", because="silent")
    for records in ([incident, waits], [lost]):
        door.state = fold(records, settled)
        assert door.join("third", node_rank=1) == "third"
        assert arrivals(door.state, door.picture) == ["third"]
        assert isinstance(door.ask("fourth"), Refusal), "one is enough"
        enlist = Enlist(node="third", because="it has come")
        door.state = apply(door.state, r.Decided(time=BEGAN, action="none", because="", actions=(enlist,)))
        assert arrivals(door.state, door.picture) == []


def test_the_number_of_an_evicted_node_is_free() -> None:
    door = Door(Seats(3, 3), node_rank=0)
    door.join("second", node_rank=1)
    door.join("third", node_rank=2)
    door.order()
    door.state = replace(apply(door.state, evicted("second")), memory=blocked("second"))
    assert door.refused("fourth", node_rank=2) == "--node-rank 2 is taken by third"
    assert door.join("fourth", node_rank=1) == "fourth"


def test_a_node_that_is_out_may_lose_its_run_without_stopping_the_job() -> None:
    door = short_of_second()
    picture = here("first", "second", "third", owner_gone=("second",))
    assert not any(isinstance(one, r.StopRequested) for one in decide(door.state, picture, Config(), door.now))


def test_who_was_evicted_before_trains_only_where_there_is_nobody_else() -> None:
    door = Door(Seats(2, 2, standby=1), *before("first", "second"))
    door.state = replace(door.state, memory=blocked("second"))
    door.join("second")
    door.join("third")
    assert door.order() == ("first", "third"), "it is no standby either"
    door = Door(Seats(2, 2), *before("second", "first"))
    door.state = replace(door.state, memory=blocked("second"))
    door.join("second")
    assert door.order() == ("first", "second")
    door = Door(Seats(2, 2), *before("second", "first"))
    door.state = replace(door.state, memory=blocked("second"))
    door.state = apply(door.state, r.AllowAsked(time=BEGAN, node="second", because=""))
    door.join("second")
    assert door.order() == ("second", "first"), "it was allowed back"


# --- when the nodes are settled


def test_nodes_are_settled_when_all_seats_are_taken() -> None:
    door = Door(Seats(3, 3))
    door.join("second")
    assert door.settle() == []
    door.now += 1.0
    door.join("third")
    assert door.settle() == [r.NodesSettled(time=door.now, nodes=("first", "second", "third"), standby=0)]
    assert door.settle() == [], "once"


def test_only_nodes_that_are_connected_count() -> None:
    door = Door(Seats(2, 2))
    door.ask("second")
    door.now += 100.0
    assert door.settle() == []
    door.present.add("second")
    assert door.order() == ("first", "second")


def test_a_range_waits_a_little_for_more_after_the_least_have_come() -> None:
    door = Door(Seats(2, 4))
    door.now += 200.0
    assert door.settle() == [], "one is too few, however long it waits"
    door.join("second")
    door.now += 29.0
    assert door.settle() == []
    door.join("third")
    door.now += 29.0
    assert door.settle() == [], "whoever comes gives the others time again"
    door.now += 1.0
    assert door.order() == ("first", "second", "third")


def test_a_range_is_settled_at_once_when_all_have_come() -> None:
    door = Door(Seats(1, 2))
    door.join("second")
    assert door.order() == ("first", "second")


def test_spares_are_the_last_of_those_who_came() -> None:
    door = Door(Seats(2, 2, standby=1))
    door.join("second")
    door.now += 29.0
    assert door.settle() == []
    door.join("third")
    (settled,) = door.settle()
    assert settled == r.NodesSettled(time=door.now, nodes=("first", "second", "third"), standby=1)
    assert door.state.active_nodes() == ("first", "second")
    assert door.state.placement() == {0: "first", 1: "first", 2: "second", 3: "second"}


def test_a_spare_that_does_not_come_is_done_without() -> None:
    door = Door(Seats(2, 2, standby=1))
    door.join("second")
    door.now += 30.0
    (settled,) = door.settle()
    assert settled == r.NodesSettled(time=door.now, nodes=("first", "second"), standby=0)


def test_it_gives_up_with_a_line_that_names_who_is_there() -> None:
    door = Door(Seats(3, 3))
    door.now += 100.0
    door.join("second")
    door.now += 599.0
    assert door.settle() == []
    door.now += 1.0
    (ended,) = door.settle()
    assert isinstance(ended, r.JobEnded)
    assert (ended.state, ended.exit_code) == ("failed", 1)
    assert ended.message == ("2 of 3 nodes have come (first, second) within 700 s (machines.join_s)")


BROKEN = SelfCheck(
    number=-1, checks=(Check(name="cpu", passed=True), Check(name="gpu", passed=False, detail="GPU 3 is lost"))
)


def test_a_node_whose_machine_is_broken_gets_no_ranks_until_it_has_passed() -> None:
    door = Door(Seats(2, 2))
    door.answers["second"] = BROKEN
    door.join()
    door.now += 60.0
    assert door.settle() == []
    said = "second stays out, its self-check has failed: gpu: GPU 3 is lost"
    assert missing(door.state, door.picture).endswith(
        f"1 of 2 nodes are here (first); run the same command on the others; {said}"
    )
    door.answers["second"] = SelfCheck(number=-2, checks=())
    assert door.order() == ("first", "second")


def test_a_broken_node_does_not_keep_others_from_starting_and_is_named_where_it_does() -> None:
    door = Door(Seats(2, 3))
    door.join()
    door.answers[door.join("third")] = BROKEN
    door.now += CONFIG.last_call_s
    assert door.order() == ("first", "second")
    door = Door(Seats(2, 2))
    door.answers[door.join()] = BROKEN
    door.now += CONFIG.join_s
    (ended,) = door.settle()
    assert isinstance(ended, r.JobEnded) and ended.message.endswith("gpu: GPU 3 is lost")


def test_a_node_that_has_just_come_is_given_a_moment_to_test_itself_and_no_more() -> None:
    door = Door(Seats(2, 2))
    door.answers["second"] = None
    door.join()
    assert door.settle() == []
    door.now += 4.9
    assert door.settle() == []
    door.now += 0.2
    assert door.order() == ("first", "second"), "who says nothing is not accused of anything"


def test_whoever_wants_to_join_is_asked_about_its_machine_and_again_while_it_is_broken() -> None:
    world = World(seats=Seats(2, 2))
    world.turn()
    assert asked(world, "node-0") == -1
    world.turns(3, 61.0)
    assert asked(world, "node-0") == -1, "what has been answered is not asked again"
    world.join("second")
    world.nodes["second"].disk_is_dead = True
    world.turns(3)
    broken = asked(world, "second")
    assert broken < -1 and world.running() == {}
    world.nodes["second"].disk_is_dead = False
    world.turns(3)
    assert asked(world, "second") == broken and world.running() == {}, "once in every period"
    world.turns(3, 30.0)
    world.turns()
    assert world.running() == dict.fromkeys(range(4), 1)
    assert asked(world, "second") == 0, "in training it is asked nothing"


def asked(world: World, node: str) -> int:
    return standbys.check_number(world.state, world.picture(), node, world.config, world.now)


def test_what_is_waited_for_is_said_until_the_nodes_are_settled() -> None:
    door = Door(Seats(2, 2))
    assert missing(door.state, here()) == "", "the first node itself is about to speak"
    assert missing(door.state, here("first")) == "1 of 2 nodes are here (first); run the same command on the others"
    door.join()
    door.order()
    assert missing(door.state, door.picture) == ""
    assert missing(fold([started(None)]), here("first")) == ""


def test_a_job_that_is_asked_to_stop_is_not_settled() -> None:
    door = Door(Seats(2, 2))
    door.join()
    door.state = apply(door.state, r.StopRequested(time=door.now, signal=2, because="asked to"))
    assert door.settle() == []
    door.now += 10_000.0
    assert door.settle() == []


# --- in which order


def test_places_that_were_asked_for_are_given_and_the_rest_fills_the_gaps_as_it_came() -> None:
    door = Door(Seats(4, 4))
    door.join("b", node_rank=3)
    door.join("c", node_rank=0)
    door.join("d")
    assert door.order() == ("c", "first", "d", "b")


def test_the_first_nodes_own_rank_counts() -> None:
    door = Door(Seats(3, 3), node_rank=2)
    door.join("b")
    door.join("c")
    assert door.order() == ("b", "c", "first")


def test_a_place_beyond_those_who_came_is_no_place() -> None:
    door = Door(Seats(1, 4))
    door.join("b", node_rank=3)
    door.now += 30.0
    assert door.order() == ("first", "b")


def before(*nodes: str) -> tuple[AnyRecord, ...]:
    """The log of an earlier run with these nodes."""
    seats = Seats(len(nodes), len(nodes))
    return (started(seats, time=1.0, run_id="job-0"), r.NodesSettled(time=2.0, nodes=nodes, standby=0))


def test_who_had_a_place_in_the_run_before_has_it_again() -> None:
    door = Door(Seats(3, 3), *before("third", "first", "second"))
    door.join("second")
    door.join("third")
    assert door.order() == ("third", "first", "second")


def test_a_stranger_fills_the_gap_that_a_missing_node_leaves() -> None:
    door = Door(Seats(3, 3), *before("third", "gone", "first"))
    door.join("new")
    door.join("third")
    assert door.order() == ("third", "new", "first")


def test_what_is_asked_for_now_outranks_what_was() -> None:
    door = Door(Seats(3, 3), *before("second", "third", "first"))
    door.join("second", node_rank=2)
    door.join("third")
    assert door.order() == ("first", "third", "second")


# --- what the log remembers


def test_nobody_has_ranks_before_the_nodes_are_settled() -> None:
    state = fold([started(Seats(2, 2)), r.NodeJoined(time=2.0, node="second", instance="a")])
    assert (state.roster, state.active_nodes(), state.placement()) == ((), (), {})
    assert state.known_nodes() == ("first", "second")
    state = apply(state, r.NodesSettled(time=3.0, nodes=("second", "first"), standby=0))
    assert state.known_nodes() == ("second", "first")
    assert state.placement() == {0: "second", 1: "second", 2: "first", 3: "first"}


def test_named_nodes_are_settled_from_the_start() -> None:
    state = fold([started(None, nodes=("a", "b", "c"), standby=1)])
    assert (state.roster, state.active_nodes()) == (("a", "b", "c"), ("a", "b"))


def test_a_run_knows_who_had_which_ranks_before_and_forgets_who_joined() -> None:
    again = started(Seats(2, 2), run_id="job-2")
    joined = r.NodeJoined(time=3.0, node="first", instance="a")
    state = fold([*before("second", "first"), joined, again])
    assert (state.earlier_roster, state.joined, state.roster) == (("second", "first"), {}, ())
    # a run that never got its nodes together has placed nothing on anybody's disk
    state = fold([again], state)
    assert state.earlier_roster == ("second", "first")


# --- the life of a job whose nodes join


@pytest.mark.parametrize("settled", [False, True])
def test_a_node_that_its_run_has_left_stops_the_job(settled: bool) -> None:
    door = Door(Seats(2, 2))
    door.join("second")
    if settled:
        door.order()
    picture = here("first", "second", owner_gone=("second",))
    (stop,) = decide(door.state, picture, Config(), door.now)
    assert stop == r.StopRequested(time=door.now, signal=15, because="`evertrain run` on second is gone")
    stopping = apply(door.state, stop)
    assert not any(isinstance(record, r.StopRequested) for record in decide(stopping, picture, Config(), door.now))


def test_nothing_starts_before_the_nodes_are_there() -> None:
    world = World(nproc=2, seats=Seats(2, 2))
    world.turns()
    assert not world.running() and not world.state.attempts
    assert not world.nodes["node-0"].attempts, "whose ranks they are is not known yet"
    world.join("other")
    world.turns()
    assert world.running() == dict.fromkeys(range(4), 1)
    assert world.state.placement() == {0: "node-0", 1: "node-0", 2: "other", 3: "other"}


def test_a_stop_while_nodes_are_waited_for_ends_the_job() -> None:
    world = World(seats=Seats(2, 2))
    world.turns()
    world.stop(signal=2)
    world.turns()
    assert world.state.ended is not None
    assert (world.state.ended.state, world.state.ended.exit_code) == ("stopped", 130)


def test_a_job_that_waits_in_vain_ends() -> None:
    world = World(seats=Seats(2, 2))
    world.turns(15, seconds=60.0)
    assert world.state.ended is not None and "1 of 2 nodes have come (node-0)" in world.state.ended.message


def test_a_controller_that_takes_over_goes_on_waiting() -> None:
    world = World(seats=Seats(3, 3))
    world.join("b")
    world.turns()
    world.take_over()
    world.turns()
    assert world.state.known_nodes() == ("node-0", "b")
    world.join("c")
    world.turns()
    assert world.running() == dict.fromkeys(range(6), 1)


def test_the_next_run_goes_on_with_the_same_ranks_on_the_same_nodes_whoever_comes_first() -> None:
    world = World(seats=Seats(3, 3))
    world.join("b")
    world.join("c")
    world.turns()
    world.train(5)
    world.turn()
    world.stop()
    world.turns()
    assert world.state.ended is not None and "step 4 is on disk" in world.state.ended.message
    placed = world.state.placement()
    world.run_again()
    world.join("c")
    world.join("b")
    world.turns()
    assert world.state.placement() == placed
    assert world.state.active is not None and world.state.active.started.resume == 4


def test_nodes_that_come_late_are_given_their_time_to_prepare() -> None:
    world = World(seats=Seats(3, 3))
    world.turns(2)
    for host in ("b", "c"):
        world.turn(500.0)
        world.join(host)
        world.turns(2)
    world.turns()
    assert world.state.ended is None
    assert world.running()
