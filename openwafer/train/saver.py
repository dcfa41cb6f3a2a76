"""Checkpoints while training goes on: frozen state is written by a thread, one checkpoint at a time."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from openwafer import timeline
from openwafer.errors import UserError
from openwafer.train.engine import Frozen

Save = Callable[[int, Iterable[tuple[str, Tensor]]], Path]  # writes the state after a step


class Saver:
    """Runs `save` in the background. A save that fails is told to `report` and training goes on."""

    def __init__(self, save: Save, report: Callable[[str], None]) -> None:
        self._save = save
        self._report = report
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._running: tuple[int, Future[Path]] | None = None
        self._is_cancelled = threading.Event()
        self.saved_step: int | None = None  # of the newest checkpoint that this saver committed

    def start(self, step: int, freeze: Callable[[], Frozen]) -> None:
        """Begin to save; waits for the one before, if that is not done."""
        self.wait()
        self._running = (step, self._thread.submit(self._write, step, freeze()))

    def poll(self) -> None:
        """Report how the last one went, if it is done."""
        if self._running is not None and self._running[1].done():
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written."""
        try:
            self._finish()
        except UserError as error:
            self._report(f"{error}; training goes on")

    def save_now(self, step: int, freeze: Callable[[], Frozen]) -> None:
        """Save and wait; a failure is an error."""
        self.start(step, freeze)
        self._finish()

    def close(self, *, at_once: bool = False) -> None:
        """Let the running save finish, or give it up."""
        if at_once:
            self._is_cancelled.set()
            self._thread.shutdown()
            return
        self.wait()
        self._thread.shutdown()

    def _finish(self) -> None:
        if self._running is None:
            return
        step, future = self._running
        self._running = None
        future.result()
        self.saved_step = step

    def _write(self, step: int, frozen: Frozen) -> Path:
        try:
            with timeline.span(timeline.CHECKPOINT, f"save step {step}"):
                return self._save(step, self._until_cancelled(frozen.tensors))
        finally:
            frozen.close()  # also after a failure: training may be waiting for it

    def _until_cancelled(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for named in tensors:
            if self._is_cancelled.is_set():
                raise UserError("the checkpoint was given up")
            yield named
