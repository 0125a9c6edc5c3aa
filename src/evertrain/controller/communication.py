"""Who watches the collectives of a job, and who asks all ranks when something is wrong with them?

    few ranks, every second ──▶ trigger ──alarm──▶ `CollectivesOdd` ──▶ a look at all ranks ──▶ judged in a thread
                                   └── well for some seconds: `CollectivesWell`                    ──▶ `CauseFound`

A hang or slowness that somebody else has noticed begins an episode, too. What is asked of the nodes has a short
deadline of its own: the node that it is about may be the one that cannot answer. A controller that takes over begins to
learn what is usual anew, and asks again about an episode that lasts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from evertrain.agent.aside import aside
from evertrain.controller.windows import Windows
from evertrain.decide import communication
from evertrain.decide.picture import Picture
from evertrain.decide.state import JobState
from evertrain.detect.collectives import Trigger
from evertrain.locate import parallel
from evertrain.locate.collectives import judge
from evertrain.locate.sampling import TURN_S, sample
from evertrain.model import windows
from evertrain.model.collective_records import CauseFound, CollectivesOdd, CollectivesWell, SeenBy
from evertrain.model.collectives import NodeTrace, RootCause, Symptom, Watch
from evertrain.model.report import NodeReport
from evertrain.model.spec import ControllerSpec
from evertrain.model.windows import JobWindow

_log = logging.getLogger(__name__)

COLLECT_S = 1.2
"""So long nodes are waited for, once most have answered; what is missing by then is looked for the next time."""
_BEFORE_S = 12.0
"""With this much of the past what is now is compared, or three times as much as it lasts."""
_MARGIN_S = 0.5
_MOST_ROWS, _FEWEST_ROWS = 600_000, 32
"""Operations that all ranks together tell one by one, and one rank at least."""
_INSIDE_RANK_S, _INSIDE_S = 4096.0, (0.5, 5.0)
"""Of NCCL's own records, which are many, so many seconds of all ranks together; of each rank between these."""
_TRAINING = frozenset({"", "train"})
_BRIEF_S = 5.0
"""What others have noticed is an episode for so long at least."""

Note = Callable[[CollectivesOdd | CauseFound | CollectivesWell], None]


