"""What a step spent its time on: spans of work on lanes, summed up per step and written out for Perfetto.

A lane is a resource: the compute, a direction of a link, a disk. Whoever uses one says so:

    with timeline.span(timeline.FLASH_READ, "h.3 wire"):
        ...
    timeline.add(timeline.COPY_IN, "h.3", start_s, end_s)      # measured elsewhere, such as by GPU events

Times are `now()`, in seconds. Nothing is kept unless a `Timeline` is active (`with Timeline() as timeline`); then
`with timeline.step(12):` marks a step and `timeline.last` sums it up. All of it may be called by any thread.

Summing up, each moment of a step counts for the first lane in `LANES` that is busy then. So what is not compute is
what compute had to wait for, and work that runs beside it costs nothing.
"""

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from openwafer.chrome_trace import Event, TraceFile, process_event, slice_event, track_events

now = time.perf_counter

COMPUTE = "compute"
WORKERS = "workers"  # other processes compute
COPY_IN = "copy in"  # weights to the device
UPDATE = "update"
FLASH_READ = "flash read"
NETWORK = "network"  # between workers and stores
COPY_OUT = "copy out"  # gradients from the device
DATA = "data"  # the next batch
LAUNCH = "launch"  # the host gives work to a device
FLASH_WRITE = "flash write"
CHECKPOINT = "checkpoint"
# The nearest cause of a wait first: compute waits for a copy, the copy for an update, the update for flash. Lanes that
# are not named here come last.
LANES = (COMPUTE, WORKERS, COPY_IN, UPDATE, FLASH_READ, NETWORK, COPY_OUT, DATA, LAUNCH, FLASH_WRITE, CHECKPOINT)
OTHER = "other"  # nothing was busy

MAX_SPANS = 65536  # kept at a time; beyond, the oldest are forgotten
DEFAULT_TRACED_STEPS = 10  # traced when nobody says which
_TRACKS_PER_LANE = 1000


class Span(NamedTuple):
    """Some work on a lane. `thread` keeps apart what overlaps on one lane."""

    lane: str
    name: str
    start_s: float
    end_s: float
    thread: int = 0


@dataclass
class StepTime:
    """How long a step took, and the seconds of it by lane; they add up to all of it. Filled when the step is done."""

    step: int
    seconds: float = 0.0
    by_lane: dict[str, float] = field(default_factory=dict)

    def shares(self) -> str:
        """`0.93 s = compute 71 % · flash read 18 % · update 11 %`, the largest first."""
        whole = self.seconds or 1.0
        parts = sorted(self.by_lane.items(), key=lambda part: -part[1])
        shown = [f"{lane} {100 * seconds / whole:.0f} %" for lane, seconds in parts if seconds >= 0.005 * whole]
        return f"{self.seconds:.3g} s = {' · '.join(shown) or OTHER}"

    def __str__(self) -> str:
        return f"step {self.step}: {self.shares()}"


class Timeline:
    """Keeps the spans of the step under way; a context manager, inside which it is the one that is active.

    With `trace`, steps `first` to `last` are written to that file, whatever happened between them too; without
    `first` and `last`, the first ten that are taken.
    """

    def __init__(
        self, trace: Path | None = None, first: int | None = None, last: int | None = None, process: str = "openwafer"
    ) -> None:
        self.last: StepTime | None = None
        self.collectors: list[Callable[[], None]] = []  # called before a step is summed up: add what was measured
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._lock = threading.Lock()
        self._traced = (first, last)
        self._trace = None if trace is None else _Trace(TraceFile(trace), process)

    def __enter__(self) -> "Timeline":
        global _active
        assert _active is None, "one timeline at a time"
        _active = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        _active = None
        if self._trace is not None:
            self._trace.close()

    def span(self, lane: str, name: str) -> contextlib.AbstractContextManager[object]:
        """The time inside the `with` is work of `lane`."""
        return _Open(self, lane, name)

    def add(self, lane: str, name: str, start_s: float, end_s: float, thread: int = 0) -> None:
        """Work that was measured elsewhere. Spans of one lane and thread must not overlap, unless nested."""
        with self._lock:
            self._spans.append(Span(lane, name, start_s, end_s, thread))

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[StepTime]:
        """The time inside is a step. What came before it and after the last one goes into the trace only."""
        done = StepTime(number)
        is_traced = self._is_traced(number)
        if not is_traced:
            self._take()
        began = now()
        try:
            yield done
        finally:
            for collect in self.collectors:
                collect()
            ended = now()
            spans = self._take()
            done.seconds, done.by_lane = ended - began, busy(spans, began, ended)
            self.last = done
            if is_traced and self._trace is not None:
                self._trace.write(done, began, spans)

    def _take(self) -> list[Span]:
        with self._lock:
            spans = list(self._spans)
            self._spans.clear()
        return spans

    def _is_traced(self, number: int) -> bool:
        if self._trace is None:
            return False
        first, last = self._traced
        if first is None:
            return self._trace.num_steps < DEFAULT_TRACED_STEPS
        return first <= number <= (first if last is None else last)


