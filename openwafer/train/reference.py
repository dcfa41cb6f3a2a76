"""The definition of a training step: plain, in memory, over the Units of a Graph.

Streamed training must equal this bit for bit, on any number of workers and any tier. It is written to be read:

1. Each micro-batch runs forward through all Units, then backward in reverse; randomness is keyed by
   (seed, step, micro-batch, Unit).
2. The gradient of each use of a weight is summed over micro-batches along one fixed tree (`tree.py`), and
   the uses of a weight are added in reverse Unit order.
3. The norm of these sums is taken over fixed blocks (`norm.py`). It and the gradients are divided by the number of
   micro-batches, or by the global count when the model returns `(loss_sum, count)`, and by the loss scale that
   backward started from.
4. Gradients are clipped, the optimizer is applied.

A step that meets a NaN or an infinity changes no weight, no buffer and no optimizer state (`guard.py`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from openwafer.csx.loss import LossNames, find_loss
from openwafer.errors import UserError
from openwafer.graph import Graph, Unit
from openwafer.graph.randomness import seed_of, set_seed
from openwafer.graph.run import backward, bind_inputs, forward
from openwafer.kernels.squares import square_sums
from openwafer.memoryx.config import OptimizerConfig
from openwafer.memoryx.norm import clipped, global_norm
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.swarmx.tree import TreeSum
from openwafer.train import guard
from openwafer.train.engine import MicroBatch, StepResult, mean_loss


@dataclass(eq=False)
class State:
    """Everything that training changes: what a checkpoint holds."""

    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # weight → kind of state → value
    step: int = 0  # steps done


@dataclass(eq=False)
class Reference:
    """The in-memory trainer. `schedule` maps the step (from 0) to a factor on the learning rate."""

    graph: Graph
    state: State
    config: OptimizerConfig
    schedule: Callable[[int], float]
    seed: int = 0
    loss: LossNames = field(init=False)

    def __post_init__(self) -> None:
        self.loss = find_loss(self.graph)
        self.optimizer = make_optimizer(self.config)
        self.guard = guard.Guard(self.config)
        dtype = self.optimizer.state_dtype
        for name in self.trained:
            shapes = self.optimizer.state_shapes(tuple(self.state.weights[name].shape))
            zeros = {kind: torch.zeros(shape, dtype=dtype) for kind, shape in shapes.items()}
            self.state.optimizer.setdefault(name, zeros)

    @property
    def trained(self) -> list[str]:
        return [name for name, weight in self.graph.weights.items() if weight.requires_grad]

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """One update on the global batch, given as its fixed list of micro-batches."""
        with torch.random.fork_rng(devices=[]):  # Units set the random state; the caller keeps its own
            sums, divisor, buffers, loss = self._gradients(micro_batches)
        norm = math.nan  # of gradients of a loss that is not finite
        if math.isfinite(loss):
            norm = global_norm(square_sums(total) for total in sums.values()) / divisor
        gradients = {name: total / divisor for name, total in sums.items()}
        lr = self.config.lr * self.schedule(self.state.step)
        is_good = self.guard.judge(loss, norm, lambda: self._not_finite(loss, gradients))
        if is_good:
            update = self.state.step - self.guard.num_skipped + 1
            for name, gradient in gradients.items():
                gradient = clipped(gradient, norm, self.config.max_grad_norm, self.config.max_grad_value)
                state = self.state.optimizer[name]
                self.optimizer.update(name, self.state.weights[name], gradient, state, lr=lr, step=update)
            self.state.buffers.update(buffers)
        self.state.step += 1
        return StepResult(loss=loss, grad_norm=norm, lr=lr, skipped=not is_good)

    def _gradients(
        self, micro_batches: Sequence[MicroBatch]
    ) -> tuple[dict[str, Tensor], float, dict[str, Tensor], float]:
        """Summed gradient of each trained weight, what to divide it by, buffers after the step, and the mean loss."""
        sums: list[dict[str, TreeSum]] = [{} for _ in self.graph.units]
        buffers = dict(self.state.buffers)
        losses: list[float] = []
        counts: list[int] = []
        for index, micro_batch in enumerate(micro_batches):
            seeder = self._seeder(index)
            values, updates = forward(
                self.graph, self.state.weights, buffers, bind_inputs(self.graph, (), dict(micro_batch)), seeder
            )
            heads = {self.loss.loss: torch.full_like(values[self.loss.loss], self.guard.scale)}
            uses = backward(self.graph, self.state.weights, buffers, values, heads, seeder)
            for unit, of_weights in enumerate(uses):
                for name, gradient in of_weights.items():
                    sums[unit].setdefault(name, TreeSum()).add(gradient.float())
            buffers.update(updates)
            losses.append(values[self.loss.loss].item())
            counts.append(1 if self.loss.count is None else int(values[self.loss.count].item()))
        divisor = sum(counts)
        if divisor == 0:
            raise UserError(f"step {self.state.step + 1}: the batch has no label to learn from (count 0)")
        gradients: dict[str, Tensor] = {}
        for uses_of_unit in reversed(sums):
            for name, total in uses_of_unit.items():
                use = total.total()
                gradients[name] = gradients[name] + use if name in gradients else use
        ordered = {name: gradients[name] for name in self.trained if name in gradients}
        return ordered, divisor * self.guard.scale, buffers, math.fsum(losses) / divisor

    def _seeder(self, micro_batch: int) -> Callable[[Unit], None]:
        def seeder(unit: Unit) -> None:
            set_seed(seed_of(self.seed, self.state.step, micro_batch, unit.index))

        return seeder

    def _not_finite(self, loss: float, gradients: dict[str, Tensor]) -> UserError:
        """Says where it appeared, in the order gradients arrive."""
        step = self.state.step + 1
        for unit in reversed(self.graph.units):
            for name in unit.weights:
                if name in gradients and not torch.isfinite(gradients[name]).all():
                    return UserError(
                        f"step {step}: the gradient of {name!r} (Unit {unit.name!r}) is not finite "
                        f"(loss {loss}): nothing was changed; lower the learning rate or resume from a checkpoint"
                    )
        what = "the norm of the gradients overflows" if math.isfinite(loss) else "check the data"
        return UserError(f"step {step}: the loss is {loss}: nothing was changed; {what}")

    def evaluate(self, micro_batches: Sequence[MicroBatch], graph: Graph) -> float:
        """Mean loss of `graph` (the model captured in eval mode) with the current weights."""
        results = (
            forward(graph, self.state.weights, self.state.buffers, bind_inputs(graph, (), dict(micro_batch)))[0]
            for micro_batch in micro_batches
        )
        return mean_loss(find_loss(graph), results)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything a checkpoint holds, by name."""
        yield from ((f"weights/{name}", tensor) for name, tensor in self.state.weights.items())
        yield from ((f"buffers/{name}", tensor) for name, tensor in self.state.buffers.items())
        for name, kinds in self.state.optimizer.items():
            yield from ((f"optimizer/{kind}/{name}", tensor) for kind, tensor in kinds.items())
        yield guard.STATE, self.guard.tensor()