class Communication:
    """Of one job."""

    def __init__(
        self,
        spec: ControllerSpec,
        looks: Windows,
        note: Note,
    ) -> None:
        self._spec, self._looks, self._note = spec, looks, note
        self._trigger = Trigger()
        self._attempt = 0
        self._watched: tuple[int, ...] = ()
        self._declared = False
        """Some rank is in a phase that explains what others wait for; the first steps take as long as they take."""
        self._series = 0
        """The newest looks at a slow job that have begun an episode."""
        self._noted: CollectivesOdd | CollectivesWell | None = None
        """What is on its way to the log, until the state has it."""
        self._asked: _Asked | None = None
        self._judging: asyncio.Task[None] | None = None

    @property
    def watched(self) -> tuple[int, ...]:
        """The ranks whose seconds are read."""
        return self._watched

    def orders(self, state: JobState) -> dict[str, Watch]:
        """By node, the ranks that it is to watch."""
        attempt = state.active
        if attempt is None or attempt.ending is not None:
            return {}
        found: dict[str, list[int]] = {}
        for rank in self._watched:
            if rank not in attempt.ends and rank in attempt.started.placement:
                found.setdefault(attempt.started.placement[rank], []).append(rank)
        return {node: Watch(attempt.number, tuple(ranks)) for node, ranks in found.items()}

    def hear(self, state: JobState, report: NodeReport, now: float) -> None:
        """Take the seconds that a node tells."""
        attempt = state.active
        if not report.pulses or attempt is None or attempt.number != self._attempt or attempt.ending is not None:
            return
        pulses = [one for one in report.pulses if one.attempt == self._attempt and one.rank in self._watched]
        alarm = self._trigger.take(pulses, now, declared=self._declared)
        if alarm is not None:
            self._begin(state, alarm.symptom, "trigger", alarm.for_s, alarm.evidence)

    def look(self, state: JobState, picture: Picture, now: float) -> None:
        """Choose whom to watch; ask all ranks when that is due, and judge what they have said."""
        self._choose(state, now)
        pages = picture.pages(self._attempt).values()
        steps = max((page.relative_step for page in pages), default=0)
        is_new = 0 < steps < self._spec.config.metrics.warm_up_steps
        self._declared = is_new or any(page.phase not in _TRAINING for page in pages)
        if self._noted is not None and self._is_known(state, self._noted):
            self._noted = None
        self._follow_others(state, now)
        seen = state.communication
        if seen is not None and self._noted is None and self._is_over(state, now):
            self._tell(CollectivesWell(time=0.0, attempt=seen.odd.attempt, episode=seen.odd.episode))
        self._ask(state, now, is_inside_seen=any(seen.report.nccl for seen in picture.nodes.values()))
        self._take_answer(state)

    # -- episodes ------------------------------------------------------------------------------------------------------

    def _choose(self, state: JobState, now: float) -> None:
        attempt = state.active
        if attempt is None or attempt.ending is not None or not self._spec.config.trace.enabled:
            self._watched = ()
            return
        if attempt.number != self._attempt:
            self._attempt, self._trigger = attempt.number, Trigger()
        mesh = parallel.sizes(self._spec.mesh or state.learnt_mesh)
        watched = sample(len(attempt.started.placement), mesh, int(now // TURN_S), attempt.alive())
        if watched != self._watched:
            self._watched = watched
            self._trigger.forget(watched)

    def _begin(self, state: JobState, symptom: Symptom, seen_by: SeenBy, for_s: float, evidence: str) -> None:
        seen = state.communication
        episode = seen.odd.episode if seen is not None else state.next_episode
        self._tell(
            CollectivesOdd(
                time=0.0,  # the conductor knows
                attempt=self._attempt,
                episode=episode,
                symptom=symptom,
                seen_by=seen_by,
                for_s=round(for_s, 2),
                evidence=evidence,
            )
        )

    def _tell(self, record: CollectivesOdd | CollectivesWell) -> None:
        self._noted = record
        self._note(record)

    def _is_known(self, state: JobState, record: CollectivesOdd | CollectivesWell) -> bool:
        seen = state.communication
        if isinstance(record, CollectivesWell):
            return seen is None or seen.odd.episode != record.episode
        return seen is not None and replace(seen.odd, time=0.0) == record

    def _follow_others(self, state: JobState, now: float) -> None:
        """Somebody else has noticed that the job makes no steps, or fewer."""
        if state.communication is not None or self._noted is not None or not self._watched:
            return
        if (hang := state.suspicion) is not None and hang.attempt == self._attempt:
            self._begin(state, "stuck", "hang", now - hang.time + _BEFORE_S / 4, "; ".join(hang.evidence[:2]))
            return
        asked = state.captures[-1].asked if state.captures else None
        if asked is not None and asked.series > self._series and asked.attempt == self._attempt:
            self._series = asked.series
            slow_s = self._spec.config.metrics.slow_s
            self._begin(state, "slow", "slow", slow_s, "training has become slower, by its own numbers")

    def _is_over(self, state: JobState, now: float) -> bool:
        seen = state.communication
        assert seen is not None
        if seen.odd.attempt != self._attempt or not self._watched:
            return True
        hangs = state.suspicion is not None and state.suspicion.attempt == self._attempt
        is_new = seen.odd.seen_by != "trigger" and now - seen.since < _BRIEF_S
        return self._trigger.symptom is None and not hangs and not is_new

    # -- looks ---------------------------------------------------------------------------------------------------------

    def _ask(self, state: JobState, now: float, *, is_inside_seen: bool) -> None:
        due = communication.next_look(state)
        seen = state.communication
        if due is None or now < due or seen is None or self._asked is not None or self._judging is not None:
            return
        now_s = now - seen.since + seen.odd.for_s + _MARGIN_S
        ranks = len(state.active.started.placement) if state.active is not None else 1
        number = self._looks.ask(
            state,
            now,
            seconds=max(_BEFORE_S, 3 * now_s),
            now_s=round(now_s, 2),
            most=max(_FEWEST_ROWS, min(256, _MOST_ROWS // (2 * ranks))),
            attempt=seen.odd.attempt,
            collect_s=COLLECT_S,
        )
        if number is None:
            return
        inside = None
        if is_inside_seen:
            least, most = _INSIDE_S
            seconds = max(least, min(most, now_s, _INSIDE_RANK_S / ranks))
            inside = self._looks.ask(
                state, now, seconds=seconds, attempt=seen.odd.attempt, writers=("nccl",), collect_s=COLLECT_S
            )
        self._asked = _Asked(number, inside, seen.odd.episode, seen.odd.symptom)

    def _take_answer(self, state: JobState) -> None:
        asked = self._asked
        if asked is None or any(self._looks.waits_for(one) is not None for one in asked.numbers):
            return
        self._asked = None
        window, *rest = map(self._looks.result, asked.numbers)
        inside = rest[0] if rest else None
        attempt = next((one for one in state.attempts if window is not None and one.number == window.attempt), None)
        if window is not None and attempt is not None:
            expected = {rank: node for rank, node in attempt.started.placement.items() if rank not in attempt.ends}
            self._judging = asyncio.create_task(self._judge(asked, window, inside, expected))

    async def _judge(
        self, asked: _Asked, window: JobWindow, inside: JobWindow | None, expected: Mapping[int, str]
    ) -> None:
        try:
            cause = await aside("rca", of_window, window, asked.symptom, expected, inside)
        except Exception as error:  # a bug of ours: it costs the verdict
            _log.exception("look %d at collectives", asked.number)
            line = f"what ranks said could not be judged ({type(error).__name__}); see the controller's log"
            cause = RootCause(symptom=asked.symptom, component="none", evidence=(line,))
        finally:
            self._judging = None
        self._note(
            CauseFound(
                time=0.0,  # the conductor knows
                attempt=window.attempt,
                episode=asked.episode,
                cause=cause,
                seconds=round(time.monotonic() - asked.began, 3),
            )
        )


class _Asked:
    """A look at all ranks, and perhaps another inside of NCCL."""

    def __init__(self, number: int, inside: int | None, episode: int, symptom: Symptom) -> None:
        self.number, self.episode, self.symptom = number, episode, symptom
        self.numbers = (number,) if inside is None else (number, inside)
        self.began = time.monotonic()


def of_window(
    window: JobWindow, symptom: Symptom | None, expected: Mapping[int, str], inside: JobWindow | None = None
) -> RootCause:
    """What the looks of all nodes show, and the records of NCCL where there are any; times are by our clock."""
    cause = _of_looks(window, symptom, expected)
    if inside is None:
        return cause
    from evertrain.controller import nccl_cause
    from evertrain.trace import scene

    try:
        seen = scene.of_window(inside)
    except ValueError as error:
        return replace(cause, blind=(*cause.blind, f"inside of NCCL: {error}"))
    return nccl_cause.stronger(cause, nccl_cause.of_scene(seen, inside.seconds))


def _of_looks(window: JobWindow, symptom: Symptom | None, expected: Mapping[int, str]) -> RootCause:
    from evertrain.trace import looking

    looks: list[NodeTrace] = []
    blind: list[str] = []
    clocks: dict[str, tuple[float, float]] = {}
    for part in window.parts:
        try:
            look = windows.unpack_trace(part.packed)
        except ValueError as error:
            blind.append(f"{part.node}: {error}")
            continue
        looks.append(look)
        clocks[look.node] = (look.time + part.offset_s, part.bound_s)
    cause = judge(looking.with_peers(looks), symptom, expected=expected)
    cause = replace(cause, blind=(*cause.blind, *blind))
    if cause.first_s is None or not cause.nodes or cause.nodes[0] not in clocks:
        return cause
    at, bound_s = clocks[cause.nodes[0]]
    return replace(cause, time=at - cause.first_s, bound_s=bound_s)
