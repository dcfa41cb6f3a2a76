"""A worker's port where weights and gradients have to be copied between host memory and a device.

Two threads: one copies weights into slots on the device as they are announced and slots are free, ahead of the
computation; one sends gradients off when they have arrived in host memory.
"""

import collections
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from openwafer.csx.cuda import NUM_SLOTS
from openwafer.csx.device import Device, Moment
from openwafer.graph import Unit
from openwafer.swarmx.local import weights_in
from openwafer.swarmx.message import Message
from openwafer.swarmx.port import HostPort
from openwafer.swarmx.tree import Parts

_MOST_LEAVING = 2  # Units whose gradients are on the device and on their way out


@dataclass(eq=False)
class Slot:
    """Room for one flat array of weights on the device."""

    memory: Tensor
    is_free: Moment  # when what was computed with its content is done


@dataclass(eq=False)
class Delivery:
    """The weights of one Unit, on the device or on their way to it."""

    slots: dict[int, Slot]  # by the index of the Unit that owns the array
    flats: dict[int, Tensor]
    arrived: list[Moment]


class StagedPort:
    """`port` with everything on `device`."""

    def __init__(self, port: HostPort, device: Device, num_slots: int = NUM_SLOTS) -> None:
        self.graph = port.graph
        self.waits = port.waits
        self.device = device.where
        self.tell = port.tell
        self.expect = port.expect
        self._port = port
        self._on = device
        owners = [{self.graph.weights[name].owner for name in unit.weights} for unit in self.graph.units]
        largest = max(self.graph.flat_elements(unit) for unit in self.graph.units)
        self._free: queue.Queue[Slot] = queue.Queue()
        for _ in range(max(num_slots, max(map(len, owners)) + 1)):  # a Unit may need the arrays of several others
            self._free.put(Slot(device.empty(largest, port.wire), device.now()))
        self._leaving: collections.deque[Moment] = collections.deque()
        self._announcements: queue.Queue[tuple[Moment, Callable[[], None]] | None] = queue.Queue()
        self._error: BaseException | None = None
        threading.Thread(target=self._announce_all, name="openwafer-announcer", daemon=True).start()

    def command(self) -> Message:
        return self._moved(self._port.command())

    def hear(self, kind: str) -> Message:
        return self._moved(self._port.hear(kind))

    def _moved(self, message: Message) -> Message:
        return dataclasses.replace(message, tensors={n: t.to(self.device) for n, t in message.tensors.items()})

    # Weights

    def stream(self, order: Iterable[Unit]) -> Iterator[tuple[Unit, Mapping[str, Tensor]]]:
        units = list(order)
        self._port.begin(units)
        deliveries: queue.Queue[Delivery | BaseException] = queue.Queue()
        threading.Thread(target=self._fill, args=(units, deliveries), name="openwafer-filler", daemon=True).start()
        for unit in units:
            with self.waits.on("weights", f" of {unit.name}"):
                delivery = deliveries.get()
            if isinstance(delivery, BaseException):
                raise delivery
            for moment in delivery.arrived:
                self._on.use(moment)
            self.waits.doing = f"computes {unit.name}"
            yield unit, weights_in(self.graph, unit, delivery.flats)
            for slot in delivery.slots.values():
                slot.is_free = self._on.now()
                self._free.put(slot)

    def _fill(self, units: Sequence[Unit], deliveries: queue.Queue[Delivery | BaseException]) -> None:
        try:
            for unit in units:
                deliveries.put(self._deliver(unit))
        except BaseException as error:  # noqa: BLE001 - raised where the weights are awaited
            deliveries.put(error)

    def _deliver(self, unit: Unit) -> Delivery:
        sources, say_read = self._port.receive(unit)
        delivery = Delivery({}, {}, [])
        for owner, source in sources.items():
            slot = self._free.get()
            target = slot.memory[: source.numel()]
            delivery.slots[owner], delivery.flats[owner] = slot, target
            delivery.arrived.append(self._on.copy_in(target, source, slot.is_free))
        if say_read is not None:
            for moment in delivery.arrived:
                moment.synchronize()
            say_read()
        return delivery

    # Gradients

    def send(self, unit: Unit, gradients: Mapping[str, Parts]) -> None:
        while len(self._leaving) >= _MOST_LEAVING:
            self._leaving.popleft().synchronize()
        pairs, announce = self._port.begin_send(unit, gradients)
        moment = self._on.copy_out(pairs)
        self._leaving.append(moment)
        self._announcements.put((moment, announce))

    def flush(self) -> None:
        self._announcements.join()
        self._leaving.clear()
        if self._error is not None:
            raise self._error
        self._port.flush()

    def _announce_all(self) -> None:
        while (item := self._announcements.get()) is not None:
            moment, announce = item
            try:
                moment.synchronize()
                announce()
            except BaseException as error:  # noqa: BLE001 - raised by `flush`
                self._error = error
            finally:
                self._announcements.task_done()

    def close(self) -> None:
        """The threads end."""
        self._announcements.put(None)
