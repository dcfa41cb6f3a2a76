"""Runs Units in order, forward and backward: the plain executor that the streaming engine must agree with.

Weights, buffers and values are dicts by name. Nothing here knows where weights live.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from openwafer.errors import UserError
from openwafer.graph.recorder import distinct_tensors
from openwafer.graph.unit import Graph, Unit, Value

Tensors = Mapping[str, Tensor]
# Called with a Unit before its code runs, in forward and again before backward: sets the random state.
Seeder = Callable[[Unit], None]


def bind_inputs(graph: Graph, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """The named values that a call with these inputs starts from; shapes must be the captured ones."""
    tensors = distinct_tensors((args, kwargs or {}))
    if len(tensors) != len(graph.inputs):
        raise UserError(f"the model was captured with {len(graph.inputs)} input tensors, got {len(tensors)}")
    values = {}
    for name, tensor in zip(graph.inputs, tensors, strict=True):
        if name is None:
            continue
        spec = graph.values[name]
        if tensor.dtype == torch.float32 and spec.dtype.is_floating_point:
            tensor = tensor.to(spec.dtype)  # captured in another precision, as `capture(dtype=...)` does
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise UserError(
                f"input {name!r} was captured as {spec.dtype} {list(spec.shape)}, "
                f"got {tensor.dtype} {list(tensor.shape)}: capture again for this shape"
            )
        values[name] = tensor
    return values


def result_of(graph: Graph, values: Tensors) -> Any:
    """The model's result, put together as the original module returns it."""
    leaves = [values[leaf.name] if isinstance(leaf, Value) else leaf for leaf in graph.outputs]
    return pytree.tree_unflatten(leaves, graph.output_tree)


def forward(
    graph: Graph, weights: Tensors, buffers: Tensors, values: Tensors, seed: Seeder | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Every Unit in order. Returns all named values (activations are kept) and the updated buffers."""
    kept = dict(values)
    current = {**graph.constants, **buffers}
    updates: dict[str, Tensor] = {}
    for unit in graph.units:
        outputs, changed = forward_unit(unit, weights, current, kept, seed)
        kept.update(zip(unit.outputs, outputs, strict=True))
        updates.update(zip(unit.updated_buffers, changed, strict=True))
        current.update(updates)
    return kept, updates


def forward_unit(
    unit: Unit, weights: Tensors, buffers: Tensors, values: Tensors, seed: Seeder | None = None
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """One Unit without autograd. Returns (outputs, updated buffers)."""
    if seed is not None and unit.function.is_random:
        seed(unit)
    with torch.no_grad():
        return unit.function(
            [weights[name] for name in unit.weights],
            [buffers[name] for name in unit.buffers],
            [values[name] for name in unit.inputs],
        )


def backward_unit(
    graph: Graph,
    unit: Unit,
    weights: Tensors,
    buffers: Tensors,
    values: Tensors,
    gradients: Tensors,
    seed: Seeder | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Recomputes one Unit with autograd and pulls the gradients of its outputs back through it.

    `gradients` holds the gradient of each output value that has one; `buffers` must be as they were before the
    forward. Returns the gradients of this Unit's uses of its weights, and of its input values.
    """
    if seed is not None and unit.function.is_random:
        seed(unit)
    leaves, inputs = leaves_of(graph, unit, weights, values)
    with torch.enable_grad():
        outputs, _ = unit.function(
            list(leaves.values()), [buffers[name] for name in unit.buffers], list(inputs.values())
        )
    return pull_back(unit, leaves, inputs, outputs, gradients)


def leaves_of(
    graph: Graph, unit: Unit, weights: Tensors, values: Tensors
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A Unit's weights and inputs as leaves of a new autograd graph."""
    wanted = needs_gradient(graph)
    return (
        {name: weights[name].detach().requires_grad_(graph.weights[name].requires_grad) for name in unit.weights},
        {name: values[name].detach().requires_grad_(name in wanted) for name in unit.inputs},
    )


def pull_back(
    unit: Unit, leaves: Tensors, inputs: Tensors, outputs: Sequence[Tensor], gradients: Tensors
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of `leaves` and of `inputs` from those of the outputs that were computed from them."""
    heads = [(o, gradients[n]) for n, o in zip(unit.outputs, outputs, strict=True) if n in gradients]
    heads = [(output, gradient) for output, gradient in heads if output.requires_grad]
    sources = {n: t for n, t in [*leaves.items(), *inputs.items()] if t.requires_grad}
    if not heads or not sources:
        return {}, {}
    found = torch.autograd.grad(
        [output for output, _ in heads], list(sources.values()), [g for _, g in heads], allow_unused=True
    )
    named = {name: g for name, g in zip(sources, found, strict=True) if g is not None}
    # Laid out as the weights are: optimizer kernels go through both without looking at strides.
    return (
        {name: g.contiguous() for name, g in named.items() if name in leaves},
        {name: g for name, g in named.items() if name in inputs},
    )


def backward(
    graph: Graph,
    weights: Tensors,
    buffers: Tensors,
    values: Tensors,
    heads: Tensors,
    seed: Seeder | None = None,
) -> list[dict[str, Tensor]]:
    """All Units in reverse. Returns, per Unit, the gradients of that Unit's uses of its weights.

    `values` are those kept by `forward`, `heads` the gradients of the result's tensors. A value read by several
    Units gets its contributions added in reverse Unit order.
    """
    current = {**graph.constants, **buffers}
    gradients = dict(heads)
    uses: list[dict[str, Tensor]] = [{} for _ in graph.units]
    for unit in reversed(graph.units):
        of_weights, of_values = backward_unit(graph, unit, weights, current, values, gradients, seed)
        uses[unit.index] = of_weights
        for name, gradient in of_values.items():
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
        for name in unit.outputs:
            gradients.pop(name, None)
    return uses


@functools.lru_cache(maxsize=8)
def needs_gradient(graph: Graph) -> frozenset[str]:
    """The values that a trained weight influences: floating point, and downstream of one."""
    names: set[str] = set()
    for unit in graph.units:
        is_trained = any(graph.weights[name].requires_grad for name in unit.weights)
        if is_trained or any(name in names for name in unit.inputs):
            names.update(name for name in unit.outputs if graph.values[name].dtype.is_floating_point)
    return frozenset(names)
