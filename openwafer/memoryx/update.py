"""One update of a Unit: its numbers, and a thread that applies updates while the worker computes."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from openwafer.errors import UserError
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


class Speculator(Protocol):
    """Makes updates that may be dropped. Used by the updater's thread only."""

    def has_room(self, unit: Unit) -> bool: ...

    def update(self, unit: Unit, gradients: Mapping[str, Tensor], numbers: UpdateNumbers) -> Any:
        """The new state, elsewhere."""
        ...

    def commit(self, guess: Any) -> bool:
        """Take it over; False if it cannot be."""
        ...

    def drop(self, guess: Any) -> None: ...


@dataclass(eq=False)
class _Job:
    arrival: Arrival
    numbers: UpdateNumbers | None  # None: the gradients are not applied
    is_guess: bool = False
    guess: Any = None  # of a guess that was made
    based_on: "_Job | None" = None  # the guess that this settles


class Updater:
    """Applies updates in a thread. Of the gradients that have arrived, those of the first Unit come first: they are
    the newest of backward, and the next forward needs that Unit first. Units for which `stays` is False have state
    on flash, which is read ahead in the order of backward: they come after the others, the last Unit first, or what
    was read ahead would give way to another and be read again."""

    def __init__(
        self,
        apply: Callable[[Unit, Mapping[str, Tensor], UpdateNumbers], None],
        speculator: Speculator | None = None,
        stays: Callable[[Unit], bool] = lambda unit: True,
    ) -> None:
        self._apply = apply
        self._speculator = speculator
        self._stays = stays
        self._jobs: list[_Job] = []  # oldest first
        self._guesses: dict[Arrival, _Job] = {}  # not settled
        self._busy: set[int] = set()  # Units whose update is posted and not done
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._is_closed = False
        self.num_guesses_taken = 0
        self.num_guesses_dropped = 0
        self._thread = threading.Thread(target=self._run, name="openwafer-updater", daemon=True)
        self._thread.start()

    def guess(self, arrival: Arrival, numbers: UpdateNumbers) -> None:
        """`post` or `discard` will come for this arrival, probably `post` with these numbers."""
        if self._speculator is None:
            return
        with self._changed:
            self._raise()
            job = _Job(arrival, numbers, is_guess=True)
            self._jobs.append(job)
            self._guesses[arrival] = job
            self._changed.notify_all()

    def post(self, arrival: Arrival, numbers: UpdateNumbers) -> None:
        self._settle(arrival, numbers)

    def discard(self, arrival: Arrival) -> None:
        """The gradients are not applied."""
        self._settle(arrival, None)

    def _settle(self, arrival: Arrival, numbers: UpdateNumbers | None) -> None:
        with self._changed:
            self._raise()
            guess = self._guesses.pop(arrival, None)
            if guess in self._jobs:  # not begun
                self._jobs.remove(guess)
                guess = None
            self._jobs.append(_Job(arrival, numbers, based_on=guess))
            self._busy.add(arrival.unit.index)
            self._changed.notify_all()

    def wait(self, unit: int) -> None:
        """Until no update of this Unit is under way."""
        with self._changed:
            self._changed.wait_for(lambda: unit not in self._busy or self._is_over)
            self._raise()

    def drain(self) -> None:
        """Until all updates are done."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy or self._is_over)
            self._raise()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    @property
    def _is_over(self) -> bool:
        return self._error is not None or self._is_closed

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
        if self._is_closed and self._busy:
            raise UserError("training was closed before its last updates were done")

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job.arrival.wait()
                self._do(job)
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            finally:
                if not job.is_guess:
                    job.arrival.recycle()
            if not job.is_guess:
                with self._changed:
                    self._busy.discard(job.arrival.unit.index)
                    self._changed.notify_all()

    def _do(self, job: _Job) -> None:
        unit, gradients, numbers = job.arrival.unit, job.arrival.gradients, job.numbers
        if job.is_guess:
            assert self._speculator is not None
            assert numbers is not None
            job.guess = self._speculator.update(unit, gradients, numbers)
            return
        if job.based_on is not None:
            assert self._speculator is not None
            if numbers == job.based_on.numbers:
                if self._speculator.commit(job.based_on.guess):
                    self.num_guesses_taken += 1
                    return
            else:
                self._speculator.drop(job.based_on.guess)
                self.num_guesses_dropped += 1
        if numbers is not None:
            self._apply(unit, gradients, numbers)

    def _next(self) -> _Job | None:
        """The job of the first Unit among those that have arrived and stay in DRAM, else of the last Unit, which will
        arrive first and was read ahead first."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or any(map(self._can_begin, self._jobs)))
            if self._is_closed:
                return None
            ready = [job for job in self._jobs if self._can_begin(job)]
            arrived = [job for job in ready if self._stays(job.arrival.unit) and job.arrival.has_arrived()]
            chosen = min(arrived, key=_position, default=None) or max(ready, key=_position)
            self._jobs.remove(chosen)
            return chosen

    def _can_begin(self, job: _Job) -> bool:
        if not job.is_guess:
            return True
        assert self._speculator is not None
        return self._speculator.has_room(job.arrival.unit)


def _position(job: _Job) -> int:
    return job.arrival.unit.index
