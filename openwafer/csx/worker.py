"""One worker: forward and backward, one Unit at a time, over all micro-batches (the vertical order).

A Unit's weights pass through once per direction. Activations between Units stay; inside a Unit they are
recomputed in backward, or kept. Gradients leave as soon as a Unit is done.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from openwafer import timeline
from openwafer.csx.loss import LossNames, find_loss
from openwafer.errors import UserError
from openwafer.graph import Graph, Unit
from openwafer.graph.kept import KeptUnit
from openwafer.graph.randomness import seed_of, set_seed
from openwafer.graph.run import backward_unit, bind_inputs, forward_unit
from openwafer.memoryx.fetch import fetched
from openwafer.swarmx.reduction import Uses
from openwafer.swarmx.tree import Node, RangeSum, combine

MicroBatch = Mapping[str, Any]  # keyword arguments of the model's forward
Weights = Mapping[str, Tensor]
Stream = Callable[[Iterable[Unit]], Iterator[tuple[Unit, Weights]]]


class Relay(Protocol):
    """Passes the buffers that Units change from worker to worker, in the order of micro-batches."""

    def take(self, unit: Unit) -> Mapping[str, Tensor]:
        """Buffers of this Unit as the micro-batches before ours leave them; empty if there are none."""
        ...

    def give(self, unit: Unit, buffers: Mapping[str, Tensor]) -> None:
        """Buffers of this Unit after our micro-batches."""
        ...


@dataclass(eq=False)
class Pass:
    """What stays on the worker between forward and backward of one step."""

    step: int
    total: int  # micro-batches of the global batch
    share: range  # those of this worker
    values: list[dict[str, Tensor]]  # per micro-batch: every value that backward will need
    buffers: list[dict[int, dict[str, Tensor]]]  # per micro-batch and Unit: buffers as the Unit saw them
    kept: list[dict[int, KeptUnit]] = field(default_factory=list)  # likewise, where nothing is recomputed
    updates: dict[str, Tensor] = field(default_factory=dict)  # buffers after the step
    loss: float = 0.0  # mean over the global batch
    divisor: int = 0  # what gradients are divided by
    suspect: str | None = None  # filled by the swarm: the first Unit whose result is not finite


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
        """All Units in order over the whole global batch; `step` counts updates done before this one."""
        values = [bind_inputs(self.graph, (), dict(micro_batch)) for micro_batch in micro_batches]
        done = self.forward_share(stream, values, buffers, step, range(len(values)), len(values))
        losses, counts = self.losses(done)
        done.divisor = global_count(counts, step)
        done.loss = math.fsum(losses) / done.divisor
        return done

    def forward_share(
        self,
        stream: Stream,
        values: Sequence[dict[str, Tensor]],
        buffers: Mapping[str, Tensor],
        step: int,
        share: range,
        total: int,
        relay: Relay | None = None,
    ) -> Pass:
        """All Units over the micro-batches `share` of `total`, given as the named values a call starts from."""
        state = {**self.graph.constants, **buffers}
        done = Pass(
            step=step,
            total=total,
            share=share,
            values=list(values),
            buffers=[{} for _ in values],
            kept=[{} for _ in values],
        )
        for unit, weights in stream(self.graph.units):
            if relay is not None:
                state.update(relay.take(unit))
            with timeline.span(_lane(done), f"forward {unit.name}"):
                for index, known in enumerate(done.values):
                    outputs, changed = self._forward_unit(unit, weights, state, done, index)
                    known.update(zip(unit.outputs, outputs, strict=True))
                    done.updates.update(zip(unit.updated_buffers, changed, strict=True))
                    state.update(done.updates)
            if relay is not None:
                relay.give(unit, {name: state[name] for name in unit.buffers if name in buffers})
        return done

    def losses(self, done: Pass) -> tuple[list[float], list[int]]:
        """Loss and count of each micro-batch."""
        losses = fetched(torch.stack([values[self.loss.loss] for values in done.values])).tolist()
        if self.loss.count is None:
            return losses, [1] * len(losses)
        counts = fetched(torch.stack([values[self.loss.count] for values in done.values]))
        return losses, counts.to(torch.int64).tolist()

    def _forward_unit(
        self, unit: Unit, weights: Weights, state: Mapping[str, Tensor], done: Pass, index: int
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """One Unit on one micro-batch, remembering what backward needs. Returns (outputs, updated buffers)."""
        seen = {name: state[name] for name in unit.buffers}
        values, seeder = done.values[index], self._seeder(done.step, done.share[index])
        if not self._keeps(unit, done):
            done.buffers[index][unit.index] = seen
            return forward_unit(unit, weights, seen, values, seeder)
        kept = KeptUnit(self.graph, unit, weights, seen, values, seeder)
        done.kept[index][unit.index] = kept
        return kept.outputs, kept.changed

    def _keeps(self, unit: Unit, done: Pass) -> bool:
        """Whether what is inside the Unit stays until backward.

        That of the last Unit always does with one micro-batch: backward starts where forward ended, so computing it
        again would take as much memory and the time of a head's forward besides.
        """
        return not self.recompute or (len(done.values) == 1 and unit.index == len(self.graph.units) - 1)

    def backward(self, stream: Stream, done: Pass, scale: float = 1.0) -> Iterator[tuple[Unit, dict[str, Tensor]]]:
        """All Units in reverse: yields each with the finished sums of gradients of the weights it owns.

        The sums are fp32, or the compute type when there is one micro-batch and so nothing to sum. The loss is
        multiplied by `scale` (a power of two) on the way, and so are the sums.
        """
        uses = Uses(self.graph)
        for unit, parts in self.backward_share(stream, done, scale):
            yield unit, uses.add(unit, {name: combine(done.total, of_weight) for name, of_weight in parts.items()})

    def backward_share(
        self, stream: Stream, done: Pass, scale: float = 1.0
    ) -> Iterator[tuple[Unit, dict[str, dict[Node, Tensor]]]]:
        """All Units in reverse: yields each with the gradients of its uses of weights, summed over this worker's
        parts of the tree over micro-batches."""
        head = self.loss.loss
        gradients = [{head: torch.full_like(values[head], scale)} for values in done.values]
        for unit, weights in stream(reversed(self.graph.units)):
            with timeline.span(_lane(done), f"backward {unit.name}"):
                parts = self._backward_unit(unit, weights, done, gradients)
            yield unit, parts

    def _backward_unit(
        self, unit: Unit, weights: Weights, done: Pass, gradients: Sequence[dict[str, Tensor]]
    ) -> dict[str, dict[Node, Tensor]]:
        """One Unit on this worker's micro-batches: the sums of the gradients of its uses of weights."""
        sums: dict[str, RangeSum] = {}
        for index, values in enumerate(done.values):
            if not self._keeps(unit, done):
                buffers, seeder = done.buffers[index].pop(unit.index), self._seeder(done.step, done.share[index])
                of_weights, of_values = backward_unit(
                    self.graph, unit, weights, buffers, values, gradients[index], seeder
                )
            else:
                of_weights, of_values = done.kept[index].pop(unit.index).backward(weights, gradients[index])
            for name, gradient in of_weights.items():
                leaf = gradient if done.total == 1 else gradient.float()
                sums.setdefault(name, RangeSum(done.total, done.share)).add(leaf)
            self._hand_back(unit, values, gradients[index], of_values)
        return {name: total.parts() for name, total in sums.items()}

    def _hand_back(
        self, unit: Unit, values: dict[str, Tensor], gradients: dict[str, Tensor], of_values: dict[str, Tensor]
    ) -> None:
        """Passes gradients to earlier Units and drops what no earlier Unit needs."""
        for name, gradient in of_values.items():
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
        for name in unit.outputs:
            gradients.pop(name, None)
            values.pop(name, None)

    def _seeder(self, step: int, micro_batch: int) -> Callable[[Unit], None]:
        def seeder(unit: Unit) -> None:
            set_seed(seed_of(self.seed, step, micro_batch, unit.index))

        return seeder


def global_count(counts: Iterable[int], step: int) -> int:
    """What the gradients of a step are divided by."""
    total = sum(counts)
    if total == 0:
        raise UserError(f"step {step + 1}: the batch has no label to learn from (count 0)")
    return total


def _lane(done: Pass) -> str:
    """On a GPU the host only launches: what it computes is measured there."""
    is_host = all(value.device.type == "cpu" for values in done.values[:1] for value in values.values())
    return timeline.COMPUTE if is_host else timeline.LAUNCH
