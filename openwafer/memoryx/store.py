"""The store: every Unit's weights and optimizer state as flat arrays in tiers, streamed out and updated in place.

Each Unit owns one flat array per field: `wire` (the weights as they are sent), `remainder` (where the wire is
bf16: what makes it the exact fp32 master) and one per kind of optimizer state. A weight used by several Units
lives with the first; the others are sent the same array.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from openwafer import timeline
from openwafer.graph import Graph, Unit
from openwafer.graph.unit import padded
from openwafer.memoryx.halves import Item, scaled, update_halves
from openwafer.memoryx.optimizer import Optimizer
from openwafer.memoryx.segment import Segment
from openwafer.memoryx.snapshot import Snapshot
from openwafer.memoryx.tier import DramTier, Key, Tier
from openwafer.memoryx.update import UpdateNumbers
from openwafer.memoryx.wire import REMAINDER, WIRE, merge, split

Wire = Literal["fp32", "bf16"]
_DTYPES: dict[Wire, dict[str, torch.dtype]] = {
    "fp32": {WIRE: torch.float32},
    "bf16": {WIRE: torch.bfloat16, REMAINDER: torch.int16},
}


@dataclass(frozen=True)
class FieldSpec:
    """One flat array: what a tier has to hold."""

    key: Key
    num_elements: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


class Store:
    """All Units of one Graph. `tiers` says which tier holds a field, `wire` in which precision weights are sent."""

    def __init__(self, graph: Graph, optimizer: Optimizer, tiers: Mapping[Key, Tier], wire: Wire = "fp32") -> None:
        self.graph = graph
        self.optimizer = optimizer
        self.wire: Wire = wire
        self.segments = layout(graph, optimizer, wire)
        self._tiers = tiers
        for spec in fields(graph, optimizer, wire):
            tiers[spec.key].create(spec.key, spec.num_elements, spec.dtype)

    # Sending weights

    def stream(self, order: Iterable[Unit], ahead: int = 2) -> Iterator[tuple[Unit, dict[str, Tensor]]]:
        """Each Unit of `order` with its weights by name; the weights are valid until the next one is asked for."""
        units = list(order)
        for position, unit in enumerate(units):
            for coming in units[position : position + 1 + ahead]:
                self.prefetch(coming)
            with self.lent(unit) as flats:
                segments = {name: self.segments[name][WIRE] for name in unit.weights}
                yield unit, {name: segment.of(flats[segment.key]) for name, segment in segments.items()}

    def prefetch(self, unit: Unit) -> None:
        """A hint that the Unit's weights will be sent soon."""
        for key in self.wires(unit):
            self._tiers[key].prefetch(key)

    @contextlib.contextmanager
    def lent(self, unit: Unit) -> Iterator[dict[Key, Tensor]]:
        """The flat arrays that hold the Unit's weights, to be read."""
        keys = self.wires(unit)
        flats = {key: self._tiers[key].load(key) for key in keys}
        try:
            yield flats
        finally:
            for key in keys:
                self._tiers[key].release(key, changed=False)

    def is_resident(self, unit: Unit) -> bool:
        """Whether the arrays that hold the Unit's weights stay where they are."""
        return all(self.stays(key) for key in self.wires(unit))

    def wires(self, unit: Unit) -> list[Key]:
        """The flat arrays that hold the Unit's weights; the first is its own, unless it owns none."""
        return list(dict.fromkeys(self.segments[name][WIRE].key for name in unit.weights))

    def borrow(self, key: Key) -> Tensor:
        """A flat array, to be read until `give_back`."""
        return self._tiers[key].load(key)

    def give_back(self, key: Key) -> None:
        self._tiers[key].release(key, changed=False)

    def stays(self, key: Key) -> bool:
        """Whether the array stays where it is after `give_back`."""
        return isinstance(self._tiers[key], DramTier)

    @property
    def tiers(self) -> list[Tier]:
        """The distinct tiers."""
        return list(dict.fromkeys(self._tiers.values()))

    # Arrays that stay in DRAM

    def arrays(self, unit: Unit) -> dict[Key, Tensor]:
        """All arrays of a Unit, which stay in DRAM."""
        return {key: self._tiers[key].load(key) for key in self._keys([w.name for w in self.graph.owned(unit)])}

    def like(self, unit: Unit) -> dict[Key, Tensor]:
        """New arrays of the same kind."""
        return {key: self._dram(key).like(key) for key in self.arrays(unit)}

    def swap(self, arrays: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Put other arrays in the place of those of a Unit; gives the old ones."""
        for key in arrays:
            self._tiers[key].preserve(key)
        return {key: self._dram(key).swap(key, array) for key, array in arrays.items()}

    def _dram(self, key: Key) -> DramTier:
        tier = self._tiers[key]
        assert isinstance(tier, DramTier)
        return tier

    # Updating

    def update(self, unit: Unit, gradients: Mapping[str, Tensor], numbers: UpdateNumbers) -> None:
        """Apply the summed gradients of weights that `unit` owns."""
        with self._open(unit, gradients) as opened, timeline.span(timeline.UPDATE, unit.name):
            halves: list[Item] = []
            for name, gradient in gradients.items():
                parts = dict(opened[name])
                wire, remainder = parts.pop(WIRE), parts.pop(REMAINDER, None)
                if remainder is not None:
                    halves.append(Item(name, wire, remainder, gradient, parts))
                else:
                    mean = scaled(gradient, numbers)
                    self.optimizer.update(name, wire, mean, parts, lr=numbers.lr, step=numbers.step)
            if halves:
                update_halves(self.optimizer, halves, numbers)

    def prefetch_update(self, unit: Unit) -> None:
        """A hint that `update(unit)` comes soon."""
        for key in self._keys([weight.name for weight in self.graph.owned(unit)]):
            self._tiers[key].prefetch(key)

    @contextlib.contextmanager
    def _open(self, unit: Unit, names: Iterable[str]) -> Iterator[dict[str, dict[str, Tensor]]]:
        """All fields of some weights of a Unit, to be changed in place."""
        names = list(names)
        keys = self._keys(names)
        flats = {key: self._load_to_change(key) for key in keys}
        try:
            yield {
                name: {field: segment.of(flats[segment.key]) for field, segment in self.segments[name].items()}
                for name in names
            }
        finally:
            for key in keys:
                self._tiers[key].release(key, changed=True)

    def _keys(self, names: Iterable[str]) -> list[Key]:
        return list(dict.fromkeys(segment.key for name in names for segment in self.segments[name].values()))

    # Whole weights: initial values, checkpoints

    def write(self, name: str, field: str, value: Tensor) -> None:
        """Set one weight (`wire`, given as fp32) or one kind of its state."""
        self.write_all([(name, field, value)])

    def write_all(self, values: Iterable[tuple[str, str, Tensor]]) -> None:
        """Set many (weight, field, value); those of one Unit in a row are written to its tier together."""
        flats: dict[Key, Tensor] = {}
        try:
            for name, field, value in self._parts(values):
                segment = self.segments[name][field]
                if any(key[0] != segment.key[0] for key in flats):
                    self._release_changed(flats)
                if segment.key not in flats:
                    flats[segment.key] = self._load_to_change(segment.key)
                segment.of(flats[segment.key]).copy_(value.reshape(segment.shape))
        finally:
            self._release_changed(flats)

    def _parts(self, values: Iterable[tuple[str, str, Tensor]]) -> Iterator[tuple[str, str, Tensor]]:
        """The values as they are stored: a weight may be kept in two halves."""
        for name, field, value in values:
            if field == WIRE and self.wire == "bf16":
                wire, remainder = split(value.float())
                yield name, WIRE, wire
                yield name, REMAINDER, remainder
            else:
                yield name, field, value

    def _load_to_change(self, key: Key) -> Tensor:
        flat = self._tiers[key].load(key)
        self._tiers[key].preserve(key)
        return flat

    def _release_changed(self, flats: dict[Key, Tensor]) -> None:
        while flats:
            key, _ = flats.popitem()
            self._tiers[key].release(key, changed=True)

    def freeze(self) -> Snapshot:
        """Everything as it is now, to be read by another thread while updates go on."""
        return Snapshot(self.graph, self.segments, self._tiers)

    def read_all(self) -> Iterator[tuple[str, str, Tensor]]:
        """(weight, field, value) of everything, Unit by Unit; each value is valid until the next is asked for.

        The value of `wire` is the fp32 master, whatever is sent.
        """
        for unit in self.graph.units:
            for weight in self.graph.owned(unit):
                parts = self.segments[weight.name]
                for field in parts:
                    if field == WIRE and REMAINDER in parts:
                        with self._read(parts[WIRE]) as wire, self._read(parts[REMAINDER]) as remainder:
                            yield weight.name, WIRE, merge(wire, remainder)
                    elif field != REMAINDER:
                        with self._read(parts[field]) as value:
                            yield weight.name, field, value

    @contextlib.contextmanager
    def _read(self, segment: Segment) -> Iterator[Tensor]:
        flat = self._tiers[segment.key].load(segment.key)
        try:
            yield segment.of(flat)
        finally:
            self._tiers[segment.key].release(segment.key, changed=False)


def layout(graph: Graph, optimizer: Optimizer, wire: Wire = "fp32") -> dict[str, dict[str, Segment]]:
    """For each weight, where each of its fields lies. Frozen weights have no state."""
    segments: dict[str, dict[str, Segment]] = {}
    for unit in graph.units:
        ends: dict[str, int] = {}
        for weight in graph.owned(unit):
            shape = weight.spec.shape
            parts = {field: Segment((unit.index, field), weight.offset, shape) for field in _DTYPES[wire]}
            for field, state_shape in optimizer.state_shapes(shape).items() if weight.requires_grad else ():
                start = ends.get(field, 0)
                parts[field] = Segment((unit.index, field), start, state_shape)
                ends[field] = start + padded(math.prod(state_shape))
            segments[weight.name] = parts
    return segments


def fields(graph: Graph, optimizer: Optimizer, wire: Wire = "fp32") -> list[FieldSpec]:
    """Every flat array of the model, the wires of all Units first."""
    sizes: dict[Key, int] = {}
    for parts in layout(graph, optimizer, wire).values():
        for segment in parts.values():
            end = segment.offset + padded(math.prod(segment.shape))
            sizes[segment.key] = max(sizes.get(segment.key, 0), end)
    ordered = sorted(sizes, key=lambda key: (key[1] != WIRE, key[0], key[1]))
    return [FieldSpec(key, sizes[key], _DTYPES[wire].get(key[1], optimizer.state_dtype)) for key in ordered]
