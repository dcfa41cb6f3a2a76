"""The link of a GPU: weights copied in ahead of their use, gradients copied out behind, updates in between.

Three streams (copy-in, compute, copy-out) and two threads: one issues copies of weights as soon as a slot is free
and the Unit's update is done, one applies updates as gradients arrive. Device memory is a few Unit slots.
"""

import queue
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from openwafer import timeline
from openwafer.csx.gpu_clock import GpuClock
from openwafer.direct_io import rounded_up
from openwafer.graph import Unit
from openwafer.memoryx.pinned import pinned
from openwafer.memoryx.speculation import Speculation, can_speculate
from openwafer.memoryx.store import WIRE, Store
from openwafer.memoryx.tier import Key
from openwafer.memoryx.update import Arrival, UpdateNumbers, Updater

NUM_SLOTS = 3  # one in use, one ready, one arriving
# Gradients that wait for their update: at the end of backward the optimizer is this many Units behind.
_NUM_GRADIENT_BUFFERS = 12


@dataclass(eq=False)
class Slot:
    """Room for one Unit's weights on the device."""

    memory: Tensor
    content: tuple[Key, int] | None = None  # array and its version
    users: int = 0  # passes that were promised this content and have not finished with it
    is_ready: torch.cuda.Event = field(default_factory=torch.cuda.Event)  # copied in
    is_free: torch.cuda.Event = field(default_factory=torch.cuda.Event)  # last used by the compute stream


class Inbox:
    """Slots, and the thread that fills them in the order they will be used."""

    def __init__(self, store: Store, updater: Updater, device: torch.device, num_slots: int, clock: GpuClock) -> None:
        self.store = store
        self.updater = updater
        self.device = device
        self.clock = clock
        self.versions: dict[Key, int] = {}  # how often an array was updated: older copies are stale
        dtype = torch.bfloat16 if store.wire == "bf16" else torch.float32
        # A Unit that uses weights of several owners takes a slot for each.
        most = max((len(store.wires(unit)) for unit in store.graph.units), default=1)
        count = max(num_slots, most + 1)
        self._slots = [Slot(torch.empty(_largest(store), dtype=dtype, device=device)) for _ in range(count)]
        self._copies = torch.cuda.Stream(device)
        self._changed = threading.Condition()
        self._computing: tuple[str, torch.cuda.Event | None] | None = None  # the Unit under way, and its start

    @property
    def num_bytes(self) -> int:
        return sum(slot.memory.numel() * slot.memory.itemsize for slot in self._slots)

    def stream(self, order: Iterable[Unit]) -> Iterator[tuple[Unit, Mapping[str, Tensor]]]:
        units = list(order)
        arrivals: queue.Queue[Any] = queue.Queue()
        stop = threading.Event()
        thread = threading.Thread(target=self._fill, args=(units, arrivals, stop), daemon=True)
        thread.start()
        compute = torch.cuda.current_stream(self.device)
        slots: Any = {}
        try:
            for unit in units:
                slots = arrivals.get()
                if isinstance(slots, BaseException):
                    raise slots
                for slot in slots.values():
                    compute.wait_event(slot.is_ready)
                segments = {name: self.store.segments[name][WIRE] for name in unit.weights}
                self._computing = (unit.name, self.clock.start(compute))
                yield unit, {name: segment.of(slots[segment.key].memory) for name, segment in segments.items()}
                self.computed()
                self._done(slots.values(), compute)
                slots = {}
        finally:
            self._computing = None
            if isinstance(slots, dict):
                self._done(slots.values(), compute)  # of a Unit that was given up
            stop.set()
            with self._changed:
                self._changed.notify_all()
            thread.join()
            while not arrivals.empty():
                if not isinstance(slots := arrivals.get(), BaseException):
                    self._done(slots.values(), compute)

    def computed(self) -> None:
        """The Unit under way has all its work: if the host waits from here on, that is no time of compute."""
        if self._computing is not None:
            name, start = self._computing
            self._computing = None
            self.clock.stop(timeline.COMPUTE, name, start, torch.cuda.current_stream(self.device))

    def _done(self, slots: Iterable[Slot], compute: torch.cuda.Stream) -> None:
        with self._changed:
            for slot in slots:
                slot.is_free.record(compute)
                slot.users -= 1
            self._changed.notify_all()

    def _fill(self, units: Sequence[Unit], arrivals: queue.Queue[Any], stop: threading.Event) -> None:
        slots: dict[Key, Slot] = {}
        try:
            for position, unit in enumerate(units):
                for coming in units[position : position + 2]:
                    self.store.prefetch(coming)
                for key in self.store.wires(unit):
                    slot = self._take(key, stop)
                    if slot is None:
                        return
                    slots[key] = slot
                arrivals.put(slots)
                slots = {}
        except BaseException as error:  # noqa: BLE001 - raised where the weights are awaited
            arrivals.put(error)
        finally:
            self._done(slots.values(), torch.cuda.current_stream(self.device))  # of a pass that was given up

    def _take(self, key: Key, stop: threading.Event) -> Slot | None:
        """A slot with this array, copied in if it is not there; None when the pass was given up."""
        self.updater.wait(key[0])
        content = (key, self.versions.get(key, 0))
        with self._changed:
            for slot in self._slots:
                if slot.content == content:
                    slot.users += 1
                    return slot
            self._changed.wait_for(lambda: stop.is_set() or any(slot.users == 0 for slot in self._slots))
            if stop.is_set():
                return None
            slot = next(slot for slot in self._slots if slot.users == 0)
            self._slots.remove(slot)
            self._slots.append(slot)  # the least recently filled comes first
            slot.content, slot.users = content, 1
        source = self.store.borrow(key)
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(slot.is_free)
            start = self.clock.start(self._copies)
            slot.memory[: source.numel()].copy_(source, non_blocking=True)
            slot.is_ready.record(self._copies)
            self.clock.stop(timeline.COPY_IN, self.store.graph.units[key[0]].name, start, self._copies)
        if not self.store.stays(key):
            slot.is_ready.synchronize()  # the buffer that it was read into from flash will be used again
        self.store.give_back(key)
        return slot


