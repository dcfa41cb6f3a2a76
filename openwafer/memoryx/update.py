"""One update of a Unit: its numbers, and a thread that applies updates while the worker computes."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from openwafer.graph import Unit


@dataclass(frozen=True, kw_only=True)
class UpdateNumbers:
    """What an update needs besides gradients and state."""

    lr: float
    step: int  # from 1
    divisor: float  # summed gradients are divided by this
    factor: float | None = None  # then multiplied by this, when they are clipped by their norm
    max_value: float | None = None  # or each element is limited to this


@dataclass(frozen=True, eq=False)
class Arrival:
    """Gradients of a Unit on their way to the host."""

    unit: Unit
    gradients: Mapping[str, Tensor]  # host tensors, valid once they have arrived
    has_arrived: Callable[[], bool]
    wait: Callable[[], None]
    recycle: Callable[[], None]  # gives the host buffer back


class Updater:
    """Applies updates in a thread. Of the gradients that have arrived, the newest first: the last Unit of
    backward is the first that the next forward needs."""

    def __init__(self, apply: Callable[[Unit, Mapping[str, Tensor], UpdateNumbers], None]) -> None:
        self._apply = apply
        self._jobs: list[tuple[Arrival, UpdateNumbers]] = []  # oldest first
        self._busy: set[int] = set()  # Units whose update is posted and not done
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="openwafer-updater", daemon=True)
        self._thread.start()

    def post(self, arrival: Arrival, numbers: UpdateNumbers) -> None:
        with self._changed:
            self._raise()
            self._jobs.append((arrival, numbers))
            self._busy.add(arrival.unit.index)
            self._changed.notify_all()

    def wait(self, unit: int) -> None:
        """Until no update of this Unit is under way."""
        with self._changed:
            self._changed.wait_for(lambda: unit not in self._busy or self._error is not None)
            self._raise()

    def drain(self) -> None:
        """Until all updates are done."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy or self._error is not None)
            self._raise()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (job := self._next()) is not None:
            arrival, numbers = job
            try:
                arrival.wait()
                self._apply(arrival.unit, arrival.gradients, numbers)
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            finally:
                arrival.recycle()
            with self._changed:
                self._busy.discard(arrival.unit.index)
                self._changed.notify_all()

    def _next(self) -> tuple[Arrival, UpdateNumbers] | None:
        """The newest job that has arrived, else the oldest, which will arrive first."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_closed)
            if self._is_closed:
                return None
            for position in range(len(self._jobs) - 1, -1, -1):
                if self._jobs[position][0].has_arrived():
                    return self._jobs.pop(position)
            return self._jobs.pop(0)
