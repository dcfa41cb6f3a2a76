"""What a worker sees of its stores: commands, weights that arrive, a way out for gradients."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from openwafer.graph import Unit
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
