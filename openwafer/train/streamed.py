"""The streamed trainer: MemoryX holds everything, weights pass through the worker one Unit at a time.

Equals `reference.py` bit for bit. Where nothing can veto a step, updates start while backward is still going on.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from openwafer import timeline
from openwafer.csx.link import DirectLink, Link, Parcel
from openwafer.csx.loss import find_loss
from openwafer.csx.worker import Pass, Worker
from openwafer.errors import UserError
from openwafer.graph import Graph, Unit
from openwafer.graph.run import bind_inputs, forward_unit
from openwafer.kernels.squares import square_sums
from openwafer.memoryx.config import OptimizerConfig
from openwafer.memoryx.norm import clip_factor, global_norm
from openwafer.memoryx.store import REMAINDER, WIRE, Store
from openwafer.memoryx.update import UpdateNumbers
from openwafer.train import guard
from openwafer.train.engine import Frozen, MicroBatch, StepResult, mean_loss
from openwafer.train.followers import Follower
from openwafer.train.swarm import Swarm


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
        *,
        recompute: bool = True,
        swarm: Swarm | Follower | None = None,
    ) -> None:
        """`swarm`: the workers, where there is more than this one."""
        self.link = link or DirectLink(store)
        self.graph = graph = on_device(graph, self.link.device)
        self.store = store
        self.buffers = {name: value.to(self.link.device) for name, value in buffers.items()}
        self.config = config
        self.schedule = schedule
        self.worker = swarm or Worker(graph, seed, recompute=recompute)
        self.swarm = swarm
        self.guard = guard.Guard(config)
        self.num_steps_done = num_steps_done
        self._is_half_done = False  # some Units are a step ahead of the others

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """One update on the global batch, given as its fixed list of micro-batches."""
        self._check_whole()
        device = self.link.device
        lr = self.config.lr * self.schedule(self.num_steps_done)
        local = [pytree.tree_map_only(Tensor, lambda t: t.to(device), dict(batch)) for batch in micro_batches]
        # Units set the random state; the caller keeps its own.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), _memory_errors():
            done = self.worker.forward(self.link.stream, local, self.buffers, self.num_steps_done)
            if not math.isfinite(done.loss):
                norm = math.nan
                is_good = self.guard.judge(done.loss, norm, lambda: _bad_loss(self.graph, done))
            elif self.guard.can_veto:
                norm, is_good = self._vetoable_updates(done, self._numbers(done, lr))
            else:
                norm, is_good = self._immediate_updates(done, self._numbers(done, lr)), True
        if is_good:
            self.buffers.update(done.updates)
        self.num_steps_done += 1
        self._is_half_done = False
        return StepResult(loss=done.loss, grad_norm=norm, lr=lr, skipped=not is_good)

    def _check_whole(self) -> None:
        if self._is_half_done:
            raise UserError(
                f"step {self.num_steps_done + 1} ended after some Units were updated: this run cannot go on and cannot "
                "be saved; the last checkpoint is intact, resume from it"
            )

    def _apply(self, parcel: Parcel, numbers: UpdateNumbers) -> None:
        self._is_half_done = True
        self.link.apply(parcel, numbers)

    def _numbers(self, done: Pass, lr: float) -> UpdateNumbers:
        return UpdateNumbers(
            lr=lr,
            step=self.num_steps_done - self.guard.num_skipped + 1,  # skipped steps were no updates
            divisor=done.divisor * self.guard.scale,
        )

    def _immediate_updates(self, done: Pass, numbers: UpdateNumbers) -> float:
        """Each Unit is updated as soon as its gradients are there."""
        sums: dict[Unit, list[Tensor]] = {}
        limited = dataclasses.replace(numbers, max_value=self.config.max_grad_value)
        for unit, gradients in self.worker.backward(self.link.stream, done, self.guard.scale):
            if not gradients:
                continue
            mine = sums[unit] = self._squares(unit, gradients)
            # On a GPU this test would wait for it; there the optimizer finds what is not finite.
            if self.link.device.type == "cpu" and not math.isfinite(global_norm(mine)):
                raise UserError(f"{_not_finite(done, unit, gradients)}: {_TOO_LATE}")
            self._apply(self.link.send(unit, gradients), limited)
        norm = self._norm(_joined(sums)) / numbers.divisor
        self.guard.judge(done.loss, norm, lambda: UserError(f"{_bad_gradients(done, sums)}: {_TOO_LATE}"))
        return norm

    def _vetoable_updates(self, done: Pass, numbers: UpdateNumbers) -> tuple[float, bool]:
        """Nothing is updated before all gradients are known. Gives their norm, and whether they were applied.

        Most steps are not clipped: the link may prepare updates as if this was one.
        """
        likely = dataclasses.replace(numbers, max_value=self.config.max_grad_value)
        sums: dict[Unit, list[Tensor]] = {}
        parcels: list[Parcel] = []
        try:
            for unit, gradients in self.worker.backward(self.link.stream, done, self.guard.scale):
                if gradients:
                    sums[unit] = self._squares(unit, gradients)
                    parcels.append(self.link.send(unit, gradients))
                    self.link.guess(parcels[-1], likely)
            norm = self._norm(_joined(sums)) / numbers.divisor
            is_good = self.guard.judge(
                done.loss,
                norm,
                lambda: UserError(f"{_bad_gradients(done, sums)}: nothing was changed; lower the learning rate"),
            )
        except BaseException:
            for parcel in parcels:
                self.link.discard(parcel)  # another step needs their buffers
            raise
        config = self.config
        factor = None if config.max_grad_value is not None else clip_factor(norm, config.max_grad_norm)
        limited = dataclasses.replace(numbers, factor=factor, max_value=config.max_grad_value)
        while parcels:  # the newest first, and its gradients are gone when it is done
            parcel = parcels.pop()
            if is_good:
                self._apply(parcel, limited)
            else:
                self.link.discard(parcel)
        return norm, is_good

    def _norm(self, squares: list[Tensor]) -> float:
        """Of all gradients, wherever they are applied."""
        return global_norm(squares if self.swarm is None else self.swarm.all_squares(squares))

    def _squares(self, unit: Unit, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """What the norm is made of."""
        lane = timeline.UPDATE if self.link.device.type == "cpu" else timeline.LAUNCH
        with timeline.span(lane, f"norm {unit.name}"):
            return [square_sums(gradient) for gradient in gradients.values()]

    def evaluate(self, micro_batches: Sequence[MicroBatch], graph: Graph) -> float:
        """Mean loss of `graph` (the model captured in eval mode, with the same Units) with the current weights."""
        if isinstance(self.swarm, Swarm):
            return self.swarm.evaluate(micro_batches, graph, self.buffers)
        device = self.link.device
        local = [pytree.tree_map_only(Tensor, lambda t: t.to(device), dict(batch)) for batch in micro_batches]
        graph = on_device(graph, device)
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
        self._check_whole()
        self.link.drain()
        yield from _named(self.store.read_all())
        yield from self._others()

    def freeze(self) -> Frozen:
        """Everything a checkpoint of this moment holds, to be read while training goes on."""
        self._check_whole()
        self.link.drain()
        others = list(self._others())
        followers = None if self.swarm is None else self.swarm.followers
        snapshot = self.store.freeze() if followers is None else followers.freeze(self.store)
        return Frozen(itertools.chain(_named(snapshot.read_all()), others), snapshot.close)

    def _others(self) -> Iterator[tuple[str, Tensor]]:
        """What is not in the store: buffers are replaced, never changed, so they need no copy."""
        yield from ((f"buffers/{name}", tensor.cpu()) for name, tensor in self.buffers.items())
        yield guard.STATE, self.guard.tensor()


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"the GPU has not enough memory for a step ({str(error).splitlines()[0]}): give a larger --device_memory, "
            "a smaller --micro_batch_size or a shorter context"
        ) from None


def on_device(graph: Graph, device: torch.device) -> Graph:
    """The graph with the literals of its code where it runs."""
    if device.type == "cpu":
        return graph
    return dataclasses.replace(graph, constants={name: value.to(device) for name, value in graph.constants.items()})


def fill(store: Store, values: Iterable[tuple[str, Tensor]]) -> None:
    """Initial weights into their tier, one at a time."""
    store.write_all((name, WIRE, value) for name, value in values)


def restore(store: Store, read: Callable[[str], Tensor], *, with_state: bool = True) -> None:
    """Weights and optimizer state from a checkpoint, given as a function from a name to a tensor.

    Without state (imported weights) the optimizer starts anew.
    """
    wanted = [
        (name, field)
        for name, parts in store.segments.items()
        for field in (parts if with_state else [WIRE])
        if field != REMAINDER  # written with the wire: together they are the weight
    ]
    store.write_all((name, field, read(_name(name, field))) for name, field in wanted)


def _named(values: Iterable[tuple[str, str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    yield from ((_name(name, field), value) for name, field, value in values)


def _name(weight: str, field: str) -> str:
    return f"weights/{weight}" if field == WIRE else f"optimizer/{field}/{weight}"


def _bad_loss(graph: Graph, done: Pass) -> UserError:
    """Says which Unit was the first to give something that is not finite."""
    names = [done.suspect] if done.suspect else []
    names += (unit.name for unit in graph.units for values in done.values if _is_bad(unit, values))
    where = next((f", and Unit {name!r} is the first whose result is not finite" for name in names[:1]), "")
    return UserError(f"step {done.step + 1}: the loss is {done.loss}{where}: nothing was changed; check the data")


def _is_bad(unit: Unit, values: Mapping[str, Tensor]) -> bool:
    return any(name in values and not torch.isfinite(values[name]).all() for name in unit.outputs)


_TOO_LATE = (
    "later Units were already updated, so this run cannot go on; the last checkpoint is intact, resume from it with a "
    "lower learning rate or with clipping"
)


def _joined(sums: Mapping[Unit, Sequence[Tensor]]) -> list[Tensor]:
    return [part for parts in sums.values() for part in parts]


def _bad_gradients(done: Pass, sums: Mapping[Unit, Sequence[Tensor]]) -> str:
    for unit, parts in sums.items():
        if not math.isfinite(global_norm(parts)):
            return f"step {done.step + 1}: a gradient of Unit {unit.name!r} is not finite (loss {done.loss})"
    return f"step {done.step + 1}: the norm of the gradients overflows (loss {done.loss})"


def _not_finite(done: Pass, unit: Unit, gradients: Mapping[str, Tensor]) -> str:
    bad = [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]
    name = (bad or list(gradients))[0]  # or all are finite, and only their squares overflow
    return f"step {done.step + 1}: the gradient of {name!r} (Unit {unit.name!r}) is not finite (loss {done.loss})"
