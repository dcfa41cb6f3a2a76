import contextlib
import io
import math
import os
import pty
import threading
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from openwafer.train.metrics import StepMetrics
from openwafer.train.progress import LossHistory, ProgressDisplay, sparkline


def metrics(step, loss):
    return StepMetrics(step=step, loss=loss, grad_norm=1.0, lr=1e-3, tokens_per_s=12_345.0, time=0.0)


def show(stream, num_steps=25, **options):
    with ProgressDisplay(num_steps, stream=stream, **options) as display:
        for step in range(options.get("start", 0) + 1, num_steps + 1):
            display.update(metrics(step, 10.0 / step))


def test_sparkline_falls_with_the_loss():
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1]) == "█▇▆▅▄▃▂▁"
    assert sparkline([4, 4, 2, 2], width=2) == "█▁"
    assert sparkline([3, 3, 3]) == "▁▁▁"
    assert sparkline([2, math.nan, 1]) == "█ ▁"
    assert sparkline([]) == sparkline([], 0) == ""
    assert sparkline([math.inf]) == " "


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=200), st.integers(1, 50))
def test_sparkline_takes_anything(values, width):
    assert len(sparkline(values, width)) == min(width, len(values))


def test_history_is_bounded_and_keeps_the_whole_run():
    history = LossHistory()
    for i in range(100_000):
        history.add(float(i))
    assert len(history.values) < 1024
    assert history.values[0] < 1000
    assert history.values[-1] > 99_000
    assert history.values == sorted(history.values)


def test_plain_lines_when_not_a_terminal():
    stream = io.StringIO()
    show(stream)
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/25", "step 10/25", "step 20/25", "step 25/25"]
    assert "loss 0.4000  12.3k tokens/s  ETA 0:00:00  █" in lines[-1]


def test_skipped_steps_are_counted():
    stream = io.StringIO()
    with ProgressDisplay(3, stream=stream, every=1) as display:
        for step, is_skipped in [(1, False), (2, True), (3, False)]:
            display.update(replace(metrics(step, 1.0), skipped=is_skipped))
    assert ["1 skipped" in line for line in stream.getvalue().splitlines()] == [False, True, True]


def test_slow_steps_are_not_silent(monkeypatch):
    clock = iter(range(0, 10_000, 16))
    monkeypatch.setattr("openwafer.train.progress.time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    show(stream, num_steps=9, every=1000)
    assert len(stream.getvalue().splitlines()) > 3


def test_a_line_says_what_the_step_waited_for():
    spent = {"compute": 0.7, "flash read": 0.2, "update": 0.1}
    done = replace(metrics(5, 1.0), step_s=1.0, spent_s=spent)
    for encoding, dot in (("utf-8", " · "), ("ascii", ", ")):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        with ProgressDisplay(5, stream=stream) as display:
            display.update(done)
        stream.seek(0)
        assert stream.read().endswith(f"  1 s = compute 70 %{dot}flash read 20 %{dot}update 10 %\n")


def test_a_resumed_run_counts_from_where_it_is():
    stream = io.StringIO()
    show(stream, start=12)
    assert stream.getvalue().splitlines()[0].startswith("step 13/25")


def test_ascii_when_the_stream_cannot_show_bars():
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding="ascii")
    show(stream)
    stream.flush()
    assert b"@" in buffer.getvalue()


def collect(leader, chunks):
    """Everything written to the terminal until its other end is closed, which Linux reports as EIO."""
    with contextlib.suppress(OSError):
        while chunk := os.read(leader, 100_000):
            chunks.append(chunk)


def test_live_line_on_a_terminal():
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w", encoding="utf-8") as stream:
        reader = threading.Thread(target=collect, args=(leader, shown := []))
        reader.start()
        show(stream)
    reader.join()
    os.close(leader)
    shown = b"".join(shown).decode(errors="replace")
    assert "step 25/25" in shown
    assert "\x1b[" in shown
