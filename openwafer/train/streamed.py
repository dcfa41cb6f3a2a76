"""The streamed trainer: MemoryX holds everything, weights pass through the worker one Unit at a time.

Equals `reference.py` bit for bit. Where nothing can veto a step, updates start while backward is still going on.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from openwafer.csx.loss import find_loss
from openwafer.csx.worker import Pass, Worker
from openwafer.errors import UserError
from openwafer.graph import Graph, Unit
from openwafer.graph.run import bind_inputs, forward_unit
from openwafer.memoryx.config import OptimizerConfig
from openwafer.memoryx.norm import block_sums, clipped, global_norm
from openwafer.memoryx.store import WIRE, Store
from openwafer.train import guard
from openwafer.train.engine import MicroBatch, StepResult, mean_loss


class Streamed:
    """Trains a Graph whose weights are in a Store. `schedule` maps the step (from 0) to a factor on the rate."""

    def __init__(
        self,
        graph: Graph,
        store: Store,
        buffers: Mapping[str, Tensor],
        config: OptimizerConfig,
        schedule: Callable[[int], float],
        seed: int = 0,
        num_steps_done: int = 0,
    ) -> None:
        self.graph = graph
        self.store = store
        self.buffers = dict(buffers)
        self.config = config
        self.schedule = schedule
        self.worker = Worker(graph, seed)
        self.guard = guard.Guard(config)
        self.num_steps_done = num_steps_done

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """One update on the global batch, given as its fixed list of micro-batches."""
        lr = self.config.lr * self.schedule(self.num_steps_done)
        with torch.random.fork_rng(devices=[]):  # Units set the random state; the caller keeps its own
            done = self.worker.forward(self.store.stream, micro_batches, self.buffers, self.num_steps_done)
            if not math.isfinite(done.loss):
                norm = math.nan
                is_good = self.guard.judge(done.loss, norm, lambda: _bad_loss(self.graph, done))
            elif self.guard.can_veto:
                norm, is_good = self._vetoable_updates(done, lr)
            else:
                norm, is_good = self._immediate_updates(done, lr), True
        if is_good:
            self.buffers.update(done.updates)
        self.num_steps_done += 1
        return StepResult(loss=done.loss, grad_norm=norm, lr=lr, skipped=not is_good)

    @property
    def _update(self) -> int:
        """Which update this step is, from 1; skipped steps were none."""
        return self.num_steps_done - self.guard.num_skipped + 1

    def _immediate_updates(self, done: Pass, lr: float) -> float:
        """Each Unit is updated as soon as its gradients are there."""
        sums: list[float] = []
        for unit, gradients in self.worker.backward(self.store.stream, done, self.guard.scale):
            if unit.index > 0:
                self.store.prefetch_update(self.graph.units[unit.index - 1])
            mine = [total for gradient in gradients.values() for total in block_sums(gradient)]
            if not math.isfinite(global_norm(mine)):
                raise UserError(
                    f"{_not_finite(done, unit, gradients)}: later Units were already updated, so this run cannot go "
                    "on; the last checkpoint is intact, resume from it with a lower learning rate or with clipping"
                )
            sums += mine
            gradients = {name: clipped(g, 0.0, None, self.config.max_grad_value) for name, g in gradients.items()}
            self.store.update(unit, gradients, lr=lr, step=self._update)
        norm = global_norm(sums)
        self.guard.judge(done.loss, norm, lambda: _bad_norm(done))
        return norm

    def _vetoable_updates(self, done: Pass, lr: float) -> tuple[float, bool]:
        """Nothing is updated before all gradients are known. Gives their norm, and whether they were applied."""
        arrived = list(self.worker.backward(self.store.stream, done, self.guard.scale))
        norm = global_norm(total for _, named in arrived for g in named.values() for total in block_sums(g))
        is_good = self.guard.judge(done.loss, norm, lambda: _bad_gradients(done, arrived))
        while is_good and arrived:  # the newest first, and its gradients are gone when it is done
            unit, gradients = arrived.pop()
            limits = self.config.max_grad_norm, self.config.max_grad_value
            gradients = {name: clipped(gradient, norm, *limits) for name, gradient in gradients.items()}
            self.store.update(unit, gradients, lr=lr, step=self._update)
        return norm, is_good

    def evaluate(self, micro_batches: Sequence[MicroBatch], graph: Graph) -> float:
        """Mean loss of `graph` (the model captured in eval mode, with the same Units) with the current weights."""
        values = [bind_inputs(graph, (), dict(micro_batch)) for micro_batch in micro_batches]
        buffers = {**graph.constants, **self.buffers}
        last_use = graph.last_use()
        for unit, weights in self.store.stream(graph.units):
            for kept in values:
                outputs, _ = forward_unit(unit, weights, buffers, kept)
                kept.update(zip(unit.outputs, outputs, strict=True))
                for name in unit.inputs:
                    if last_use[name] == unit.index:
                        del kept[name]
        return mean_loss(find_loss(graph), values)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything a checkpoint holds, by name; each valid until the next is asked for."""
        for name, field, value in self.store.read_all():
            yield f"weights/{name}" if field == WIRE else f"optimizer/{field}/{name}", value
        yield from ((f"buffers/{name}", tensor) for name, tensor in self.buffers.items())
        yield guard.STATE, self.guard.tensor()


def fill(store: Store, values: Iterable[tuple[str, Tensor]]) -> None:
    """Initial weights into their tier, one at a time."""
    for name, value in values:
        store.write(name, WIRE, value)


def restore(store: Store, read: Callable[[str], Tensor], *, with_state: bool = True) -> None:
    """Weights and optimizer state from a checkpoint, given as a function from a name to a tensor.

    Without state (imported weights) the optimizer starts anew.
    """
    for name, parts in store.segments.items():
        for field in parts if with_state else [WIRE]:
            store.write(name, field, read(f"weights/{name}" if field == WIRE else f"optimizer/{field}/{name}"))


def _bad_loss(graph: Graph, done: Pass) -> UserError:
    """Says which Unit was the first to give something that is not finite."""
    names = (unit.name for unit in graph.units for values in done.values if _is_bad(unit, values))
    where = next((f", and Unit {name!r} is the first whose result is not finite" for name in names), "")
    return UserError(f"step {done.step + 1}: the loss is {done.loss}{where}: nothing was changed; check the data")


def _is_bad(unit: Unit, values: Mapping[str, Tensor]) -> bool:
    return any(name in values and not torch.isfinite(values[name]).all() for name in unit.outputs)


def _bad_norm(done: Pass) -> UserError:
    return UserError(f"step {done.step + 1}: the norm of the gradients overflows (loss {done.loss})")


def _bad_gradients(done: Pass, arrived: Sequence[tuple[Unit, Mapping[str, Tensor]]]) -> UserError:
    for unit, gradients in arrived:
        if not all(torch.isfinite(gradient).all() for gradient in gradients.values()):
            return UserError(f"{_not_finite(done, unit, gradients)}: nothing was changed; lower the learning rate")
    return _bad_norm(done)


def _not_finite(done: Pass, unit: Unit, gradients: Mapping[str, Tensor]) -> str:
    bad = [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]
    name = (bad or list(gradients))[0]  # or all are finite, and only their squares overflow
    return f"step {done.step + 1}: the gradient of {name!r} (Unit {unit.name!r}) is not finite (loss {done.loss})"
