"""Updates run beside the worker: posting does not wait, waiting does, and what goes wrong is told."""

import json
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from openwafer.direct_io import rounded_up
from openwafer.errors import UserError
from openwafer.graph import Unit, capture
from openwafer.memoryx.config import OptimizerConfig
from openwafer.memoryx.flash import FlashTier
from openwafer.memoryx.halves import Item, update_halves
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.memoryx.store import Store, fields
from openwafer.memoryx.tier import DramTier
from openwafer.memoryx.update import Arrival, UpdateNumbers, Updater
from openwafer.memoryx.wire import merge, split
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.timeline import FLASH_READ, Timeline

NUMBERS = UpdateNumbers(lr=0.1, step=1, divisor=1.0)


class Gate:
    """An `apply` that stops in each update until it is let through."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.entered, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, unit: Unit, gradients: Mapping[str, Tensor], numbers: UpdateNumbers) -> None:
        self.entered.release()
        assert self.go.acquire(timeout=120)
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
            assert gate.entered.acquire(timeout=120)  # it is being applied while the others are posted
    assert gate.order == []
    updater.wait(7)  # no update of that Unit: nothing to wait for
    waiter = threading.Thread(target=updater.wait, args=(2,))
    waiter.start()
    gate.go.release(2)
    assert gate.entered.acquire(timeout=120)
    assert gate.entered.acquire(timeout=120)
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
    assert gate.entered.acquire(timeout=120)
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


def half_on_flash(folder: Path) -> tuple[Store, FlashTier]:
    """A store of 10 Units; what the last 6 have besides their wires is on flash, with buffers for two of them."""
    config = ModelConfig(hidden_size=32, num_hidden_layers=8, num_heads=2, vocab_size=50, max_position_embeddings=8)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    graph = capture(build(config), (), {"input_ids": ids, "labels": ids.clone()}, dtype=torch.bfloat16)
    optimizer = make_optimizer(OptimizerConfig())
    specs = fields(graph, optimizer, "bf16")
    on_flash = [spec for spec in specs if spec.key[0] >= 4 and spec.key[1] != "wire"]
    sizes: Counter[int] = Counter()
    for spec in on_flash:
        sizes[spec.key[0]] += rounded_up(spec.num_bytes)
    flash, dram = FlashTier(folder, 2 * max(sizes.values())), DramTier()
    keys = {spec.key for spec in on_flash}
    return Store(graph, optimizer, {s.key: flash if s.key in keys else dram for s in specs}, "bf16"), flash


@pytest.mark.parametrize("is_deferred", [False, True], ids=["during backward", "after clipping"])
def test_what_is_on_flash_is_read_once_when_updates_fall_behind(tmp_path: Path, *, is_deferred: bool) -> None:
    store, flash = half_on_flash(tmp_path / "flash")
    updater = Updater(store.update, stays=store.updates_in_dram)
    all_posted = threading.Event()

    def wait() -> None:
        assert all_posted.wait(30)

    with Timeline(tmp_path / "trace.json") as times, times.step(1):
        arrivals = []
        for unit in reversed(store.graph.units):
            store.prefetch_update(unit)
            gradients = {w.name: torch.ones(w.spec.shape, dtype=torch.bfloat16) for w in store.graph.owned(unit)}
            arrivals.append(Arrival(unit, gradients, lambda: True, wait, lambda: None))
        for each in reversed(arrivals) if is_deferred else arrivals:
            updater.post(each, NUMBERS)
        all_posted.set()
        updater.drain()
        flash.flush()
    updater.close()
    flash.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    tracks = {e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"] == FLASH_READ}
    reads = Counter(e["name"] for e in events if e["ph"] == "X" and e["tid"] in tracks)
    owners = [unit for unit in store.graph.units if unit.index >= 4 and store.graph.owned(unit)]
    assert len(reads) == 3 * len(owners)  # remainder and two moments of each
    assert set(reads.values()) == {1}


def test_what_was_dropped_by_closing_is_told() -> None:
    gate, recycled = Gate(), []
    updater = Updater(gate)
    updater.post(arrival(2, recycled), NUMBERS)
    assert gate.entered.acquire(timeout=120)
    updater.post(arrival(1, recycled), NUMBERS)  # not begun
    told: list[str] = []

    def wait() -> None:
        try:
            updater.drain()
        except UserError as error:
            told.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    closer = threading.Thread(target=updater.close)
    closer.start()
    waiter.join(30)
    gate.go.release()
    closer.join(30)
    assert not waiter.is_alive()
    assert not closer.is_alive()
    assert told == ["training was closed before its last updates were done"]


def test_gradients_of_several_types_are_applied_as_they_are() -> None:
    """A tied weight has an fp32 sum of its uses, its neighbours in the Unit have bf16 gradients."""
    optimizer = make_optimizer(OptimizerConfig(lr=1e-2))

    def items() -> list[Item]:
        generator = torch.Generator().manual_seed(0)
        made = []
        for name, dtype in (("tied", torch.float32), ("other", torch.bfloat16)):
            wire, remainder = split(torch.randn(70_001, generator=generator))
            state = {"m": torch.zeros(70_001), "v": torch.zeros(70_001)}
            made.append(Item(name, wire, remainder, torch.randn(70_001, generator=generator).to(dtype), state))
        return made

    together, alone = items(), items()
    update_halves(optimizer, together, NUMBERS)
    for item in alone:
        update_halves(optimizer, [item], NUMBERS)
    for ours, expected in zip(together, alone, strict=True):
        assert torch.equal(merge(ours.wire, ours.remainder), merge(expected.wire, expected.remainder)), ours.name
        assert torch.equal(ours.state["v"], expected.state["v"])
