"""A store as it was at one moment, read by one thread while another goes on training."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from openwafer.graph import Graph
from openwafer.memoryx.segment import Segment
from openwafer.memoryx.tier import Key, Tier
from openwafer.memoryx.wire import REMAINDER, WIRE, merge_into

PIECE_BYTES = 8 << 20  # what is copied or joined on the way is read in pieces of this
_PIECE = PIECE_BYTES // 4  # elements, of at most 4 bytes


class Snapshot:
    """Every field of every weight. It must be closed; there is one at a time.

    A weight that is kept in two halves comes as the fp32 master: the halves are read together, so that both
    arrays are given back together, and from whichever tiers they are in.
    """

    def __init__(self, graph: Graph, segments: Mapping[str, Mapping[str, Segment]], tiers: Mapping[Key, Tier]) -> None:
        self._tiers = tiers
        self._left: dict[Key, list[tuple[str, Segment]]] = {}  # of what is not read yet
        self._remainders: dict[str, Segment] = {}  # of the weights that have one
        for unit in graph.units:
            for weight in graph.owned(unit):
                parts = dict(segments[weight.name])
                if REMAINDER in parts:
                    self._remainders[weight.name] = parts.pop(REMAINDER)
                for segment in parts.values():
                    self._left.setdefault(segment.key, []).append((weight.name, segment))
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._distinct = list(dict.fromkeys(tiers.values()))
        for tier in self._distinct:
            tier.freeze()

    def read_all(self, *, in_order: bool = False) -> Iterator[tuple[str, str, Tensor]]:
        """(weight, field, value) of everything, once; each value is valid until the next is asked for.

        `in_order`: sorted by Unit and field, the weights of a Unit in its own order; training may wait longer then.
        """
        while self._left:
            key = min(self._left) if in_order else self._next()
            read = {key}
            for name, segment in self._left.pop(key):
                remainder = self._remainders.get(name) if key[1] == WIRE else None
                if remainder is None:
                    yield name, key[1], self._value(segment)
                else:
                    read.add(remainder.key)
                    yield name, key[1], self._master(segment, remainder)
            for done in read:
                self._tiers[done].drop_frozen(done)

    def _next(self) -> Key:
        """What a tier would have read now, because training is about to change it; else the first."""
        for tier in self._distinct:
            keys = [key for key in self._left if self._tiers[key] is tier]
            if keys and (picked := tier.pick(keys)) is not None:
                return picked
        return next(iter(self._left))

    def _value(self, segment: Segment) -> Tensor:
        tier, count = self._tiers[segment.key], segment.num_elements
        first = tier.read_frozen(segment.key, segment.offset, count if tier.reads_in_place else min(count, _PIECE))
        if len(first) == count:
            return first.view(segment.shape)
        value = self._room(count, first.dtype)
        value[: len(first)] = first
        for start in range(len(first), count, _PIECE):
            length = min(_PIECE, count - start)
            value[start : start + length] = tier.read_frozen(segment.key, segment.offset + start, length)
        return value.view(segment.shape)

    def _master(self, wire: Segment, remainder: Segment) -> Tensor:
        """Joined piece by piece: a tier's buffer holds one piece of one half at a time."""
        master = self._room(wire.num_elements, torch.float32)
        for start in range(0, wire.num_elements, _PIECE):
            piece = master[start : start + _PIECE]
            halves = (
                self._tiers[half.key].read_frozen(half.key, half.offset + start, len(piece))
                for half in (wire, remainder)
            )
            merge_into(piece, halves)
        return master.view(wire.shape)

    def _room(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """One buffer for all: the value before is not needed any more."""
        num_bytes = num_elements * dtype.itemsize
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffer[:num_bytes].view(dtype)

    def close(self) -> None:
        """Give back what the old content takes up."""
        for tier in self._distinct:
            tier.thaw()
