"""Workers on the same host: weights are read where the store keeps them, gradients are left in shared slots.

A worker maps the store's arrays, so there is one copy of the weights for all. It writes its sums of gradients into a
slot of its own memory and says where; the store adds them up and gives the slot back.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from openwafer.graph import Graph, Unit
from openwafer.memoryx.store import Store
from openwafer.memoryx.tier import Key
from openwafer.swarmx.channel import Channel, Mailbox
from openwafer.swarmx.hub import Hub, Shares
from openwafer.swarmx.message import Message
from openwafer.swarmx.shared_memory import Arena, ArenaView
from openwafer.swarmx.tree import Node, Parts
from openwafer.swarmx.waits import Waits

STORE = 0  # the rank of the store in a worker's mailbox
_NUM_SLOTS = 3  # of gradients per worker: one being written, one being read, one between


class LocalHub(Hub):
    """The store's end. `outboxes` are the workers' memories with gradients."""

    def __init__(
        self,
        store: Store,
        mailbox: Mailbox,
        ready: Callable[[int], None],
        channels: Sequence[Channel],
        weights: Arena,
        outboxes: Sequence[ArenaView],
    ) -> None:
        self._weights = weights
        self._outboxes = outboxes
        super().__init__(store, mailbox, ready, channels)

    def push(self, unit: Unit, flats: Mapping[Key, Tensor]) -> Callable[[], None]:
        places = [[key[0], self._weights.offset_of(flat), flat.numel()] for key, flat in flats.items()]
        must_hold = not self.store.is_resident(unit)
        self.tell_all(Message("weights", {"unit": unit.index, "places": places, "must_say_done": must_hold}))
        self.traffic.broadcast_bytes += sum(flat.nbytes for flat in flats.values()) * self.num_csx
        return self._wait_until_read if must_hold else lambda: None

    def _wait_until_read(self) -> None:
        for csx in range(self.num_csx):
            self.hear(csx, "done")

    def expect(self, total: int) -> None:
        pass  # workers say with each Unit what they send

    @contextlib.contextmanager
    def collect(self, unit: Unit) -> Iterator[Shares]:
        messages = [self.hear(csx, "gradients") for csx in range(self.num_csx)]
        yield [self._read(csx, unit, message) for csx, message in enumerate(messages)]
        for csx, message in enumerate(messages):
            if message.fields["slot"] is not None:
                self.tell(csx, Message("free", {"slot": message.fields["slot"]}))

    def _read(self, csx: int, unit: Unit, message: Message) -> dict[str, dict[Node, Tensor]]:
        assert message.fields["unit"] == unit.index, (message, unit.index)
        found: dict[str, dict[Node, Tensor]] = {}
        for name, start, stop, offset, dtype_name in message.fields["parts"]:
            dtype = getattr(torch, dtype_name)
            shape = self.store.graph.weights[name].spec.shape
            num_bytes = shape_bytes(shape, dtype)
            part = self._outboxes[csx].at(offset, num_bytes).view(dtype).view(shape)
            found.setdefault(name, {})[start, stop] = part
            self.traffic.reduced_bytes += num_bytes
        return found


class LocalPort:
    """The worker's end, see `port.HostPort`. `lock` is told of shared memory that stays where it is, each time that it
    is used anew."""

    device = torch.device("cpu")

    def __init__(
        self,
        graph: Graph,
        mailbox: Mailbox,
        tell: Callable[[Message], None],
        weights: ArenaView,
        outbox: Arena,
        *,
        wire: torch.dtype,
        waits: Waits,
        lock: Callable[[Tensor], None] = lambda memory: None,
    ) -> None:
        self.graph = graph
        self.waits = waits
        self.tell = tell
        self.wire = wire
        self._mailbox = mailbox
        self._weights = weights
        self._lock = lock
        self._outbox = Outbox(outbox, self._free_slot, lock)
        self._largest = max(
            sum(_padded(4 * graph.weights[name].spec.num_elements) for name in unit.weights) for unit in graph.units
        )

    def expect(self, total: int, share: range) -> None:
        pass  # the store is told with each Unit what it gets

    def command(self) -> Message:
        with self.waits.on("the next step"):
            return self._mailbox.get(STORE, "command")

    def hear(self, kind: str) -> Message:
        with self.waits.on(kind):
            return self._mailbox.get(STORE, kind)

    def stream(self, order: Iterable[Unit]) -> Iterator[tuple[Unit, Mapping[str, Tensor]]]:
        for unit in order:
            with self.waits.on("weights", f" of {unit.name}"):
                flats, say_read = self.receive(unit)
            self.waits.doing = f"computes {unit.name}"
            yield unit, weights_in(self.graph, unit, flats)
            if say_read is not None:
                say_read()

    def begin(self, units: Sequence[Unit]) -> None:
        pass  # the store has told what comes

    def receive(self, unit: Unit) -> tuple[dict[int, Tensor], Callable[[], None] | None]:
        """As `HostPort.receive`: where the store keeps them."""
        message = self._mailbox.get(STORE, "weights")
        assert message.fields["unit"] == unit.index, (message, unit.index)
        flats = {
            owner: self._weights.at(offset, num_elements * self.wire.itemsize).view(self.wire)
            for owner, offset, num_elements in message.fields["places"]
        }
        if message.fields["must_say_done"]:
            return flats, lambda: self.tell(Message("done"))
        for flat in flats.values():
            self._lock(flat)
        return flats, None

    def send(self, unit: Unit, gradients: Mapping[str, Parts]) -> None:
        pairs, announce = self.begin_send(unit, gradients)
        for target, source in pairs:
            target.copy_(source)
        announce()

    def begin_send(
        self, unit: Unit, gradients: Mapping[str, Parts]
    ) -> tuple[list[tuple[Tensor, Tensor]], Callable[[], None]]:
        num_parts = max((len(parts) for parts in gradients.values()), default=0)
        slot, pairs, places = self._outbox.lay_out(gradients, self._largest * num_parts)
        message = Message("gradients", {"unit": unit.index, "slot": slot, "parts": places})
        return pairs, lambda: self.tell(message)

    def flush(self) -> None:
        pass  # they have left when they are written

    def close(self) -> None:
        pass

    def _free_slot(self) -> int:
        with self.waits.on("the reduction"):
            return self._mailbox.get(STORE, "free").fields["slot"]


def weights_in(graph: Graph, unit: Unit, flats: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """The Unit's weights by name, in flat arrays by owner."""
    specs = [graph.weights[name] for name in unit.weights]
    return {
        weight.name: flats[weight.owner][weight.offset : weight.offset + weight.spec.num_elements].view(
            weight.spec.shape
        )
        for weight in specs
    }


