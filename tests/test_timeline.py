"""The timeline: what is counted for what, bounded memory, and traces that are whole at any moment."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openwafer import timeline
from openwafer.errors import UserError
from openwafer.timeline import COMPUTE, COPY_IN, FLASH_READ, LANES, MAX_SPANS, OTHER, UPDATE, Span, StepTime, Timeline


def slices(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def test_a_moment_counts_for_the_first_lane_that_is_busy() -> None:
    spans = [
        Span(COMPUTE, "forward", 1.0, 4.0),
        Span(COMPUTE, "inner", 2.0, 3.0),  # nested: counted once
        Span(FLASH_READ, "wire", 0.5, 5.0),
        Span(UPDATE, "a", 4.5, 6.0),
        Span("paint", "own lane", 5.5, 7.0),
        Span(COPY_IN, "elsewhere", 20.0, 30.0),
    ]
    assert timeline.busy(spans, 0.0, 10.0) == pytest.approx(
        {COMPUTE: 3.0, UPDATE: 1.5, FLASH_READ: 1.0, "paint": 1.0, OTHER: 3.5}
    )
    assert timeline.busy(spans, 3.5, 4.75) == pytest.approx({COMPUTE: 0.5, UPDATE: 0.25, FLASH_READ: 0.5, OTHER: 0.0})


@given(st.lists(st.tuples(st.sampled_from([*LANES, "mine"]), st.integers(-5, 40), st.integers(1, 9)), max_size=30))
def test_the_sum_is_that_of_looking_at_every_moment(found: list[tuple[str, int, int]]) -> None:
    spans = [Span(lane, "", start, start + length) for lane, start, length in found]
    expected = dict.fromkeys([OTHER, *(span.lane for span in spans if span.end_s > 0 and span.start_s < 30)], 0)
    for moment in range(30):
        lanes = {span.lane for span in spans if span.start_s <= moment < span.end_s}
        first = min(lanes, key=lambda lane: LANES.index(lane) if lane in LANES else 99, default=OTHER)
        expected[first] += 1
    assert timeline.busy(spans, 0, 30) == expected


def test_one_line_says_what_a_step_waited_for() -> None:
    done = StepTime(12, 0.934, {UPDATE: 0.103, COMPUTE: 0.663, FLASH_READ: 0.168, OTHER: 0.0001})
    assert str(done) == "step 12: 0.934 s = compute 71 % · flash read 18 % · update 11 %"
    assert str(StepTime(1, 0.0, {})) == "step 1: 0 s = other"


def test_without_a_timeline_nothing_is_kept() -> None:
    assert timeline.active() is None
    with timeline.step(1), timeline.span(COMPUTE, "x"):
        timeline.add(COMPUTE, "y", 0.0, 1.0)
    with Timeline() as active, timeline.step(2):
        assert timeline.active() is active
    assert active.last is not None
    assert active.last.by_lane == {OTHER: active.last.seconds}
    assert timeline.active() is None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, for a test to set."""
    time_s = [100.0]
    monkeypatch.setattr(timeline, "now", lambda: time_s[0])
    return time_s


def test_a_step_has_only_its_own_time(clock: list[float]) -> None:
    with Timeline() as active:
        with timeline.span(COMPUTE, "evaluation"):
            clock[0] += 5
        with timeline.step(1):
            with timeline.span(COMPUTE, "forward"):
                clock[0] += 2
            clock[0] += 0.5
            timeline.add(UPDATE, "began before", 0.0, clock[0])
            clock[0] += 1
    assert active.last is not None
    assert active.last.step == 1
    assert active.last.seconds == 3.5
    assert active.last.by_lane == {COMPUTE: 2, UPDATE: 0.5, OTHER: 1}


def test_collectors_add_what_others_measured(clock: list[float]) -> None:
    with Timeline() as active:
        began = clock[0]
        active.collectors.append(lambda: timeline.add(COMPUTE, "gpu", began, clock[0]))
        with timeline.step(1):
            clock[0] += 3
    assert active.last is not None
    assert active.last.by_lane == {COMPUTE: 3, OTHER: 0}


