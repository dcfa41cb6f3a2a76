"""When work on a GPU began and ended, on the clock of the timeline."""

import threading
from dataclasses import dataclass

import torch

from openwafer import timeline

_MOST_OPEN = 8192


@dataclass(frozen=True, eq=False)
class _Work:
    lane: str
    name: str
    start: torch.cuda.Event
    end: torch.cuda.Event


class GpuClock:
    """Marks work on streams with events; what is finished is told to the timeline at the end of each step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._work: list[_Work] = []
        self._lock = threading.Lock()
        self._set()

    def start(self, stream: torch.cuda.Stream) -> torch.cuda.Event | None:
        """Now, on `stream`; None when nobody wants to know."""
        active = timeline.active()
        if active is None:
            return None
        if self.collect not in active.collectors:
            active.collectors.append(self.collect)
        return self._mark(stream)

    def stop(self, lane: str, name: str, start: torch.cuda.Event | None, stream: torch.cuda.Stream) -> None:
        """The work that began at `start` ends here on `stream`."""
        if start is None:
            return
        work = _Work(lane, name, start, self._mark(stream))
        with self._lock:
            if len(self._work) < _MOST_OPEN:
                self._work.append(work)

    def collect(self) -> None:
        """Tell the timeline what is done; the rest will be by the next step."""
        with self._lock:
            finished = [work for work in self._work if work.end.query()]
            self._work = [work for work in self._work if work not in finished]
        for work in finished:
            start_s, end_s = (self._began_s + self._zero.elapsed_time(event) / 1e3 for event in (work.start, work.end))
            timeline.add(work.lane, work.name, start_s, end_s)
        if not self._work:
            self._set()  # elapsed times are fp32: they stay precise when they are short

    def _set(self) -> None:
        self._zero = torch.cuda.Event(enable_timing=True)
        self._zero.record(torch.cuda.current_stream(self.device))
        self._zero.synchronize()
        self._began_s = timeline.now()

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event
