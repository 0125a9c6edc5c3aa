"""Is communication stuck or slow? A fold over the seconds of a few ranks.

stuck   a rank waits for an operation, and none of its operations has ended for longer than is usual
slow    operations follow each other at 1.5 times the usual interval, in three windows of a second in a row; or at 1.6
        times over six seconds as a whole; or what would have been stuck, had it not ended between two looks

Whatever gets stuck looks slow first, to those who only count. So nothing is called slow while any of these ranks stands
still; and what is compared is the mean interval between ends, which a second in which nothing ends does not change.
(A median would hide what comes in bursts.) Where a step takes about as long as a window, hardly three in a row are
alike; six together are, and a hiccup or two do not make them slow.

What is usual is learnt for each communicator, operation and size from seconds in which all was well. It follows what
becomes faster and is never dragged along by what becomes slower. All that is odd without five good seconds between is
one episode. An alarm says when something is wrong, not who has begun it: that is asked of all ranks
(`locate.collectives`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

import msgspec

from evertrain.model.collectives import Pulse, Stream, Symptom

SLOW = 1.5
ROW = 3
WHOLE, SLOW_WHOLE = 6, 1.6
"""Seconds that are judged as a whole, and how slow that is;"""
_WHOLE_LASTS_S = 4.0
"""... of which so many were slow, at twice the usual interval."""
_AGREE = 2
"""Ranks that have become slow: it reaches all of them."""
STILL_S = 2.0
"""Nothing is stuck sooner,"""
_STILL_GAPS, _STILL_MARGIN = 3.0, 1.25
"""... nor before so many times what is usual without an end, or so much more than the longest that was seen."""
_SILENT_S, _SILENT_GAPS = 0.7, 2.0
"""A rank without an end for so long, and so many times what is usual, stands still as far as slowness is concerned."""
_TENTH = 10
"""Of the seconds of a step many may bring operations in quick succession: usual is the longest time without an end that
a tenth of the seconds has."""
_KNOWN = 10
"""Seconds from which on it is known what is usual."""
_EVERY = 5
"""... and that is worked out anew."""
_RECENT = 60
_GAPS = 240
_DEVIATIONS = 4.0
"""Where intervals vary by nature, slow is what is above them by so many standard deviations."""
_MAD = 1.4826
QUIET_S = 5.0
"""TCP needs about as long to recover."""
_FRESH_S = 3.0
_MOST_STREAMS = 4096


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """Something is wrong. The same episode may bring a second one: what seemed slow is stuck."""

    episode: int
    symptom: Symptom
    rank: int
    """That showed it; it is hardly ever the one that has begun it."""
    for_s: float
    """It has lasted at least so long."""
    evidence: str


class Trigger:
    """Of one attempt."""

    def __init__(self) -> None:
        self._usual: dict[_Key, _Usual] = {}
        self._gaps: deque[float] = deque(maxlen=_GAPS)
        self._usual_gap_s = 0.0
        self._learnt = 0
        self._repeats = False
        """Some operation comes again and again: the job is not at its beginning any more."""
        self._ranks: dict[int, _Rank] = {}
        self._episodes = 0
        self._odd_time = 0.0
        self.symptom: Symptom | None = None
        """Of the episode that lasts."""

    @property
    def episode(self) -> int | None:
        return self._episodes if self.symptom is not None else None

    def take(self, pulses: Iterable[Pulse], now: float, *, declared: bool = False) -> Alarm | None:
        """What newer seconds show, each given once; `declared`: any rank is in a phase that explains them."""
        found: Alarm | None = None
        for pulse in sorted(pulses, key=lambda one: one.number):
            rank = self._ranks.setdefault(pulse.rank, _Rank(pulse.rank))
            if pulse.number <= rank.number:
                continue
            rank.number, rank.time, rank.still_s = pulse.number, now, pulse.still_s
            if declared or pulse.phase:
                rank.is_back, rank.still_s = False, None
                rank.begin_anew()
                continue
            found = self._judge(rank, pulse, now) or found
        if self.symptom is not None and now - self._odd_time >= QUIET_S:
            self.symptom = None
            for rank in self._ranks.values():
                rank.begin_anew()
        return found

    def forget(self, watched: Iterable[int]) -> None:
        """Only these ranks are watched from now on."""
        kept = set(watched)
        self._ranks = {number: rank for number, rank in self._ranks.items() if number in kept}

    # --- one second of one rank

    def _judge(self, rank: _Rank, pulse: Pulse, now: float) -> Alarm | None:
        if not rank.is_back:
            # the first second after a declared phase, or of all: its intervals are of another kind
            if pulse.streams:
                rank.is_back = True
            rank.still_s = None
            return None
        rank.take(pulse.streams)
        if (stuck := self._stuck(pulse)) is not None:
            self._odd_time = now
            since_s = self._since(rank, now) if self.symptom is not None else 0.0
            return self._alarm("stuck", pulse.rank, max(pulse.still_s or 0.0, since_s), stuck)
        if self._repeats and len(self._gaps) >= _KNOWN and pulse.waited_s >= self._still_limit_s():
            self._odd_time = now
            halted = f"rank {pulse.rank} has waited for {pulse.waited_s:.1f} s until an operation of it ended"
            for_s = pulse.waited_s + (pulse.still_s or 0.0)
            return self._alarm("slow", pulse.rank, for_s, f"{halted}; {self._usually()}")
        if len(self._gaps) < _KNOWN:
            self._learn(rank, pulse)
            return None
        if self._stands_still(now):
            # one that has stood still is not well as soon as it moves
            self._odd_time = now if self.symptom is not None else self._odd_time
            return None
        rank.drags, dragging = self._drags(rank)
        dragged = sum(one.drags for one in self._ranks.values())
        if self.symptom is None and rank.drags and dragged >= min(_AGREE, len(self._ranks)):
            self._odd_time = now
            return self._alarm("slow", pulse.rank, _WHOLE_LASTS_S, dragging)
        judged = [(one, usual) for one in pulse.streams if (usual := self._known(one)) is not None]
        slow = [(one, usual) for one, usual in judged if one.interval_s >= usual.limit_s(SLOW)]
        if not judged:
            self._learn(rank, pulse)
            return None
        if 2 * len(slow) < len(judged):
            rank.row, rank.well_time = 0, now
            self._learn(rank, pulse)
            return None
        rank.row += 1
        if self.symptom is not None:
            self._odd_time = now
        if rank.row < ROW or sum(one.row >= ROW for one in self._ranks.values()) < min(_AGREE, len(self._ranks)):
            return None
        self._odd_time = now
        return self._alarm("slow", pulse.rank, self._since(rank, now), _slower(pulse.rank, slow, ROW))

    def _since(self, rank: _Rank, now: float) -> float:
        """The last good second."""
        return now - rank.well_time if rank.well_time is not None else float(ROW)

    def _stuck(self, pulse: Pulse) -> str | None:
        if pulse.still_s is None or not pulse.in_flight or len(self._gaps) < _KNOWN or not self._repeats:
            return None
        if pulse.still_s < self._still_limit_s():
            return None
        return f"rank {pulse.rank} waits, and no operation of it has ended for {pulse.still_s:.1f} s; {self._usually()}"

    def _usually(self) -> str:
        return f"usually it takes {self._usual_gap_s:.2f} s at most from one to the next"

    def _still_limit_s(self) -> float:
        return max(STILL_S, _STILL_GAPS * self._usual_gap_s, _STILL_MARGIN * max(self._gaps))

    def _stands_still(self, now: float) -> bool:
        """Whether any rank finishes nothing: then it is too early to say that anything is slow."""
        limit_s = max(_SILENT_S, _SILENT_GAPS * self._usual_gap_s)
        return any(
            one.still_s is not None and one.still_s > limit_s and now - one.time < _FRESH_S
            for one in self._ranks.values()
        )

    def _known(self, stream: Stream) -> _Usual | None:
        found = self._usual.get(_key(stream))
        return found if found is not None and found.is_known and stream.ended else None

    def _drags(self, rank: _Rank) -> tuple[bool, str]:
        """Whether its last seconds are slow as a whole, and what shows it."""
        judged = [
            (one, usual)
            for key, one in rank.whole.items()
            if (usual := rank.usual.get(key)) is not None and usual.is_known
        ]
        slow = [(one, usual) for one, usual in judged if one.interval_s >= usual.limit_s(SLOW_WHOLE)]
        if not slow or 2 * len(slow) < len(judged):
            return False, ""
        return True, _slower(rank.rank, slow, WHOLE)

    def _learn(self, rank: _Rank, pulse: Pulse) -> None:
        if self.symptom is not None:
            return
        if pulse.longest_s > 0:
            self._gaps.append(pulse.longest_s)
            self._learnt += 1
            if len(self._gaps) <= _KNOWN or self._learnt % _EVERY == 0:
                ordered = sorted(self._gaps)
                self._usual_gap_s = ordered[-1 - len(ordered) // _TENTH]
        for one in pulse.streams:
            usual = _of(self._usual, _key(one))
            if one.ended and one.interval_s > 0:
                usual.take(one.interval_s)
                self._repeats = self._repeats or usual.is_known
        for key, one in rank.whole.items():
            _of(rank.usual, key).take(one.interval_s)

    def _alarm(self, symptom: Symptom, rank: int, for_s: float, evidence: str) -> Alarm | None:
        if self.symptom == symptom or self.symptom == "stuck":
            return None
        if self.symptom is None:
            self._episodes += 1
        self.symptom = symptom
        return Alarm(episode=self._episodes, symptom=symptom, rank=rank, for_s=for_s, evidence=evidence)


class _Rank:
    """What is remembered of a rank that is watched."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.number = -1
        self.time = 0.0
        self.still_s: float | None = None
        self.row = 0
        """Slow seconds in a row; those that say nothing are left out."""
        self.well_time: float | None = None
        """When the last good second was over."""
        self.is_back = False
        self._recent: deque[tuple[Stream, ...]] = deque(maxlen=WHOLE)
        self.whole: dict[_Key, Stream] = {}
        """What its last seconds have ended, once there are enough of them."""
        self.usual: dict[_Key, _Usual] = {}
        """Of so many seconds as a whole. They vary so little that members of one group may not be taken together: in
        the middle of a pipeline twice as much is sent as at its ends."""
        self.drags = False
        """They are slow as a whole."""

    def take(self, streams: tuple[Stream, ...]) -> None:
        """One more second."""
        self._recent.append(streams)
        self.whole = _together(self._recent) if len(self._recent) == WHOLE else {}

    def begin_anew(self) -> None:
        """What was slow until now says nothing about what comes."""
        self.row, self.drags, self.whole = 0, False, {}
        self._recent.clear()


