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
from openwafer.memoryx.norm import block_sums, clip_factor, global_norm
from openwafer.memoryx.store import WIRE, Store
from openwafer.train.engine import Frozen, MicroBatch, StepResult, mean_loss


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
        self.num_steps_done = num_steps_done

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """One update on the global batch, given as its fixed list of micro-batches."""
        lr = self.config.lr * self.schedule(self.num_steps_done)
        with torch.random.fork_rng(devices=[]):  # Units set the random state; the caller keeps its own
            done = self.worker.forward(self.store.stream, micro_batches, self.buffers, self.num_steps_done)
            if not math.isfinite(done.loss):
                raise UserError(f"step {done.step + 1}: the loss is {done.loss}: nothing was changed; check the data")
            can_veto = self.config.max_grad_norm is not None
            norm = self._clipped_updates(done, lr) if can_veto else self._immediate_updates(done, lr)
        self.buffers.update(done.updates)
        self.num_steps_done += 1
        return StepResult(loss=done.loss, grad_norm=norm, lr=lr)

    def _immediate_updates(self, done: Pass, lr: float) -> float:
        """Each Unit is updated as soon as its gradients are there."""
        sums: list[float] = []
        for unit, gradients in self.worker.backward(self.store.stream, done):
            if unit.index > 0:
                self.store.prefetch_update(self.graph.units[unit.index - 1])
            mine = [total for gradient in gradients.values() for total in block_sums(gradient)]
            if not math.isfinite(global_norm(mine)):
                raise UserError(
                    f"{_not_finite(done, unit, gradients)}: later Units were already updated, so this run cannot go "
                    "on; the last checkpoint is intact, resume from it with a lower learning rate or with clipping"
                )
            sums += mine
            self.store.update(unit, gradients, lr=lr, step=done.step + 1)
        return global_norm(sums)

    def _clipped_updates(self, done: Pass, lr: float) -> float:
        """Nothing is updated before the norm of all gradients is known."""
        arrived = list(self.worker.backward(self.store.stream, done))
        self.store.prefetch_update(arrived[-1][0])
        norm = global_norm(total for _, named in arrived for g in named.values() for total in block_sums(g))
        if not math.isfinite(norm):
            for unit, gradients in arrived:
                if not all(torch.isfinite(gradient).all() for gradient in gradients.values()):
                    raise UserError(
                        f"{_not_finite(done, unit, gradients)}: nothing was changed; lower the learning rate"
                    )
        factor = clip_factor(norm, self.config.max_grad_norm)
        while arrived:  # the newest first, and its gradients are gone when it is done
            unit, gradients = arrived.pop()
            if arrived:
                self.store.prefetch_update(arrived[-1][0])
            if factor is not None:
                gradients = {name: gradient * factor for name, gradient in gradients.items()}
            self.store.update(unit, gradients, lr=lr, step=done.step + 1)
        return norm

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
        yield from _named(self.store.read_all(), self.buffers)

    def freeze(self) -> Frozen:
        """Everything a checkpoint of this moment holds, to be read while training goes on."""
        snapshot = self.store.freeze()
        return Frozen(_named(snapshot.read_all(), dict(self.buffers)), snapshot.close)


def fill(store: Store, values: Iterable[tuple[str, Tensor]]) -> None:
    """Initial weights into their tier, one at a time."""
    store.write_all((name, WIRE, value) for name, value in values)


def restore(store: Store, read: Callable[[str], Tensor]) -> None:
    """Weights and optimizer state from a checkpoint, given as a function from a name to a tensor."""
    store.write_all(
        (name, field, read(_name(name, field))) for name, parts in store.segments.items() for field in parts
    )


def _named(values: Iterable[tuple[str, str, Tensor]], buffers: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield from ((_name(name, field), value) for name, field, value in values)
    yield from ((f"buffers/{name}", tensor) for name, tensor in buffers.items())


def _name(weight: str, field: str) -> str:
    return f"weights/{weight}" if field == WIRE else f"optimizer/{field}/{weight}"


def _not_finite(done: Pass, unit: Unit, gradients: Mapping[str, Tensor]) -> str:
    name = next(n for n, gradient in gradients.items() if not torch.isfinite(gradient).all())
    return f"step {done.step + 1}: the gradient of {name!r} (Unit {unit.name!r}) is not finite (loss {done.loss})"
