"""How much device memory a step takes: measured on the device for each distinct Unit, added up for the whole.

What a Unit needs while it runs cannot be told from its shapes alone (workspaces, what autograd keeps), so each
distinct function runs once, forward and backward, on zeros.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from openwafer.errors import UserError
from openwafer.graph import Graph, Unit
from openwafer.graph.run import backward_unit, forward_unit, needs_gradient
from openwafer.memoryx.placement import shown

_MARGIN = 0.03  # for what the allocator cannot use between blocks
_GRADIENTS = 3  # of Units: one being made, one on its way out, one that waits for a buffer


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of device memory at the worst moment of a step."""

    weight_bytes: int  # slots that Units' weights arrive in
    gradient_bytes: int  # of weights: sums over micro-batches, and those on their way out
    activation_bytes: int  # between Units, of all micro-batches
    working_bytes: int  # inside the Unit that needs most

    @property
    def total_bytes(self) -> int:
        parts = self.weight_bytes + self.gradient_bytes + self.activation_bytes + self.working_bytes
        return math.ceil(parts * (1 + _MARGIN))

    def __str__(self) -> str:
        return (
            f"device memory: {shown(self.total_bytes)} = weights {shown(self.weight_bytes)}, gradients "
            f"{shown(self.gradient_bytes)}, activations {shown(self.activation_bytes)}, inside a Unit "
            f"{shown(self.working_bytes)}, margin {_MARGIN:.0%}"
        )


def measure(
    graph: Graph,
    num_micro_batches: int,
    num_slots: int,
    device: torch.device,
    *,
    recompute: bool = True,
    num_parts: int | None = None,
) -> Footprint:
    """Runs each distinct Unit on `device`; a Unit that does not fit there at all raises UserError.

    `num_parts`: of a worker among several, the fp32 sums in which each gradient leaves.
    """
    units = {unit.function: unit for unit in reversed(graph.units)}
    working = max(_working_bytes(graph, unit, device) for unit in units.values())
    return footprint_of(graph, num_micro_batches, num_slots, working, recompute=recompute, num_parts=num_parts)


def footprint_of(
    graph: Graph,
    num_micro_batches: int,
    num_slots: int,
    working_bytes: int,
    *,
    recompute: bool = True,
    num_parts: int | None = None,
) -> Footprint:
    """As `measure`, given what is needed inside the Unit that needs most."""
    # As the inbox does: a Unit that uses weights of several owners takes a slot for each.
    owner = {weight.name: unit.index for unit in graph.units for weight in graph.owned(unit)}
    num_slots = max([num_slots, *(len({owner[name] for name in unit.weights}) + 1 for unit in graph.units)])
    itemsize = max((weight.spec.dtype.itemsize for weight in graph.weights.values()), default=4)
    largest = max(graph.flat_elements(unit) for unit in graph.units)
    sums = 0
    if num_micro_batches > 1:  # fp32 partial sums along the tree, and the leaf that is added
        sums = 4 * largest * (num_micro_batches.bit_length() + 1)
    leaving = _GRADIENTS * largest * (4 if sums else itemsize)
    if num_parts is not None:  # sums of earlier parts stay until the last; those of two Units are on their way out
        sums += 4 * largest * num_parts
        leaving = 2 * 4 * largest * num_parts
    kept = sum(spec.num_bytes for spec in graph.values.values())
    if not recompute:
        kept += sum(unit.function.cost.saved_bytes for unit in graph.units)
    in_flight = max((spec.num_bytes for spec in graph.values.values()), default=0)  # gradient of a value
    return Footprint(
        weight_bytes=num_slots * largest * itemsize,
        gradient_bytes=sums + leaving,
        activation_bytes=num_micro_batches * (kept + in_flight),
        working_bytes=working_bytes,
    )


def _working_bytes(graph: Graph, unit: Unit, device: torch.device) -> int:
    """Beyond the Unit's inputs, weights and the gradients of its outputs."""

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    try:
        weights = {n: zeros(graph.weights[n].spec.shape, graph.weights[n].spec.dtype) for n in unit.weights}
        buffers = {
            n: graph.constants[n].to(device) if n in graph.constants else zeros(s.shape, s.dtype)
            for n, s in graph.buffers.items()
            if n in unit.buffers
        }
        values = {n: zeros(graph.values[n].shape, graph.values[n].dtype) for n in unit.inputs}
        wanted = needs_gradient(graph)
        gradients = {
            n: zeros(graph.values[n].shape, graph.values[n].dtype)
            for n in unit.outputs
            if n in wanted and n in graph.values
        }
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        forward_unit(unit, weights, buffers, values)
        backward_unit(graph, unit, weights, buffers, values, gradients)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    except torch.OutOfMemoryError:
        _, total = torch.cuda.mem_get_info(device)
        raise UserError(
            f"Unit {unit.name!r} alone needs more than the {shown(total)} of the device for one micro-batch: "
            "give a smaller --micro_batch_size"
        ) from None
    finally:
        torch.cuda.empty_cache()
