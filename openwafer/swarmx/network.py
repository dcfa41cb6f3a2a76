"""Stores and workers on several hosts: weights and gradients go point to point, in stripes, behind the computation."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openwafer.graph import Graph, Unit
from openwafer.graph.unit import padded
from openwafer.memoryx.store import Store
from openwafer.memoryx.tier import Key
from openwafer.swarmx.channel import Channel, Mailbox, RankLost
from openwafer.swarmx.hub import Hub, Shares
from openwafer.swarmx.local import weights_in
from openwafer.swarmx.message import Message
from openwafer.swarmx.share import share_of
from openwafer.swarmx.stripe import Stripe
from openwafer.swarmx.transfer import Transfer, start_receive, start_send
from openwafer.swarmx.tree import Node, Parts, nodes_of
from openwafer.swarmx.waits import Waits
from openwafer.swarmx.world import World

_WEIGHTS, _GRADIENTS = 1, 2  # tags


class NetworkHub(Hub):
    """A store's end. Only the first store speaks to the workers; the others cast and collect."""

    def __init__(
        self,
        world: World,
        store: Store,
        mailbox: Mailbox,
        ready: Callable[[int], None],
        channels: Sequence[Channel],
    ) -> None:
        self._world = world
        self._total = 0
        self._buffers: dict[tuple[int, int], Tensor] = {}  # (worker, turn) → memory for arriving gradients
        self._coming: tuple[Unit, list[Tensor], list[Transfer]] | None = None
        super().__init__(store, mailbox, ready, channels)

    @property
    def num_csx(self) -> int:
        return self._world.num_csx

    def expect(self, total: int) -> None:
        self._total = total
        self._coming = None

    def push(self, unit: Unit, flats: Mapping[Key, Tensor]) -> Callable[[], None]:
        sends = [
            (rank, start_send(self._world.bulk, flat, rank, _WEIGHTS))
            for flat in flats.values()
            for rank in self._world.csx_ranks
        ]
        self.traffic.broadcast_bytes += sum(flat.nbytes for flat in flats.values()) * self.num_csx

        def wait() -> None:
            for rank, transfer in sends:
                with _blaming(self._world, rank):
                    transfer.wait()

        return wait

    @contextlib.contextmanager
    def collect(self, unit: Unit) -> Iterator[Shares]:
        if self._coming is None or self._coming[0] is not unit:
            self._coming = self._start(unit)
        _, buffers, transfers = self._coming
        # The next Unit's gradients arrive while this one's are added up.
        self._coming = self._start(self.store.graph.units[unit.index - 1]) if unit.index > 0 else None
        for index, transfer in enumerate(transfers):
            self._wait(self._world.csx_ranks[index], transfer)
        yield [self._read(unit, csx, buffer) for csx, buffer in enumerate(buffers)]

    def _wait(self, rank: int, transfer: Transfer) -> None:
        with _blaming(self._world, rank):
            transfer.wait()
        if self.mailbox.lost is not None:
            raise self.mailbox.lost

    def _start(self, unit: Unit) -> tuple[Unit, list[Tensor], list[Transfer]]:
        buffers: list[Tensor] = []
        transfers: list[Transfer] = []
        for csx, rank in enumerate(self._world.csx_ranks):
            size = self._layout(unit, csx).num_elements
            buffer = self._buffer((csx, unit.index % 2), size)
            buffers.append(buffer)
            transfers.append(start_receive(self._world.bulk, buffer, rank, _GRADIENTS) if size else Transfer([]))
        return unit, buffers, transfers

    def _buffer(self, key: tuple[int, int], size: int) -> Tensor:
        if key not in self._buffers or self._buffers[key].numel() < size:
            self._buffers[key] = torch.empty(size)
        return self._buffers[key][:size]

    def _layout(self, unit: Unit, csx: int) -> "GradientLayout":
        share = share_of(self._total, self.num_csx, csx)
        return gradient_layout(self.store.graph, unit, nodes_of(self._total, share))

    def _read(self, unit: Unit, csx: int, buffer: Tensor) -> dict[str, dict[Node, Tensor]]:
        layout = self._layout(unit, csx)
        self.traffic.reduced_bytes += buffer.nbytes
        is_there = buffer[layout.mask_start :].tolist()
        found: dict[str, dict[Node, Tensor]] = {}
        for position, (name, parts) in enumerate(layout.parts.items()):
            if is_there[position]:
                shape = self.store.graph.weights[name].spec.shape
                found[name] = {node: buffer[at : at + size].view(shape) for node, (at, size) in parts.items()}
        return found


@dataclass(frozen=True)
class GradientLayout:
    """Where each part lies in the one tensor that goes from a worker to a store for a Unit."""

    parts: dict[str, dict[Node, tuple[int, int]]]  # weight → subtree → (first element, elements)
    mask_start: int  # then one number per weight: whether it has a gradient
    num_elements: int


def gradient_layout(graph: Graph, unit: Unit, nodes: Sequence[Node]) -> GradientLayout:
    """`graph` is a store's part; `unit` may be of the whole graph."""
    names = [name for name in unit.weights if name in graph.weights and graph.weights[name].requires_grad]
    parts: dict[str, dict[Node, tuple[int, int]]] = {}
    position = 0
    for name in names:
        size = graph.weights[name].spec.num_elements
        parts[name] = {}
        for node in nodes:
            parts[name][node] = (position, size)
            position += padded(size)
    return GradientLayout(parts, position, position + len(names))


