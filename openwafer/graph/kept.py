"""A Unit that ran forward with autograd and keeps what its backward needs, but never a weight.

Weights pass through: the memory they had in forward holds another Unit's by the time backward comes. So where autograd
saves a weight, or a view of one, only its name and place are kept, and backward reads it from the weights as they
are streamed again.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from openwafer.graph.run import Seeder, Tensors, leaves_of, pull_back
from openwafer.graph.unit import Graph, Unit


class KeptUnit:
    """One Unit's forward for one micro-batch. `backward` may be called once."""

    def __init__(
        self, graph: Graph, unit: Unit, weights: Tensors, buffers: Tensors, values: Tensors, seed: Seeder | None = None
    ) -> None:
        """Runs the Unit. Afterwards `outputs` and `changed` (updated buffers) have no history."""
        if seed is not None and unit.function.is_random:
            seed(unit)
        self._unit = unit
        self._places = _Places(unit, weights)
        self._leaves, self._inputs = leaves_of(graph, unit, weights, values)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(self._places.pack, self._places.unpack):
            self._results, changed = unit.function(
                list(self._leaves.values()), [buffers[name] for name in unit.buffers], list(self._inputs.values())
            )
        self.outputs = tuple(result.detach() for result in self._results)
        self.changed = tuple(buffer.detach() for buffer in changed)
        self._places.weights = {}
        for leaf in self._leaves.values():
            # Autograd's nodes hold the leaves; one without memory still says where its gradient goes.
            leaf.data = torch.empty(0, dtype=leaf.dtype, device=leaf.device)

    def backward(self, weights: Tensors, gradients: Tensors) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The gradients of this Unit's uses of its weights, and of its inputs, given those of its outputs."""
        self._places.weights = weights
        try:
            return pull_back(self._unit, self._leaves, self._inputs, self._results, gradients)
        finally:
            self._places.weights = {}


@dataclass(frozen=True)
class _View:
    """Part of a weight's memory, from `offset` elements behind the weight's first on."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Places:
    """What autograd calls to save and to read a tensor.

    It knows no tensor but the weights of the moment: autograd's graph holds it, so a way back to the graph would be a
    cycle that nothing ever frees.
    """

    def __init__(self, unit: Unit, weights: Tensors) -> None:
        self.weights = weights  # empty between forward and backward
        self._starts: dict[int, dict[str, int]] = {}  # memory → where in it each weight starts
        for name in unit.weights:
            memory = weights[name].untyped_storage().data_ptr()
            self._starts.setdefault(memory, {})[name] = int(weights[name].storage_offset())

    def pack(self, tensor: Tensor) -> Tensor | _View:
        starts = self._starts.get(tensor.untyped_storage().data_ptr()) if tensor.layout == torch.strided else None
        if starts is None:
            return tensor.detach()  # a result that its own node saves would hold that node
        offset = tensor.storage_offset()
        before = [name for name, start in starts.items() if start <= offset]
        name = max(before or starts, key=starts.__getitem__)
        if tensor.dtype != self.weights[name].dtype:
            return tensor.clone()  # the memory read as another type: too rare to have a place
        return _View(name, tuple(tensor.shape), tuple(tensor.stride()), int(offset) - starts[name])

    def unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        weight = self.weights[packed.name].detach()
        return weight.as_strided(packed.size, packed.stride, weight.storage_offset() + packed.offset)