class Outbox:
    """Slots for gradients in shared memory. `wait` gives the next one that was read; `lock` is told of each new one."""

    def __init__(self, arena: Arena, wait: Callable[[], int], lock: Callable[[Tensor], None]) -> None:
        self._arena = arena
        self._wait = wait
        self._lock = lock
        self._slots: list[Tensor] = []
        self._free: list[int] = []

    def lay_out(
        self, gradients: Mapping[str, Parts], slot_bytes: int
    ) -> tuple[int | None, list[tuple[Tensor, Tensor]], list[list]]:
        """(slot, what to copy as (target, source), [weight, first leaf, end, offset in bytes, type] of each part); no
        slot when there is nothing.

        `slot_bytes` is enough for any Unit.
        """
        tensors = [(name, node, part) for name, parts in gradients.items() for node, part in parts.items()]
        if not tensors:
            return None, [], []
        slot = self._take(slot_bytes)
        base, position = self._arena.offset_of(self._slots[slot]), 0
        pairs: list[tuple[Tensor, Tensor]] = []
        places: list[list] = []
        for name, (start, stop), part in tensors:
            memory = self._slots[slot][position : position + part.nbytes].view(part.dtype)
            pairs.append((memory.view(part.shape), part))
            places.append([name, start, stop, base + position, str(part.dtype).removeprefix("torch.")])
            position += _padded(part.nbytes)
        return slot, pairs, places

    def _take(self, num_bytes: int) -> int:
        if self._slots and self._slots[0].numel() < num_bytes:  # more parts than before
            while len(self._free) < len(self._slots):
                self._free.append(self._wait())
            self._slots, self._free = [], []
        if self._free:
            return self._free.pop()
        if len(self._slots) < _NUM_SLOTS:
            self._slots.append(self._arena.allocate(num_bytes))
            self._lock(self._slots[-1])
            return len(self._slots) - 1
        return self._wait()


def shape_bytes(shape: Iterable[int], dtype: torch.dtype) -> int:
    total = dtype.itemsize
    for size in shape:
        total *= size
    return total


def _padded(num_bytes: int) -> int:
    """Parts start at multiples of a cache line."""
    return -(-num_bytes // 64) * 64
