"""The streamed trainer: MemoryX holds everything, weights pass through the worker one Unit at a time.

Equals `reference.py` bit for bit. Where nothing can veto a step, updates start while backward is still going on.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from openwafer.csx.link import DirectLink, Link, Parcel
from openwafer.csx.loss import find_loss
from openwafer.csx.worker import Pass, Worker
from openwafer.errors import UserError
from openwafer.graph import Graph, Unit
from openwafer.graph.run import bind_inputs, forward_unit
from openwafer.memoryx.config import OptimizerConfig
from openwafer.memoryx.halves import scaled
from openwafer.memoryx.norm import block_sums, clip_factor, global_norm
from openwafer.memoryx.store import WIRE, Store
from openwafer.memoryx.update import UpdateNumbers
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
        link: Link | None = None,
    ) -> None:
        self.graph = graph
        self.store = store
        self.buffers = dict(buffers)
        self.config = config
        self.schedule = schedule
        self.worker = Worker(graph, seed)
        self.link = link or DirectLink(store)
        self.num_steps_done = num_steps_done

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """One update on the global batch, given as its fixed list of micro-batches."""
        device = self.link.device
        lr = self.config.lr * self.schedule(self.num_steps_done)
        local = [pytree.tree_map_only(Tensor, lambda t: t.to(device), dict(batch)) for batch in micro_batches]
        # Units set the random state; the caller keeps its own.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            done = self.worker.forward(self.link.stream, local, self.buffers, self.num_steps_done)
            if not math.isfinite(done.loss):
                raise UserError(f"step {done.step + 1}: the loss is {done.loss}: nothing was changed; check the data")
            numbers = UpdateNumbers(lr=lr, step=done.step + 1, divisor=done.divisor)
            can_veto = self.config.max_grad_norm is not None
            norm = self._clipped_updates(done, numbers) if can_veto else self._immediate_updates(done, numbers)
        self.buffers.update(done.updates)
        self.num_steps_done += 1
        return StepResult(loss=done.loss, grad_norm=norm, lr=lr)

    def _immediate_updates(self, done: Pass, numbers: UpdateNumbers) -> float:
        """Each Unit is updated as soon as its gradients are there."""
        sums: list[Tensor] = []
        for unit, gradients in self.worker.backward(self.link.stream, done):
            mine = [block_sums(scaled(gradient, numbers)) for gradient in gradients.values()]
            # On a GPU this test would wait for it; there the optimizer finds what is not finite.
            if self.link.device.type == "cpu" and mine and not math.isfinite(global_norm(mine)):
                raise UserError(
                    f"{_not_finite(done, unit, gradients)}: later Units were already updated, so this run cannot go "
                    "on; the last checkpoint is intact, resume from it with a lower learning rate or with clipping"
                )
            sums += mine
            if gradients:
                self.link.apply(self.link.send(unit, gradients), numbers)
        return global_norm(sums)

    def _clipped_updates(self, done: Pass, numbers: UpdateNumbers) -> float:
        """Nothing is updated before the norm of all gradients is known."""
        sums: dict[Unit, list[Tensor]] = {}
        parcels: list[Parcel] = []
        for unit, gradients in self.worker.backward(self.link.stream, done):
            if gradients:
                sums[unit] = [block_sums(scaled(gradient, numbers)) for gradient in gradients.values()]
                parcels.append(self.link.send(unit, gradients))
        norm = global_norm(part for parts in sums.values() for part in parts)
        if not math.isfinite(norm):
            unit = next(unit for unit, parts in sums.items() if not math.isfinite(global_norm(parts)))
            raise UserError(
                f"step {done.step + 1}: a gradient of Unit {unit.name!r} is not finite (loss {done.loss}): "
                "nothing was changed; lower the learning rate"
            )
        factor = clip_factor(norm, self.config.max_grad_norm)
        while parcels:  # the newest first, and its gradients are gone when it is done
            self.link.apply(parcels.pop(), dataclasses.replace(numbers, factor=factor))
        return norm

    def evaluate(self, micro_batches: Sequence[MicroBatch], graph: Graph) -> float:
        """Mean loss of `graph` (the model captured in eval mode, with the same Units) with the current weights."""
        device = self.link.device
        local = [pytree.tree_map_only(Tensor, lambda t: t.to(device), dict(batch)) for batch in micro_batches]
        values = [bind_inputs(graph, (), batch) for batch in local]
        buffers = {**graph.constants, **self.buffers}
        last_use = graph.last_use()
        for unit, weights in self.link.stream(graph.units):
            for kept in values:
                outputs, _ = forward_unit(unit, weights, buffers, kept)
                kept.update(zip(unit.outputs, outputs, strict=True))
                for name in unit.inputs:
                    if last_use[name] == unit.index:
                        del kept[name]
        return mean_loss(find_loss(graph), values)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything a checkpoint holds, by name; each valid until the next is asked for."""
        self.link.drain()
        for name, field, value in self.store.read_all():
            yield f"weights/{name}" if field == WIRE else f"optimizer/{field}/{name}", value
        yield from ((f"buffers/{name}", tensor) for name, tensor in self.buffers.items())


def fill(store: Store, values: Iterable[tuple[str, Tensor]]) -> None:
    """Initial weights into their tier, one at a time."""
    for name, value in values:
        store.write(name, WIRE, value)


def restore(store: Store, read: Callable[[str], Tensor]) -> None:
    """Weights and optimizer state from a checkpoint, given as a function from a name to a tensor."""
    for name, parts in store.segments.items():
        for field in parts:
            store.write(name, field, read(f"weights/{name}" if field == WIRE else f"optimizer/{field}/{name}"))


def _not_finite(done: Pass, unit: Unit, gradients: Mapping[str, Tensor]) -> str:
    name = next(n for n, gradient in gradients.items() if not torch.isfinite(gradient).all())
    return f"step {done.step + 1}: the gradient of {name!r} (Unit {unit.name!r}) is not finite (loss {done.loss})"
