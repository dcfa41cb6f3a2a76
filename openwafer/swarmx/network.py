"""A store and its workers on several hosts: weights and gradients go point to point, in stripes.

The workers' end is in `network_port.py`.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openwafer.graph import Graph, Unit
from openwafer.graph.unit import padded
from openwafer.memoryx.store import Store
from openwafer.memoryx.tier import Key
from openwafer.swarmx.channel import Channel, Mailbox, RankLost
from openwafer.swarmx.hub import Hub, Shares
from openwafer.swarmx.share import share_of
from openwafer.swarmx.transfer import Transfer, start_receive, start_send
from openwafer.swarmx.tree import Node, nodes_of
from openwafer.swarmx.world import World

WEIGHTS, GRADIENTS = 1, 2  # tags


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
            (rank, start_send(self._world.bulk, flat, rank, WEIGHTS))
            for flat in flats.values()
            for rank in self._world.csx_ranks
        ]
        self.traffic.broadcast_bytes += sum(flat.nbytes for flat in flats.values()) * self.num_csx

        def wait() -> None:
            for rank, transfer in sends:
                with blaming(self._world, rank):
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
        with blaming(self._world, rank):
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
            transfers.append(start_receive(self._world.bulk, buffer, rank, GRADIENTS) if size else Transfer([]))
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


@contextlib.contextmanager
def blaming(world: World, rank: int) -> Iterator[None]:
    """A transfer that fails means that the rank at its other end is gone."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(world.name(rank), str(error).splitlines()[0]) from None