_active: Timeline | None = None
_NOTHING = contextlib.nullcontext()


def span(lane: str, name: str) -> contextlib.AbstractContextManager[object]:
    """The time inside the `with` is work of `lane`, on the timeline that is active, if one is."""
    return _NOTHING if _active is None else _Open(_active, lane, name)


def add(lane: str, name: str, start_s: float, end_s: float, thread: int = 0) -> None:
    """Work that was measured elsewhere, for the timeline that is active, if one is."""
    if _active is not None:
        _active.add(lane, name, start_s, end_s, thread)


def step(number: int) -> contextlib.AbstractContextManager[StepTime | None]:
    """The time inside is a step, on the timeline that is active, if one is."""
    return _NOTHING if _active is None else _active.step(number)


def active() -> Timeline | None:
    """The timeline that is active: ask before doing work that only a timeline needs, such as GPU events."""
    return _active


def busy(spans: Iterable[Span], start_s: float, end_s: float) -> dict[str, float]:
    """Seconds of the time from `start_s` to `end_s` by lane: each moment counts for the first lane that is busy."""
    lanes: dict[str, list[tuple[float, float]]] = {lane: [] for lane in LANES}
    for each in spans:
        if each.end_s > start_s and each.start_s < end_s:
            part = (max(each.start_s, start_s), min(each.end_s, end_s))
            lanes.setdefault(each.lane, []).append(part)
    covered: list[tuple[float, float]] = []
    total, seconds = 0.0, {}
    for lane, parts in lanes.items():
        if parts:
            covered = _merged([*covered, *parts])
            length = sum(end - start for start, end in covered)
            seconds[lane] = length - total
            total = length
    seconds[OTHER] = max(0.0, end_s - start_s - total)
    return seconds


def _merged(parts: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(parts):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


class _Open:
    """A span under way. A class with slots: a generator would take three times as long."""

    __slots__ = ("_lane", "_name", "_start_s", "_timeline")

    def __init__(self, timeline: Timeline, lane: str, name: str) -> None:
        self._timeline = timeline
        self._lane = lane
        self._name = name
        self._start_s = 0.0

    def __enter__(self) -> None:
        self._start_s = now()

    def __exit__(self, *_: object) -> None:
        self._timeline.add(self._lane, self._name, self._start_s, now(), threading.get_ident())


class _Trace:
    """The steps of a timeline in a trace file: one track per lane and thread."""

    def __init__(self, file: TraceFile, process: str) -> None:
        self.num_steps = 0
        self._file = file
        self._tracks: dict[tuple[str, int], int] = {}
        self._sizes: Counter[int] = Counter()  # tracks so far at each place of LANES, and behind its end
        self._file.write([process_event(1, process), *track_events(1, 0, "steps")])

    def write(self, done: StepTime, began_s: float, spans: Iterable[Span]) -> None:
        events = [_slice(0, f"step {done.step}", began_s, began_s + done.seconds)]
        events[0]["args"] = {"summary": done.shares(), **{lane: f"{s:.6f} s" for lane, s in done.by_lane.items()}}
        for each in spans:
            events.append(_slice(self._track(each, events), each.name, each.start_s, each.end_s))
        self._file.write(events)
        self.num_steps += 1

    def _track(self, span: Span, events: list[Event]) -> int:
        """The number of the span's track; lanes are shown in their order, the threads of one below each other."""
        key = (span.lane, span.thread)
        if key not in self._tracks:
            place = LANES.index(span.lane) if span.lane in LANES else len(LANES)
            self._tracks[key] = 1 + place * _TRACKS_PER_LANE + self._sizes[place]
            self._sizes[place] += 1
            events += track_events(1, self._tracks[key], span.lane)
        return self._tracks[key]

    def close(self) -> None:
        self._file.close()


def _slice(track: int, name: str, start_s: float, end_s: float) -> Event:
    # Ends are rounded, not lengths: neighbours would overlap.
    start_us, end_us = round(start_s * 1e6, 1), round(end_s * 1e6, 1)
    return slice_event(1, track, name, start_us, round(end_us - start_us, 1))
