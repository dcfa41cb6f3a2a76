"""A worker's end of the network: weights arrive a Unit ahead of the computation, gradients leave behind it."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from openwafer.graph import Graph, Unit
from openwafer.swarmx.channel import Channel, Mailbox
from openwafer.swarmx.local import weights_in
from openwafer.swarmx.message import Message
from openwafer.swarmx.network import GRADIENTS, WEIGHTS, GradientLayout, blaming, gradient_layout
from openwafer.swarmx.stripe import Stripe
from openwafer.swarmx.transfer import Transfer, start_receive, start_send
from openwafer.swarmx.tree import Node, Parts, nodes_of
from openwafer.swarmx.waits import Waits
from openwafer.swarmx.world import World

_NUM_ROOMS = 2  # Units whose weights are here: one that is computed, one that arrives
_NUM_OUTBOXES = 3  # Units whose gradients are being written, sent and awaited
Allocate = Callable[[int, torch.dtype], Tensor]  # (elements, type) → host memory


class NetworkPort:
    """See `port.HostPort`. `allocate` gives the memory that weights arrive in and gradients leave from."""

    device = torch.device("cpu")

    def __init__(
        self,
        world: World,
        graph: Graph,
        parts: Sequence[Stripe],
        mailbox: Mailbox,
        channel: Channel,
        *,
        wire: torch.dtype,
        waits: Waits,
        allocate: Allocate = lambda num_elements, dtype: torch.empty(num_elements, dtype=dtype),
    ) -> None:
        self._world = world
        self.graph = graph
        self.waits = waits
        self.tell = channel.send
        self.wire = wire
        self._parts = parts
        self._mailbox = mailbox
        self._allocate = allocate
        self._rooms = [Room(allocate, wire) for _ in range(_NUM_ROOMS)]
        self._arrivals: Arrivals | None = None
        self._nodes: list[Node] = []
        self._num_outboxes = 0
        self._outboxes: list[list[Tensor]] = []  # those that are free; in each, a buffer per store
        self._leaving: queue.Queue[tuple[list[Tensor], list[Transfer]]] = queue.Queue()

    def expect(self, total: int, share: range) -> None:
        self._nodes = nodes_of(total, share)

    def command(self) -> Message:
        with self.waits.on("the next step"):
            return self._mailbox.get(0, "command")

    def hear(self, kind: str) -> Message:
        with self.waits.on(kind):
            return self._mailbox.get(0, kind)

    # Weights

    def stream(self, order: Iterable[Unit]) -> Iterator[tuple[Unit, Mapping[str, Tensor]]]:
        units = list(order)
        self.begin(units)
        for unit in units:
            with self.waits.on("weights", f" of {unit.name}"):
                flats, say_read = self.receive(unit)
            self.waits.doing = f"computes {unit.name}"
            yield unit, weights_in(self.graph, unit, flats)
            say_read()

    def begin(self, units: Sequence[Unit]) -> None:
        self._arrivals = Arrivals(units, self._rooms, self._receive)

    def receive(self, unit: Unit) -> tuple[dict[int, Tensor], Callable[[], None]]:
        assert self._arrivals is not None
        return self._arrivals.take()

    def _receive(self, unit: Unit, room: "Room") -> dict[int, Tensor]:
        """The flat arrays that hold the Unit's weights, by owner."""
        owners = dict.fromkeys(self.graph.weights[name].owner for name in unit.weights)
        flats = room.lay_out({owner: self.graph.flat_elements(self.graph.units[owner]) for owner in owners})
        pending: list[tuple[int, Transfer, Stripe, int, Tensor]] = []
        for rank, part in enumerate(self._parts):
            names = [name for name in unit.weights if name in part.graph.weights]
            for owner in dict.fromkeys(self.graph.weights[name].owner for name in names):
                size = part.graph.flat_elements(part.graph.units[owner])
                target = flats[owner][:size] if len(self._parts) == 1 else torch.empty(size, dtype=self.wire)
                pending.append((rank, start_receive(self._world.bulk, target, rank, WEIGHTS), part, owner, target))
        for rank, transfer, part, owner, target in pending:
            with blaming(self._world, rank):
                transfer.wait()
            if len(self._parts) > 1:
                self._put_together(part, owner, target, flats[owner])
        return flats

    def _put_together(self, part: Stripe, owner: int, piece: Tensor, flat: Tensor) -> None:
        for weight in part.graph.owned(part.graph.units[owner]):
            run, start = part.ranges[weight.name], self.graph.weights[weight.name].offset
            flat[start + run.start : start + run.stop] = piece[weight.offset : weight.offset + len(run)]

    # Gradients

    def send(self, unit: Unit, gradients: Mapping[str, Parts]) -> None:
        pairs, announce = self.begin_send(unit, gradients)
        for target, source in pairs:
            target.copy_(source)
        announce()

    def begin_send(
        self, unit: Unit, gradients: Mapping[str, Parts]
    ) -> tuple[list[tuple[Tensor, Tensor]], Callable[[], None]]:
        buffers = self._outbox()
        pairs: list[tuple[Tensor, Tensor]] = []
        full: list[tuple[int, Tensor]] = []
        for rank, part in enumerate(self._parts):
            layout = gradient_layout(part.graph, unit, self._nodes)
            if layout.num_elements:
                if buffers[rank].numel() < layout.num_elements:
                    buffers[rank] = self._allocate(layout.num_elements, torch.float32)
                full.append((rank, buffers[rank][: layout.num_elements]))
                pairs += _laid_out(full[-1][1], layout, part, gradients)

        def announce() -> None:
            sends = [start_send(self._world.bulk, buffer, rank, GRADIENTS) for rank, buffer in full]
            self._leaving.put((buffers, sends))

        return pairs, announce

    def _outbox(self) -> list[Tensor]:
        if self._outboxes:
            return self._outboxes.pop()
        if self._num_outboxes < _NUM_OUTBOXES:
            self._num_outboxes += 1
            return [torch.empty(0) for _ in self._parts]
        return self._oldest_sent()

    def _oldest_sent(self) -> list[Tensor]:
        with self.waits.on("the reduction"):
            buffers, sends = self._leaving.get()
            for send in sends:
                send.wait()
        return buffers

    def flush(self) -> None:
        while not self._leaving.empty():
            self._outboxes.append(self._oldest_sent())

    def close(self) -> None:
        pass


