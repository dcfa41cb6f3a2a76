"""Several stores as one: the first leads, the others follow its steps with their own stripes.

Every store runs the same trainer on its own pieces. What they must agree on (the loss, the norm) goes through the
first; the rest follows from it.
"""

import collections
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from openwafer.csx.worker import Pass, Stream
from openwafer.graph import Graph, Unit
from openwafer.memoryx.optimizer import Optimizer
from openwafer.memoryx.snapshot import Snapshot
from openwafer.memoryx.store import Store
from openwafer.memoryx.wire import WIRE
from openwafer.swarmx.channel import Channel, Mailbox
from openwafer.swarmx.hub import Hub
from openwafer.swarmx.message import Message
from openwafer.swarmx.reduction import collected
from openwafer.swarmx.stripe import Stripe
from openwafer.swarmx.transfer import start_receive, start_send
from openwafer.swarmx.world import World

_PIECES = 3  # tag


class Followers:
    """The other stores, seen from the first. `parts` are the stripes of all stores, the first's included."""

    def __init__(
        self, world: World, graph: Graph, parts: Sequence[Stripe], mailbox: Mailbox, channels: Sequence[Channel]
    ) -> None:
        self._world = world
        self._graph = graph
        self._parts = parts
        self._mailbox = mailbox
        self._channels = channels

    def tell(self, message: Message) -> None:
        for channel in self._channels:
            channel.send(message)

    def start_step(self) -> None:
        self.tell(Message("command", {"do": "step"}))

    def all_squares(self, parts: list[Tensor]) -> list[Tensor]:
        everyone = [torch.cat(parts) if parts else torch.zeros(0)]
        for channel in self._channels:
            everyone.append(self._mailbox.get(channel.peer.rank, "squares").tensors["squares"])
        self.tell(Message("squares", {}, {"squares": torch.cat(everyone)}))
        return everyone

    def freeze(self, store: Store) -> "Gathering":
        """Everything as all stores have it now. The followers begin to send their pieces, and steps go on."""
        self.tell(Message("command", {"do": "save"}))
        return Gathering(self._world, self._graph, self._parts, store)


class Gathering:
    """A checkpoint of all stores, read in one thread while others train. It must be closed; there is one at a time.

    `store` is the first's. Each store goes through its own pieces in the same order.
    """

    def __init__(self, world: World, graph: Graph, parts: Sequence[Stripe], store: Store) -> None:
        self._world = world
        self._parts = parts
        self._snapshot = store.freeze()
        self._state_dtype = store.optimizer.state_dtype
        self._own = self._snapshot.read_all(in_order=True)
        self._left = collections.deque(
            (rank, name, field, shape)
            for name, field, shape in in_order(graph, store.optimizer)
            for rank, part in enumerate(parts)
            if name in part.ranges
        )

    def read_all(self) -> Iterator[tuple[str, str, Tensor]]:
        """(weight, field, value), whole."""
        while self._left:
            _, name, field, shape = self._left[0]
            pieces: list[Tensor] = []
            while self._left and self._left[0][1:3] == (name, field):
                rank, *_ = self._left.popleft()
                pieces.append(next(self._own)[2] if rank == 0 else self._receive(rank, name, field, shape))
            value = pieces[0] if len(pieces) == 1 else torch.cat([piece.reshape(-1) for piece in pieces])
            yield name, field, value.view(shape)

    def _receive(self, rank: int, name: str, field: str, shape: tuple[int, ...]) -> Tensor:
        part = self._parts[rank]
        size = torch.Size(shape).numel() if name in part.wholes else len(part.ranges[name])
        piece = torch.empty(size, dtype=torch.float32 if field == WIRE else self._state_dtype)
        start_receive(self._world.bulk, piece, rank, _PIECES).wait()
        return piece

    def close(self) -> None:
        """After a failure too: what is still sent must not be taken for the next checkpoint."""
        self._snapshot.close()
        while self._left:
            rank, name, field, shape = self._left.popleft()
            if rank > 0:
                self._receive(rank, name, field, shape)


def in_order(graph: Graph, optimizer: Optimizer) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(weight, field, shape) of everything, in the order of `Snapshot.read_all(in_order=True)`."""
    for unit in graph.units:
        shapes = {w.name: field_shapes(optimizer, w.spec.shape, w.requires_grad) for w in graph.owned(unit)}
        for field in sorted({field for of_weight in shapes.values() for field in of_weight}):
            yield from ((name, field, of_weight[field]) for name, of_weight in shapes.items() if field in of_weight)


def field_shapes(optimizer: Optimizer, shape: tuple[int, ...], requires_grad: bool) -> dict[str, tuple[int, ...]]:
    """The fields of a weight as a snapshot gives them."""
    return {WIRE: shape, **(optimizer.state_shapes(shape) if requires_grad else {})}


class Follower:
    """A store that is not the first: stands in for the workers in its trainer, as `Swarm` does in the first's."""

    report = None
    followers = None

    def __init__(self, world: World, hub: Hub, mailbox: Mailbox, leader: Channel) -> None:
        self.hub = hub
        self._world = world
        self._mailbox = mailbox
        self._leader = leader
        self._sending: threading.Thread | None = None

    def command(self) -> dict[str, Any]:
        return self._mailbox.get(0, "command").fields

    def forward(self, stream: Stream, micro_batches: Any, buffers: Mapping[str, Tensor], step: int) -> Pass:
        self.hub.cast(self.hub.store.graph.units)
        fields = self._mailbox.get(0, "loss").fields
        done = Pass(step=step, total=fields["total"], share=range(0), values=[], buffers=[])
        done.loss, done.divisor = fields["loss"], fields["divisor"]
        return done

    def backward(self, stream: Stream, done: Pass, scale: float = 1.0) -> Iterator[tuple[Unit, dict[str, Tensor]]]:
        return collected(self.hub, done.total)

    def all_squares(self, parts: list[Tensor]) -> list[Tensor]:
        mine = torch.cat(parts) if parts else torch.zeros(0)
        self._leader.send(Message("squares", {}, {"squares": mine}))
        return [self._mailbox.get(0, "squares").tensors["squares"]]

    def send_pieces(self, store: Store) -> None:
        """For a checkpoint that the first store writes; returns at once."""
        self.finish()  # there is one snapshot at a time
        self._sending = threading.Thread(
            target=self._send, args=(store.freeze(),), name="openwafer-pieces", daemon=True
        )
        self._sending.start()

    def _send(self, snapshot: Snapshot) -> None:
        try:
            for _, _, value in snapshot.read_all(in_order=True):
                start_send(self._world.bulk, value.contiguous(), 0, _PIECES).wait()
        finally:
            snapshot.close()  # training may be waiting for it

    def finish(self) -> None:
        """Until all pieces have left; the first store has asked for no other checkpoint before it had them."""
        if self._sending is not None:
            self._sending.join()

    def evaluate(self) -> None:
        self.hub.cast(self.hub.store.graph.units)