class _Usual:
    """The interval between operations of one kind."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._taken = 0
        self.usual_s = 0.0
        self._spread = 0.0

    def take(self, interval_s: float) -> None:
        """Of a second in which all was well."""
        self._recent.append(interval_s)
        self._taken += 1
        if self._taken < _KNOWN or self._taken % _EVERY:
            return
        middle_s = median(self._recent)
        self._spread = _MAD * median(abs(one - middle_s) for one in self._recent) / middle_s
        if not self.usual_s or middle_s < self.usual_s:
            self.usual_s = middle_s

    @property
    def is_known(self) -> bool:
        return self.usual_s > 0

    def limit_s(self, times: float) -> float:
        """So many times what is usual, or more where intervals vary by nature."""
        return self.usual_s * max(times, 1 + _DEVIATIONS * self._spread)


_Key = tuple[str, str, int]


def _key(stream: Stream) -> _Key:
    return stream.comm, stream.op, stream.bucket


def _of(table: dict[_Key, _Usual], key: _Key) -> _Usual:
    """The entry of this key, a new one if need be; the oldest make room."""
    found = table.get(key)
    if found is None:
        if len(table) >= _MOST_STREAMS:
            del table[next(iter(table))]
        found = table[key] = _Usual()
    return found


def _together(seconds: Iterable[tuple[Stream, ...]]) -> dict[_Key, Stream]:
    """Several seconds as if they were one."""
    ended: dict[_Key, int] = {}
    took_s: dict[_Key, float] = {}
    for streams in seconds:
        for one in streams:
            if one.ended and one.interval_s > 0:
                key = _key(one)
                ended[key] = ended.get(key, 0) + one.ended
                took_s[key] = took_s.get(key, 0.0) + one.ended * one.interval_s
    return {key: Stream(*key, count, took_s[key] / count) for key, count in ended.items()}


def _slower(rank: int, slow: list[tuple[Stream, _Usual]], seconds: int) -> str:
    one, usual = max(slow, key=lambda pair: pair[0].interval_s / pair[1].usual_s)
    return (
        f"rank {rank} has ended one {one.op} every {one.interval_s * 1e3:.0f} ms for {seconds} s, usually every "
        f"{usual.usual_s * 1e3:.0f} ms"
    )
