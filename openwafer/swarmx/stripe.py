"""Every Unit in stripes over several stores: each holds a run of each weight.

Runs start at multiples of the blocks that the global norm is summed over, so that neither the norm nor an optimizer
kernel that goes through a weight element by element notices. An optimizer that needs a weight as a whole (Adafactor,
whose state are sums over rows and columns) gets whole weights: each then has one of the stores as its home.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from openwafer.errors import UserError
from openwafer.graph import Graph
from openwafer.graph.unit import TensorSpec, Unit, padded
from openwafer.kernels.squares import BLOCK_ELEMENTS
from openwafer.memoryx.optimizer import Optimizer


@dataclass(frozen=True, eq=False)
class Stripe:
    """One store's part of a graph."""

    graph: Graph  # only this part: pieces in place of weights, under the same names
    ranges: dict[str, range]  # the elements of each weight that it holds, if any
    wholes: frozenset[str]  # the weights of which it holds everything

    def cut(self, name: str, value: Tensor) -> Tensor:
        """This store's piece of a weight, or of state that has an element per element of the weight."""
        if name in self.wholes:
            return value
        piece = self.ranges[name]
        return value.reshape(-1)[piece.start : piece.stop].view(self.graph.weights[name].spec.shape)


def stripes(graph: Graph, optimizer: Optimizer, num_stores: int) -> list[Stripe]:
    """The parts of all stores."""
    if num_stores == 1:
        whole = {name: range(weight.spec.num_elements) for name, weight in graph.weights.items()}
        return [Stripe(graph, whole, frozenset(whole))]
    ranges: list[dict[str, range]] = [{} for _ in range(num_stores)]
    loads = [0] * num_stores
    for unit in graph.units:
        for weight in graph.owned(unit):
            size = weight.spec.num_elements
            cuts = _cuts(size, loads) if _is_elementwise(optimizer, weight.spec.shape) else _home(size, loads)
            for store, piece in enumerate(cuts):
                if len(piece):
                    ranges[store][weight.name] = piece
                    loads[store] += len(piece)
    return [Stripe(_part(graph, of_store), of_store, _wholes(graph, of_store)) for of_store in ranges]


def _wholes(graph: Graph, ranges: dict[str, range]) -> frozenset[str]:
    return frozenset(name for name, piece in ranges.items() if len(piece) == graph.weights[name].spec.num_elements)


def check_stripes(graph: Graph, num_stores: int) -> None:
    """Each store needs something to hold."""
    blocks = sum(-(-weight.spec.num_elements // BLOCK_ELEMENTS) for weight in graph.weights.values())
    if num_stores > blocks:
        raise UserError(
            f"num_memoryx {num_stores} is more than the {blocks} blocks of {BLOCK_ELEMENTS:,} weights that the model "
            f"has: use at most num_memoryx {blocks}"
        )


def _cuts(size: int, loads: list[int]) -> list[range]:
    """Whole blocks for all stores alike; those that hold least so far get one more where it does not come out even."""
    blocks = -(-size // BLOCK_ELEMENTS)
    num_stores = len(loads)
    order = sorted(range(num_stores), key=lambda store: (loads[store], store))
    counts = [0] * num_stores
    for rank, store in enumerate(order):
        counts[store] = blocks // num_stores + (rank < blocks % num_stores)
    pieces, start = [], 0
    for count in counts:
        stop = min(start + count * BLOCK_ELEMENTS, size)
        pieces.append(range(start, max(start, stop)))
        start = max(start, stop)
    return pieces


def _home(size: int, loads: list[int]) -> list[range]:
    home = loads.index(min(loads))
    return [range(size if store == home else 0) for store in range(len(loads))]


def _is_elementwise(optimizer: Optimizer, shape: tuple[int, ...]) -> bool:
    return all(state == shape for state in optimizer.state_shapes(shape).values())


def _part(graph: Graph, ranges: dict[str, range]) -> Graph:
    """The graph with pieces for weights; its Units cannot be run, only stored, sent and updated."""
    weights = {}
    units: list[Unit] = []
    for unit in graph.units:
        offset = 0
        for weight in graph.owned(unit):
            if weight.name not in ranges:
                continue
            shape, size = weight.spec.shape, len(ranges[weight.name])
            if size != weight.spec.num_elements:  # a piece of a matrix stays one: matrices are decayed
                shape = (size,) if len(shape) < 2 else (1, size)
            spec = TensorSpec(shape, weight.spec.dtype)
            weights[weight.name] = dataclasses.replace(weight, spec=spec, offset=offset)
            offset += padded(size)
        units.append(dataclasses.replace(unit, weights=tuple(name for name in unit.weights if name in ranges)))
    return dataclasses.replace(graph, units=tuple(units), weights=weights)


def cut_values(stripe: Stripe, values: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """This store's pieces of weights given by name."""
    yield from ((name, stripe.cut(name, value)) for name, value in values if name in stripe.ranges)


def cut_reader(stripe: Stripe, read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """Reads tensors of a checkpoint, `weights/NAME` or `optimizer/KIND/NAME`, cut to this store's pieces."""

    def read_piece(name: str) -> Tensor:
        weight = name.split("/", 1)[1] if name.startswith("weights/") else name.split("/", 2)[2]
        return stripe.cut(weight, read(name))

    return read_piece
