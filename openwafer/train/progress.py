"""The progress of a run on stderr: a live line on a terminal, plain lines elsewhere."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TextIO

from openwafer.timeline import StepTime
from openwafer.train.metrics import StepMetrics

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-~=*#@"
_SPARK_WIDTH = 30
_HISTORY = 1024
_MOST_SILENCE_S = 30.0  # between lines of a run whose steps are slow


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH, bars: str = _BARS) -> str:
    """The values as a row of at most `width` bars, scaled to their range; a blank where none is finite."""
    width = min(width, len(values))
    cells = []
    for i in range(width):
        cell = values[i * len(values) // width : (i + 1) * len(values) // width]
        finite = [value for value in cell if math.isfinite(value)]
        cells.append(sum(finite) / len(finite) if finite else math.nan)
    finite = [cell for cell in cells if math.isfinite(cell)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((cell - low) * scale)] if math.isfinite(cell) else " " for cell in cells)


class LossHistory:
    """The losses of a whole run in bounded memory: when full, neighbours are averaged in pairs."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._stride = 1
        self._pending: list[float] = []

    def add(self, loss: float) -> None:
        self._pending.append(loss)
        if len(self._pending) < self._stride:
            return
        self.values.append(sum(self._pending) / len(self._pending))
        self._pending.clear()
        if len(self.values) >= _HISTORY:
            self.values = [(a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2], strict=True)]
            self._stride *= 2


class ProgressDisplay:
    """Shows `update(metrics)`; a context manager. Off a terminal it prints a line every `every` steps,
    and when there was none for half a minute."""

    def __init__(
        self,
        num_steps: int,
        *,
        start: int = 0,
        every: int = 10,
        stream: TextIO | None = None,
        workers: Callable[[], Sequence[str]] = tuple,
    ):
        """`num_steps`: the last step of the run; `start`: steps done before it was resumed.

        `workers` gives a line about each worker as it is now; on a terminal they are refreshed all the time.
        """
        self._workers = workers
        self._lines: list[str] = []  # of the last step
        self._num_steps = num_steps
        self._start = start
        self._every = every
        self._stream = stream or sys.stderr
        self._history = LossHistory()
        self._num_skipped = 0
        self._live: Any = None
        self._began = self._printed = time.monotonic()
        self._bars = _BARS if _can_show(self._stream, _BARS) else _ASCII_BARS

    def __enter__(self) -> "ProgressDisplay":
        self._began = time.monotonic()
        if self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream, highlight=False)
            self._live = Live(console=console, refresh_per_second=8, auto_refresh=True, get_renderable=self._renderable)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, metrics: StepMetrics) -> None:
        self._history.add(metrics.loss)
        self._num_skipped += metrics.skipped
        if self._live is not None:
            self._lines = [self._line(metrics), *self._spent(metrics)]
            self._live.refresh()
        elif self._is_due(metrics.step):
            self._printed = time.monotonic()
            print("  ".join([self._line(metrics), *self._spent(metrics)]), file=self._stream, flush=True)
            for line in self._workers():
                print(f"  {line}", file=self._stream, flush=True)

    def _is_due(self, step: int) -> bool:
        is_silent = time.monotonic() - self._printed >= _MOST_SILENCE_S
        return step % self._every == 0 or step in (self._start + 1, self._num_steps) or is_silent

    def _renderable(self) -> Any:
        from rich.text import Text

        return Text("\n".join([*self._lines, *self._workers()]), no_wrap=True, overflow="crop")

    def _line(self, metrics: StepMetrics) -> str:
        left = self._num_steps - metrics.step
        done = max(1, metrics.step - self._start)
        eta_s = (time.monotonic() - self._began) / done * left
        parts = [
            f"step {metrics.step}/{self._num_steps}",
            f"loss {metrics.loss:.4f}",
            f"{_count(metrics.tokens_per_s)} tokens/s",
            f"ETA {_duration(eta_s)}",
            sparkline(self._history.values, bars=self._bars),
        ]
        if self._num_skipped:
            parts.insert(2, f"{self._num_skipped} skipped")
        return "  ".join(parts)

    def _spent(self, metrics: StepMetrics) -> list[str]:
        """What the step waited for, in one line, if that is known."""
        if metrics.step_s is None or metrics.spent_s is None:
            return []
        shares = StepTime(metrics.step, metrics.step_s, metrics.spent_s).shares()
        return [shares if _can_show(self._stream, shares) else shares.replace(" · ", ", ")]


def _can_show(stream: TextIO, text: str) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _count(value: float) -> str:
    for unit in ("", "k", "M"):
        if value < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}G"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
