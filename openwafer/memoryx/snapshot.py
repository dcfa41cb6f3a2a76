"""A store as it was at one moment, read by one thread while another goes on training."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from openwafer.graph import Graph
from openwafer.memoryx.segment import Segment
from openwafer.memoryx.tier import Key, Tier


class Snapshot:
    """Every field of every weight. It must be closed; there is one at a time."""

    def __init__(self, graph: Graph, segments: Mapping[str, Mapping[str, Segment]], tiers: Mapping[Key, Tier]) -> None:
        self._tiers = tiers
        self._left: dict[Key, list[tuple[str, Segment]]] = {}  # in the order of the next updates: the last Unit first
        for unit in reversed(graph.units):
            for weight in graph.owned(unit):
                for segment in segments[weight.name].values():
                    self._left.setdefault(segment.key, []).append((weight.name, segment))
        self._distinct = list(dict.fromkeys(tiers.values()))
        for tier in self._distinct:
            tier.freeze()

    def read_all(self) -> Iterator[tuple[str, str, Tensor]]:
        """(weight, field, value) of everything, once; each value is valid until the next is asked for."""
        while self._left:
            key = self._next()
            tier = self._tiers[key]
            for name, segment in self._left.pop(key):
                yield name, key[1], tier.read_frozen(key, segment.offset, segment.num_elements).view(segment.shape)
            tier.drop_frozen(key)

    def _next(self) -> Key:
        """What training waits for or has made a copy of, else what it will change next."""
        for tier in self._distinct:
            for key in tier.kept():
                if key in self._left:
                    return key
        return next(iter(self._left))

    def close(self) -> None:
        """Give back what the old content takes up."""
        for tier in self._distinct:
            tier.thaw()
