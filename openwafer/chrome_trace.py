"""The trace-event JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open.

A trace has processes, each with numbered tracks, and slices on tracks. Times are in microseconds.
"""

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from openwafer.errors import UserError

Event = dict[str, Any]


def process_event(process: int, name: str) -> Event:
    """Names a process."""
    return {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}


def track_events(process: int, track: int, name: str) -> list[Event]:
    """Names a track; tracks are shown in the order of their numbers."""
    common = {"ph": "M", "pid": process, "tid": track}
    return [
        {"name": "thread_name", **common, "args": {"name": name}},
        {"name": "thread_sort_index", **common, "args": {"sort_index": track}},
    ]


def slice_event(
    process: int, track: int, name: str, start_us: float, duration_us: float, args: dict[str, Any] | None = None
) -> Event:
    """Something that took time. Slices of one track are nested or apart."""
    event = {"name": name, "ph": "X", "pid": process, "tid": track, "ts": start_us, "dur": duration_us}
    return event if args is None else {**event, "args": args}


def document(events: Iterable[Event]) -> str:
    """A whole trace."""
    return json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"})


class TraceFile:
    """A trace that grows. After each `write` the file is whole JSON, so a run that is killed leaves a good one."""

    _END = b"\n]\n"

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise self._failure(error) from None
        self._end = 0  # where the next event goes: over the closing bracket

    def write(self, events: Iterable[Event]) -> None:
        lines = [json.dumps(event).encode() for event in events]
        if not lines:
            return
        text = (b",\n" if self._end else b"[\n") + b",\n".join(lines)
        try:
            self._file.seek(self._end)
            if self._file.write(text + self._END) != len(text) + len(self._END):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._failure(error) from None
        self._end += len(text)

    def close(self) -> None:
        self._file.close()

    def _failure(self, error: OSError) -> UserError:
        return UserError(f"cannot write the trace {self.path}: {error.strerror or error}; choose another file")