def test_memory_is_bounded_and_the_newest_are_kept() -> None:
    with Timeline() as active, timeline.step(1):
        start = timeline.now()
        for _ in range(MAX_SPANS + 10):
            timeline.add(UPDATE, "", 0.0, 1.0)
        timeline.add(COMPUTE, "", start, start + 1e-9)
        assert len(active._spans) == MAX_SPANS
    assert active.last is not None
    assert active.last.by_lane[COMPUTE] > 0.0


def test_threads_have_tracks_of_their_own(tmp_path: Path) -> None:
    def read() -> None:
        for number in range(200):
            with timeline.span(FLASH_READ, f"chunk {number}"):
                pass

    path = tmp_path / "new" / "trace.json"
    with Timeline(path), timeline.step(7):
        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        with timeline.span(COMPUTE, "forward h.0"), timeline.span("paint", "nested"):
            pass
        for thread in threads:
            thread.join()
    events = json.loads(path.read_text())
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert [names[track] for track in sorted(order, key=order.__getitem__)][:2] == ["steps", "compute"]
    assert list(names.values()).count("paint") == 1
    found = slices(path)
    assert len(found) == 1 + 2 + 600
    for track in names:  # on one track, slices follow each other or are nested
        ends = [0.0]
        for event in sorted((e for e in found if e["tid"] == track), key=lambda e: (e["ts"], -e["dur"])):
            assert event["ts"] >= ends[-1] - 0.01
            ends.append(event["ts"] + event["dur"])
    step = next(event for event in found if event["name"] == "step 7")
    assert " s = " in step["args"]["summary"]  # which part is largest depends on who else uses the cores


def test_the_asked_steps_are_traced(tmp_path: Path) -> None:
    def traced(**options: Any) -> list[str]:
        path = tmp_path / "trace.json"
        with Timeline(path, **options):
            for number in range(30, 60):
                with timeline.step(number), timeline.span(COMPUTE, f"in {number}"):
                    pass
        return [event["name"] for event in slices(path) if event["name"].startswith("step")]

    assert traced(first=33, last=35) == ["step 33", "step 34", "step 35"]
    assert traced(first=59) == ["step 59"]
    assert traced() == [f"step {number}" for number in range(30, 40)]
    assert traced(first=5, last=6) == []


def test_a_step_that_breaks_off_is_in_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(KeyboardInterrupt), Timeline(path), timeline.step(1), timeline.span(COMPUTE, "forward"):
        raise KeyboardInterrupt
    assert {event["name"] for event in slices(path)} == {"step 1", "forward"}
    assert timeline.active() is None


ENDLESS = """
import sys
from pathlib import Path
from openwafer import timeline
with timeline.Timeline(Path(sys.argv[1]), 1, 10**9):
    for number in range(1, 10**9):
        with timeline.step(number):
            for unit in range(50):
                with timeline.span("compute", f"forward {unit}"):
                    pass
        print(number, flush=True)
"""


def test_a_killed_run_leaves_a_whole_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", ENDLESS, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        seen = [int(child.stdout.readline()) for _ in range(20)]
        child.send_signal(signal.SIGKILL)
    steps = [event["name"] for event in slices(path) if event["name"].startswith("step")]
    assert steps[: len(seen)] == [f"step {number}" for number in seen]


def test_a_trace_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write the trace .*file/trace.json: .*; choose another file"):
        Timeline(tmp_path / "file" / "trace.json")


def test_spans_cost_next_to_nothing_when_nobody_looks() -> None:
    def seconds(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            with timeline.span(COMPUTE, "x"):
                pass
        return (time.perf_counter() - began) / count

    off = min(seconds(2000) for _ in range(5))
    with Timeline():
        on = min(seconds(2000) for _ in range(5))
    assert off < on
    assert on < 100 * off
