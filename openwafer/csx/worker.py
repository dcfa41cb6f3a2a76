"""One worker: forward and backward, one Unit at a time, over all micro-batches (the vertical order).

A Unit's weights pass through once per direction. Activations between Units stay; inside a Unit they are
recomputed in backward, or kept. Gradients leave as soon as a Unit is done.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from openwafer import timeline
from openwafer.csx.loss import LossNames, find_loss
from openwafer.csx.tree import TreeSum
from openwafer.errors import UserError
from openwafer.graph import Graph, Unit
from openwafer.graph.kept import KeptUnit
from openwafer.graph.randomness import seed_of, set_seed
from openwafer.graph.run import backward_unit, bind_inputs, forward_unit
from openwafer.memoryx.fetch import fetched

MicroBatch = Mapping[str, Any]  # keyword arguments of the model's forward
Weights = Mapping[str, Tensor]
Stream = Callable[[Iterable[Unit]], Iterator[tuple[Unit, Weights]]]


@dataclass(eq=False)
class Pass:
    """What stays on the worker between forward and backward of one step."""

    step: int
    values: list[dict[str, Tensor]]  # per micro-batch: every value that backward will need
    buffers: list[dict[int, dict[str, Tensor]]]  # per micro-batch and Unit: buffers as the Unit saw them
    kept: list[dict[int, KeptUnit]] = field(default_factory=list)  # likewise, where nothing is recomputed
    updates: dict[str, Tensor] = field(default_factory=dict)  # buffers after the step
    loss: float = 0.0  # mean over the global batch
    divisor: int = 0  # what gradients are divided by


class Worker:
    """Computes gradients of a Graph for one global batch."""

    def __init__(self, graph: Graph, seed: int, *, recompute: bool = True) -> None:
        """`recompute`: what is inside a Unit is computed again in backward rather than kept; the same bits."""
        self.graph = graph
        self.seed = seed
        self.recompute = recompute
        self.loss: LossNames = find_loss(graph)

    def forward(
        self, stream: Stream, micro_batches: Sequence[MicroBatch], buffers: Mapping[str, Tensor], step: int
    ) -> Pass:
        """All Units in order; `step` counts updates done before this one."""
        state = {**self.graph.constants, **buffers}
        done = Pass(
            step=step,
            values=[bind_inputs(self.graph, (), dict(micro_batch)) for micro_batch in micro_batches],
            buffers=[{} for _ in micro_batches],
            kept=[{} for _ in micro_batches],
        )
        for unit, weights in stream(self.graph.units):
            with timeline.span(_lane(done), f"forward {unit.name}"):
                for index, values in enumerate(done.values):
                    outputs, changed = self._forward_unit(unit, weights, state, done, index)
                    values.update(zip(unit.outputs, outputs, strict=True))
                    done.updates.update(zip(unit.updated_buffers, changed, strict=True))
                    state.update(done.updates)
        self._sum_loss(done)
        return done

    def _forward_unit(
        self, unit: Unit, weights: Weights, state: Mapping[str, Tensor], done: Pass, index: int
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """One Unit on one micro-batch, remembering what backward needs. Returns (outputs, updated buffers)."""
        seen = {name: state[name] for name in unit.buffers}
        values, seeder = done.values[index], self._seeder(done.step, index)
        if self.recompute:
            done.buffers[index][unit.index] = seen
            return forward_unit(unit, weights, seen, values, seeder)
        kept = KeptUnit(self.graph, unit, weights, seen, values, seeder)
        done.kept[index][unit.index] = kept
        return kept.outputs, kept.changed

    def backward(self, stream: Stream, done: Pass, scale: float = 1.0) -> Iterator[tuple[Unit, dict[str, Tensor]]]:
        """All Units in reverse: yields each with the finished sums of gradients of the weights it owns.

        The sums are fp32, or the compute type when there is one micro-batch and so nothing to sum. The loss is
        multiplied by `scale` (a power of two) on the way, and so are the sums.
        """
        head = self.loss.loss
        gradients = [{head: torch.full_like(values[head], scale)} for values in done.values]
        pending: dict[str, Tensor] = {}
        for unit, weights in stream(reversed(self.graph.units)):
            with timeline.span(_lane(done), f"backward {unit.name}"):
                for name, use in self._backward_unit(unit, weights, done, gradients).items():
                    pending[name] = pending[name].float() + use if name in pending else use
            owned = [weight.name for weight in self.graph.owned(unit)]
            yield unit, {name: pending.pop(name) for name in owned if name in pending}

    def _backward_unit(
        self, unit: Unit, weights: Weights, done: Pass, gradients: Sequence[dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """One Unit on all micro-batches: the sums of the gradients of its uses of weights."""
        sums: dict[str, TreeSum] = {}
        for index, values in enumerate(done.values):
            if self.recompute:
                buffers, seeder = done.buffers[index].pop(unit.index), self._seeder(done.step, index)
                of_weights, of_values = backward_unit(
                    self.graph, unit, weights, buffers, values, gradients[index], seeder
                )
            else:
                of_weights, of_values = done.kept[index].pop(unit.index).backward(weights, gradients[index])
            for name, gradient in of_weights.items():
                leaf = gradient if len(done.values) == 1 else gradient.float()
                sums.setdefault(name, TreeSum()).add(leaf)
            self._hand_back(unit, values, gradients[index], of_values)
        return {name: total.total() for name, total in sums.items()}

    def _hand_back(
        self, unit: Unit, values: dict[str, Tensor], gradients: dict[str, Tensor], of_values: dict[str, Tensor]
    ) -> None:
        """Passes gradients to earlier Units and drops what no earlier Unit needs."""
        for name, gradient in of_values.items():
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
        for name in unit.outputs:
            gradients.pop(name, None)
            values.pop(name, None)

    def _sum_loss(self, done: Pass) -> None:
        losses = fetched(torch.stack([values[self.loss.loss] for values in done.values])).tolist()
        count = self.loss.count
        if count is None:
            done.divisor = len(losses)
        else:
            done.divisor = sum(fetched(torch.stack([values[count] for values in done.values])).tolist())
        if done.divisor == 0:
            raise UserError(f"step {done.step + 1}: the batch has no label to learn from (count 0)")
        done.loss = math.fsum(losses) / done.divisor

    def _seeder(self, step: int, micro_batch: int) -> Callable[[Unit], None]:
        def seeder(unit: Unit) -> None:
            set_seed(seed_of(self.seed, step, micro_batch, unit.index))

        return seeder


def _lane(done: Pass) -> str:
    """On a GPU the host only launches: what it computes is measured there."""
    is_host = all(value.device.type == "cpu" for values in done.values[:1] for value in values.values())
    return timeline.COMPUTE if is_host else timeline.LAUNCH