class NetworkPort:
    """A worker's end: weights arrive in two buffers, one ahead; gradients leave from two."""

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
    ) -> None:
        self._world = world
        self.graph = graph
        self.waits = waits
        self.tell = channel.send
        self._parts = parts
        self._mailbox = mailbox
        self._wire = wire
        self._nodes: list[Node] = []
        self._leaving: list[tuple[Unit, list[Tensor], list[Transfer]]] = []
        self._free: list[list[Tensor]] = []  # buffers for leaving gradients, one per store

    def expect(self, total: int, share: range) -> None:
        self._nodes = nodes_of(total, share)

    def command(self) -> Message:
        with self.waits.on("the next step"):
            return self._mailbox.get(0, "command")

    def hear(self, kind: str) -> Message:
        with self.waits.on(kind):
            return self._mailbox.get(0, kind)

    def stream(self, order: Iterable[Unit]) -> Iterator[tuple[Unit, Mapping[str, Tensor]]]:
        units = list(order)
        arrived: queue.Queue[dict[int, Tensor] | BaseException] = queue.Queue()
        free: queue.Queue[dict[int, Tensor] | None] = queue.Queue()
        for _ in range(2):
            free.put({})
        thread = threading.Thread(target=self._receive_all, args=(units, arrived, free), daemon=True)
        thread.start()
        try:
            for unit in units:
                with self.waits.on("weights", f" of {unit.name}"):
                    flats = arrived.get()
                if isinstance(flats, BaseException):
                    raise flats
                self.waits.doing = f"computes {unit.name}"
                yield unit, weights_in(self.graph, unit, flats)
                free.put(flats)
        finally:
            free.put(None)

    def _receive_all(self, units: Sequence[Unit], arrived: queue.Queue, free: queue.Queue) -> None:
        try:
            for unit in units:
                memory = free.get()
                if memory is None:
                    return
                arrived.put(self._receive(unit, memory))
        except BaseException as error:  # noqa: BLE001 - raised where the weights are awaited
            arrived.put(error)

    def _receive(self, unit: Unit, memory: dict[int, Tensor]) -> dict[int, Tensor]:
        """The flat arrays that hold the Unit's weights, by owner; `memory` serves again where it is large enough."""
        owners = dict.fromkeys(self.graph.weights[name].owner for name in unit.weights)
        spare = sorted(memory.values(), key=torch.Tensor.numel)
        flats: dict[int, Tensor] = {}
        for owner in owners:
            size = self.graph.flat_elements(self.graph.units[owner])
            fitting = next((index for index, tensor in enumerate(spare) if tensor.numel() >= size), None)
            flats[owner] = torch.empty(size, dtype=self._wire) if fitting is None else spare.pop(fitting)
        pending: list[tuple[int, Transfer, Stripe, int, Tensor]] = []
        for rank, part in enumerate(self._parts):
            names = [name for name in unit.weights if name in part.graph.weights]
            for owner in dict.fromkeys(self.graph.weights[name].owner for name in names):
                size = part.graph.flat_elements(part.graph.units[owner])
                target = flats[owner][:size] if len(self._parts) == 1 else torch.empty(size, dtype=self._wire)
                pending.append((rank, start_receive(self._world.bulk, target, rank, _WEIGHTS), part, owner, target))
        for rank, transfer, part, owner, target in pending:
            with _blaming(self._world, rank):
                transfer.wait()
            if len(self._parts) > 1:
                self._put_together(part, owner, target, flats[owner])
        return flats

    def _put_together(self, part: Stripe, owner: int, piece: Tensor, flat: Tensor) -> None:
        for weight in part.graph.owned(part.graph.units[owner]):
            run, start = part.ranges[weight.name], self.graph.weights[weight.name].offset
            flat[start + run.start : start + run.stop] = piece[weight.offset : weight.offset + len(run)]

    def send(self, unit: Unit, gradients: Mapping[str, Parts]) -> None:
        while len(self._leaving) > 1:
            self._finish_oldest()
        buffers = self._free.pop() if self._free else [torch.empty(0) for _ in self._parts]
        transfers: list[Transfer] = []
        for rank, part in enumerate(self._parts):
            layout = gradient_layout(part.graph, unit, self._nodes)
            if layout.num_elements:
                if buffers[rank].numel() < layout.num_elements:
                    buffers[rank] = torch.empty(layout.num_elements)
                buffer = buffers[rank][: layout.num_elements]
                self._pack(buffer, layout, part, gradients)
                transfers.append(start_send(self._world.bulk, buffer, rank, _GRADIENTS))
        self._leaving.append((unit, buffers, transfers))

    def flush(self) -> None:
        while self._leaving:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        _, buffers, transfers = self._leaving.pop(0)
        with self.waits.on("the reduction"):
            for transfer in transfers:
                transfer.wait()
        self._free.append(buffers)

    def _pack(self, buffer: Tensor, layout: GradientLayout, part: Stripe, gradients: Mapping[str, Parts]) -> None:
        for index, (name, places) in enumerate(layout.parts.items()):
            buffer[layout.mask_start + index] = name in gradients
            run = part.ranges[name]
            for node, (at, size) in places.items():
                if name in gradients:
                    buffer[at : at + size] = gradients[name][node].reshape(-1)[run.start : run.stop]


@contextlib.contextmanager
def _blaming(world: World, rank: int) -> Iterator[None]:
    """A transfer that fails means that the rank at its other end is gone."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(world.name(rank), str(error).splitlines()[0]) from None
