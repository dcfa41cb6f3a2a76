"""What a worker sees of its stores: commands, weights that arrive, a way out for gradients."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from openwafer.graph import Graph, Unit
from openwafer.swarmx.message import Message
from openwafer.swarmx.tree import Parts
from openwafer.swarmx.waits import Waits


class Port(Protocol):
    """One worker's end of the fabric."""

    waits: Waits
    device: torch.device  # where tensors that come are, and those that go may be

    def expect(self, total: int, share: range) -> None:
        """The next gradients are of these of `total` micro-batches."""
        ...

    def command(self) -> Message:
        """What to do next."""
        ...

    def hear(self, kind: str) -> Message:
        """The next message of this kind from the first store."""
        ...

    def tell(self, message: Message, /) -> None:
        """To the first store."""
        ...

    def stream(self, order: Iterable[Unit]) -> Iterator[tuple[Unit, Mapping[str, Tensor]]]:
        """Each Unit with its weights; valid until the next is asked for."""
        ...

    def send(self, unit: Unit, gradients: Mapping[str, Parts]) -> None:
        """Gradients of the Unit's uses of weights leave for the stores."""
        ...

    def flush(self) -> None:
        """Until all gradients have left."""
        ...


class HostPort(Port, Protocol):
    """A port whose tensors are in host memory, in the pieces that are needed to copy them to and from a device."""

    graph: Graph
    wire: torch.dtype

    def begin(self, units: Sequence[Unit]) -> None:
        """The weights of these Units are asked for next, in this order."""
        ...

    def receive(self, unit: Unit) -> tuple[dict[int, Tensor], Callable[[], None] | None]:
        """The flat arrays that hold the Unit's weights, by owner; and what must be called when they have been read, if
        they do not stay there."""
        ...

    def begin_send(
        self, unit: Unit, gradients: Mapping[str, Parts]
    ) -> tuple[list[tuple[Tensor, Tensor]], Callable[[], None]]:
        """What is to be copied, (target, source), and what must be called when it is."""
        ...

    def close(self) -> None: ...
