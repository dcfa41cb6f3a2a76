"""From the workers' parts of a Unit's gradients to the sums that MemoryX applies."""

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from openwafer import timeline
from openwafer.graph import Graph, Unit
from openwafer.swarmx.hub import Hub
from openwafer.swarmx.tree import Node, Parts, combine


class Uses:
    """Adds the uses of each weight in reverse Unit order; a tied weight has several."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._pending: dict[str, Tensor] = {}

    def add(self, unit: Unit, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Takes the sums of one Unit's uses; gives the finished gradients of the weights that it owns."""
        for name, use in sums.items():
            self._pending[name] = self._pending[name].float() + use if name in self._pending else use
        owned = [weight.name for weight in self._graph.owned(unit)]
        return {name: self._pending.pop(name) for name in owned if name in self._pending}


def reduce(total: int, workers: Iterable[Mapping[str, Parts]]) -> dict[str, Tensor]:
    """The sum of each weight's gradient over all `total` micro-batches, from every worker's subtrees."""
    parts: dict[str, dict[Node, Tensor]] = {}
    for worker in workers:
        for name, of_weight in worker.items():
            parts.setdefault(name, {}).update(of_weight)
    # A sum that is one part is still where it arrived, and the next Unit's will arrive there too.
    return {
        name: combine(total, of_weight) if len(of_weight) > 1 else next(iter(of_weight.values())).clone()
        for name, of_weight in parts.items()
    }


def collected(hub: Hub, total: int) -> Iterator[tuple[Unit, dict[str, Tensor]]]:
    """Casts the Units in reverse and gives each with the finished sums of gradients of the weights it owns."""
    graph = hub.store.graph
    hub.expect(total)
    hub.cast(graph.units[::-1])
    uses = Uses(graph)
    for unit in reversed(graph.units):
        with timeline.span(timeline.WORKERS, f"backward {unit.name}"), hub.collect(unit) as shares:
            sums = reduce(total, shares)
        yield unit, uses.add(unit, sums)
