"""Several stores as one: the first leads, the others follow its steps with their own stripes.

Every store runs the same trainer on its own pieces. What they must agree on (the loss, the norm) goes through the
first; the rest follows from it.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from openwafer.csx.worker import Pass, Stream
from openwafer.graph import Graph, Unit
from openwafer.memoryx.optimizer import Optimizer
from openwafer.memoryx.store import Store
from openwafer.memoryx.wire import REMAINDER, WIRE
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
        self._is_free = threading.Event()  # not set while a checkpoint is read: nothing may change meanwhile
        self._is_free.set()

    def tell(self, message: Message) -> None:
        for channel in self._channels:
            channel.send(message)

    def start_step(self) -> None:
        self._is_free.wait()
        self.tell(Message("command", {"do": "step"}))

    def all_squares(self, parts: list[Tensor]) -> list[Tensor]:
        everyone = [torch.cat(parts) if parts else torch.zeros(0)]
        for channel in self._channels:
            everyone.append(self._mailbox.get(channel.peer.rank, "squares").tensors["squares"])
        self.tell(Message("squares", {}, {"squares": torch.cat(everyone)}))
        return everyone

    def freeze(self) -> None:
        """From now until `thaw` no step starts; the followers begin to send their pieces."""
        self._is_free.clear()
        self.tell(Message("command", {"do": "save"}))

    def thaw(self) -> None:
        self._is_free.set()

    def gathered(self, store: Store) -> Iterator[tuple[str, str, Tensor]]:
        """Everything, whole: each store goes through its own pieces in the same order."""
        own = store.read_all()
        for unit in self._graph.units:
            for weight in self._graph.owned(unit):
                for field, shape in field_shapes(store.optimizer, weight.spec.shape, weight.requires_grad).items():
                    pieces = [
                        next(own)[2] if rank == 0 else self._receive(rank, part, store, weight.name, field, shape)
                        for rank, part in enumerate(self._parts)
                        if weight.name in part.ranges
                    ]
                    value = pieces[0] if len(pieces) == 1 else torch.cat([piece.reshape(-1) for piece in pieces])
                    yield weight.name, field, value.view(shape)

    def _receive(self, rank: int, part: Stripe, store: Store, name: str, field: str, shape: tuple[int, ...]) -> Tensor:
        size = torch.Size(shape).numel() if name in part.wholes else len(part.ranges[name])
        piece = torch.empty(size, dtype=torch.float32 if field == WIRE else store.optimizer.state_dtype)
        start_receive(self._world.bulk, piece, rank, _PIECES).wait()
        return piece


def field_shapes(optimizer: Optimizer, shape: tuple[int, ...], requires_grad: bool) -> dict[str, tuple[int, ...]]:
    """The fields of a weight as `Store.read_all` gives them."""
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
        """For a checkpoint that the first store writes."""
        for _, field, value in store.read_all():
            assert field != REMAINDER
            start_send(self._world.bulk, value.contiguous(), 0, _PIECES).wait()

    def evaluate(self) -> None:
        self.hub.cast(self.hub.store.graph.units)