class Outbox:
    """Gradients on their way to the host, in a bounded ring of pinned buffers."""

    def __init__(self, store: Store, device: torch.device, num_buffers: int, clock: GpuClock) -> None:
        self.store = store
        self.device = device
        self.clock = clock
        self._copies = torch.cuda.Stream(device)
        itemsize = 2 if store.wire == "bf16" else 4
        self._least_bytes = rounded_up(_largest(store) * itemsize)  # so that any buffer serves most Units
        self._free: queue.Queue[Tensor] = queue.Queue()
        self._unmade = num_buffers

    def send(self, unit: Unit, gradients: Mapping[str, Tensor]) -> Arrival:
        # All in one type: a weight with several uses has an fp32 sum although others are bf16.
        dtype = max((g.dtype for g in gradients.values()), key=lambda dtype: dtype.itemsize)
        buffer = self._buffer(self.store.graph.flat_elements(unit), dtype)
        arrived = torch.cuda.Event()
        host: dict[str, Tensor] = {}
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copies):
            start = self.clock.start(self._copies)
            for name, gradient in gradients.items():
                host[name] = self.store.segments[name][WIRE].of(buffer)
                host[name].copy_(gradient, non_blocking=True)
                gradient.record_stream(self._copies)
            arrived.record(self._copies)
            self.clock.stop(timeline.COPY_OUT, unit.name, start, self._copies)
        raw = buffer.view(torch.uint8)
        return Arrival(unit, host, arrived.query, arrived.synchronize, lambda: self._free.put(raw))

    def _buffer(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A buffer that nobody uses; waits for one when there are enough."""
        needed = num_elements * dtype.itemsize
        if self._unmade and self._free.empty():
            self._unmade -= 1
        else:
            raw = self._free.get()
            if raw.numel() >= needed:
                return raw.view(dtype)
            del raw  # too small: another takes its place
        return pinned(max(needed, self._least_bytes), torch.uint8).view(dtype)


class CudaLink:
    """A GPU worker's link to a store in host memory."""

    def __init__(self, store: Store, device: torch.device, *, can_veto: bool = False, speculates: bool = True) -> None:
        """`can_veto`: gradients of all Units may have to wait on the host until the last one is known. If it
        `speculates`, updates begin all the same, in spare memory."""
        self.store = store
        self.device = device
        # Threads that wait for Python get it after 0.5 ms instead of 5: the updater must not wait that long for
        # the thread that launches kernels, 26 times a step.
        self._switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(0.0005)
        speculates = can_veto and speculates and can_speculate(store)
        self.updater = Updater(store.update, Speculation(store) if speculates else None, store.updates_in_dram)
        clock = GpuClock(device)
        self.inbox = Inbox(store, self.updater, device, NUM_SLOTS, clock)
        num_units = len(store.graph.units)
        self.outbox = Outbox(store, device, num_units if can_veto else min(num_units, _NUM_GRADIENT_BUFFERS), clock)

    def stream(self, order: Iterable[Unit]) -> Iterator[tuple[Unit, Mapping[str, Tensor]]]:
        return self.inbox.stream(order)

    def send(self, unit: Unit, gradients: Mapping[str, Tensor]) -> Arrival:
        self.inbox.computed()  # sending may wait for a buffer
        self.store.prefetch_update(unit)
        return self.outbox.send(unit, gradients)

    def apply(self, parcel: Arrival, numbers: UpdateNumbers) -> None:
        for name in parcel.gradients:
            key = self.store.segments[name][WIRE].key
            self.inbox.versions[key] = numbers.step
        self.updater.post(parcel, numbers)

    def guess(self, parcel: Arrival, numbers: UpdateNumbers) -> None:
        self.updater.guess(parcel, numbers)

    def discard(self, parcel: Arrival) -> None:
        self.updater.discard(parcel)

    def drain(self) -> None:
        self.updater.drain()

    def close(self) -> None:
        self.updater.close()
        sys.setswitchinterval(self._switch_interval_s)


def _largest(store: Store) -> int:
    """Elements of the longest flat array of weights."""
    return max(store.graph.flat_elements(unit) for unit in store.graph.units)
