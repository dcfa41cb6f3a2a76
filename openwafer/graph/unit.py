"""What a Unit is: the stateless piece of a model that is streamed, and the Graph that orders the Units.

A Unit's function maps `(weights, buffers, activations)` to activations and updated buffers. Units with the same
code share one `UnitFunction` object, so it is compiled once. Values between Units have names; a Unit reads
some and defines others, and the executor drops a value after its last reader.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from openwafer.graph.code_parcel import CodeParcel

# Segments of a flat buffer start at multiples of this many elements: vector tails then never straddle two
# weights, so an optimizer kernel run over the flat buffer rounds exactly as when run weight by weight.
SEGMENT_ELEMENTS = 16


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of a tensor that may not exist yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def num_elements(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class WeightSpec:
    """One weight of the model: where it lives, and whether it is trained."""

    name: str
    spec: TensorSpec
    requires_grad: bool
    owner: int  # index of the Unit whose flat buffer holds it: the first that uses it
    offset: int  # first element in the owner's flat buffer, a multiple of SEGMENT_ELEMENTS


@dataclass(frozen=True)
class Cost:
    """What one call of a Unit's function takes, for the captured shapes."""

    forward_flops: int
    backward_flops: int
    saved_bytes: int  # activations kept for backward when nothing is recomputed


@dataclass(frozen=True, eq=False)
class UnitFunction:
    """The shared code of identical Units.

    `code` takes weights, buffers and inputs as positional tensors, in that order, and returns a tuple of
    outputs. Buffers at the positions `updated_buffers` are changed in place by `code`, so callers pass copies.
    """

    index: int
    code: fx.GraphModule
    num_weights: int
    num_buffers: int
    updated_buffers: tuple[int, ...]
    is_random: bool
    cost: Cost

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "code": CodeParcel.of(self.code)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, code=state["code"].code())

    def __call__(
        self, weights: Sequence[Tensor], buffers: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns (outputs, new values of the updated buffers)."""
        own = list(buffers)
        for position in self.updated_buffers:
            own[position] = own[position].clone()
        device = inputs[0].device if inputs else (weights[0].device if weights else torch.device("cpu"))
        outputs = self._code_on(device)(*weights, *own, *inputs)
        return tuple(outputs), tuple(own[position] for position in self.updated_buffers)

    def _code_on(self, device: torch.device) -> Callable[..., Any]:
        return self.code if device.type == "cpu" else _moved(self.code, device)


@functools.lru_cache(maxsize=64)
def _moved(code: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """A copy of captured code in which every tensor that the code itself creates lands on `device`."""
    module = fx.GraphModule(code, fx.Graph())
    module.graph = fx.Graph()
    module.graph.output(module.graph.graph_copy(code.graph, {}))
    for node in module.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
        node.args = tuple(device if isinstance(arg, torch.device) else arg for arg in node.args)
        if node.op == "get_attr" and isinstance(getattr(code, str(node.target), None), fx.GraphModule):
            setattr(module, str(node.target), _moved(getattr(code, str(node.target)), device))
    module.recompile()
    return module


@dataclass(frozen=True, eq=False)
class Unit:
    """One step of the model: a shared function bound to its own weights, buffers and values."""

    index: int
    name: str
    function: UnitFunction
    weights: tuple[str, ...]
    buffers: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def updated_buffers(self) -> tuple[str, ...]:
        return tuple(self.buffers[position] for position in self.function.updated_buffers)


@dataclass(frozen=True, eq=False)
class Graph:
    """The ordered Units of a model, with every weight, buffer and value they name."""

    units: tuple[Unit, ...]
    weights: dict[str, WeightSpec]
    buffers: dict[str, TensorSpec]
    values: dict[str, TensorSpec]
    inputs: tuple[str | None, ...]  # value name of each tensor among the flattened inputs; None if never read
    outputs: tuple[Any, ...]  # leaves of the result: `Value` for a tensor, anything else as it is
    output_tree: Any  # torch pytree spec that puts the leaves back together
    constants: dict[str, Tensor] = field(default_factory=dict)  # buffers that are no state: literals of the code

    @property
    def functions(self) -> tuple[UnitFunction, ...]:
        """The distinct functions, in order of first use."""
        return tuple({unit.function: None for unit in self.units})

    @property
    def num_parameters(self) -> int:
        return sum(weight.spec.num_elements for weight in self.weights.values())

    def owned(self, unit: Unit) -> tuple[WeightSpec, ...]:
        """The weights in this Unit's flat buffer, in layout order."""
        return tuple(self.weights[name] for name in unit.weights if self.weights[name].owner == unit.index)

    def flat_elements(self, unit: Unit) -> int:
        """Length of the Unit's flat buffer, each segment padded."""
        return sum(padded(weight.spec.num_elements) for weight in self.owned(unit))

    def last_use(self) -> dict[str, int]:
        """For each value, the index of the last Unit that reads it."""
        return {name: unit.index for unit in self.units for name in unit.inputs}


@dataclass(frozen=True)
class Value:
    """A tensor among the leaves of a Graph's result."""

    name: str


def padded(num_elements: int) -> int:
    """`num_elements` rounded up to a whole number of segments."""
    return -(-num_elements // SEGMENT_ELEMENTS) * SEGMENT_ELEMENTS
