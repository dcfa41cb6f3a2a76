"""The link between a worker and MemoryX: weights come in, gradients go out.

Where the worker computes on the store's own memory there is nothing to copy (`DirectLink`); a GPU has a link of
its own in `cuda.py`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from openwafer.graph import Unit
from openwafer.memoryx.store import Store
from openwafer.memoryx.update import UpdateNumbers

Parcel = Any  # gradients that left the worker, as the link keeps them


class Link(Protocol):
    """What a worker needs of MemoryX."""

    device: torch.device

    def stream(self, order: Iterable[Unit]) -> Iterator[tuple[Unit, Mapping[str, Tensor]]]:
        """Each Unit with its weights on the worker; valid until the next is asked for."""
        ...

    def send(self, unit: Unit, gradients: Mapping[str, Tensor]) -> Parcel:
        """Gradients leave the worker; they are applied by `apply`, or never."""
        ...

    def guess(self, parcel: Parcel, numbers: UpdateNumbers) -> None:
        """`apply` with these numbers, or something else, will come when backward is done: a chance to begin."""
        ...

    def apply(self, parcel: Parcel, numbers: UpdateNumbers) -> None:
        """Update the Unit with gradients that were sent; may return before it is done."""
        ...

    def discard(self, parcel: Parcel) -> None:
        """Forget gradients that were sent."""
        ...

    def drain(self) -> None:
        """Until every update is done."""
        ...


class DirectLink:
    """The worker computes where the store is."""

    def __init__(self, store: Store, device: torch.device | None = None) -> None:
        self.store = store
        self.device = device or torch.device("cpu")
        self._last_applied = len(store.graph.units)

    def stream(self, order: Iterable[Unit]) -> Iterator[tuple[Unit, Mapping[str, Tensor]]]:
        return self.store.stream(order)

    def send(self, unit: Unit, gradients: Mapping[str, Tensor]) -> Parcel:
        return unit, gradients

    def guess(self, parcel: Parcel, numbers: UpdateNumbers) -> None:
        pass

    def apply(self, parcel: Parcel, numbers: UpdateNumbers) -> None:
        unit, gradients = parcel
        # Updates go down the Units during backward and up when they were held back: the next one is a neighbour.
        coming = unit.index + (1 if unit.index > self._last_applied else -1)
        if 0 <= coming < len(self.store.graph.units):
            self.store.prefetch_update(self.store.graph.units[coming])
        self._last_applied = unit.index
        self.store.update(unit, gradients, numbers)

    def discard(self, parcel: Parcel) -> None:
        pass

    def drain(self) -> None:
        pass