class Room:
    """Host memory for the weights of one Unit at a time, as much as the largest needs."""

    def __init__(self, allocate: Allocate, dtype: torch.dtype) -> None:
        self._allocate = allocate
        self._dtype = dtype
        self._arrays: list[Tensor] = []

    def lay_out(self, sizes: Mapping[int, int]) -> dict[int, Tensor]:
        """An array of each size, by owner. The largest goes into the first, so that they soon grow no more."""
        flats: dict[int, Tensor] = {}
        for index, owner in enumerate(sorted(sizes, key=lambda owner: -sizes[owner])):
            if index == len(self._arrays):
                self._arrays.append(torch.empty(0, dtype=self._dtype))
            if self._arrays[index].numel() < sizes[owner]:
                self._arrays[index] = self._allocate(sizes[owner], self._dtype)
            flats[owner] = self._arrays[index][: sizes[owner]]
        return flats


class Arrivals:
    """The weights of some Units in their order: a thread receives each as soon as a room is free."""

    def __init__(
        self, units: Sequence[Unit], rooms: Sequence[Room], receive: Callable[[Unit, Room], dict[int, Tensor]]
    ) -> None:
        self._units = units
        self._do_receive = receive
        self._free: queue.Queue[Room] = queue.Queue()
        for room in rooms:
            self._free.put(room)
        self._arrived: queue.Queue[tuple[dict[int, Tensor], Room] | BaseException] = queue.Queue()
        threading.Thread(target=self._receive_all, name="openwafer-arrivals", daemon=True).start()

    def take(self) -> tuple[dict[int, Tensor], Callable[[], None]]:
        """The next Unit's arrays, and what must be called when they have been read."""
        found = self._arrived.get()
        if isinstance(found, BaseException):
            raise found
        flats, room = found
        return flats, lambda: self._free.put(room)

    def _receive_all(self) -> None:
        try:
            for unit in self._units:
                room = self._free.get()
                self._arrived.put((self._do_receive(unit, room), room))
        except BaseException as error:  # noqa: BLE001 - raised where the weights are awaited
            self._arrived.put(error)


def _laid_out(
    buffer: Tensor, layout: GradientLayout, part: Stripe, gradients: Mapping[str, Parts]
) -> list[tuple[Tensor, Tensor]]:
    """What to copy into the buffer, as (target, source)."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for index, (name, places) in enumerate(layout.parts.items()):
        buffer[layout.mask_start + index] = name in gradients
        run = part.ranges[name]
        for node, (at, size) in places.items():
            if name in gradients:
                pairs.append((buffer[at : at + size], gradients[name][node].reshape(-1)[run.start : run.stop]))
    return pairs
