"""Updates run beside the worker: posting does not wait, waiting does, and what goes wrong is told."""

import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from openwafer.graph import Unit
from openwafer.memoryx.update import Arrival, UpdateNumbers, Updater

NUMBERS = UpdateNumbers(lr=0.1, step=1, divisor=1.0)


class Gate:
    """An `apply` that stops in each update until it is let through."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.entered, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, unit: Unit, gradients: Mapping[str, Tensor], numbers: UpdateNumbers) -> None:
        self.entered.release()
        assert self.go.acquire(timeout=30)
        self.order.append(unit.index)


def arrival(index: int, recycled: list[int], *, has_arrived: bool = True) -> Arrival:
    unit: Any = SimpleNamespace(index=index)
    return Arrival(
        unit=unit,
        gradients={},
        has_arrived=lambda: has_arrived,
        wait=lambda: None,
        recycle=lambda: recycled.append(index),
    )


def test_the_worker_goes_on_while_an_update_runs() -> None:
    gate, recycled = Gate(), []
    updater = Updater(gate)
    for index in (3, 2, 1):  # as backward posts them
        updater.post(arrival(index, recycled), NUMBERS)
        if index == 3:
            assert gate.entered.acquire(timeout=30)  # it is being applied while the others are posted
    assert gate.order == []
    updater.wait(7)  # no update of that Unit: nothing to wait for
    waiter = threading.Thread(target=updater.wait, args=(2,))
    waiter.start()
    gate.go.release(2)
    assert gate.entered.acquire(timeout=30)
    assert gate.entered.acquire(timeout=30)
    assert waiter.is_alive()  # Unit 2 is the last: the newest of those that have arrived come first
    gate.go.release()
    waiter.join(30)
    assert not waiter.is_alive()
    updater.drain()
    assert gate.order == [3, 1, 2]
    assert recycled == [3, 1, 2]
    updater.close()


def test_of_those_under_way_the_oldest_is_next() -> None:
    gate, recycled = Gate(), []
    updater = Updater(gate)
    updater.post(arrival(9, recycled), NUMBERS)
    assert gate.entered.acquire(timeout=30)
    for index in (3, 2, 1):
        updater.post(arrival(index, recycled, has_arrived=False), NUMBERS)
    gate.go.release(4)
    updater.drain()
    assert gate.order == [9, 3, 2, 1]
    updater.close()


def test_an_error_reaches_whoever_waits_or_posts() -> None:
    def fail(unit: Unit, gradients: Mapping[str, Tensor], numbers: UpdateNumbers) -> None:
        raise RuntimeError(f"Unit {unit.index}")

    recycled: list[int] = []
    updater = Updater(fail)
    updater.post(arrival(4, recycled), NUMBERS)
    for attempt in (
        updater.drain,
        lambda: updater.wait(4),
        lambda: updater.post(arrival(5, recycled), NUMBERS),
    ):
        with pytest.raises(RuntimeError, match="Unit 4"):
            attempt()
    assert recycled == [4]
    updater.close()
