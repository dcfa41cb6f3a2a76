"""`ow.Trainer`: streamed training of any nn.Module that can be captured, from Python.

The model is captured when the first batch says what its inputs look like; until then nothing is allocated.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from openwafer import checkpoint, timeline
from openwafer.errors import UserError
from openwafer.graph import Graph, capture
from openwafer.graph.compiled import compiled
from openwafer.graph.deferred import initialise
from openwafer.memoryx.config import MemoryConfig, OptimizerConfig
from openwafer.memoryx.groups import with_groups
from openwafer.models.config import ModelConfig
from openwafer.swarmx.config import SwarmConfig
from openwafer.swarmx.share import check_shares
from openwafer.train.assembly import Assembly, Plan, Workers
from openwafer.train.cluster import Cluster
from openwafer.train.engine import MicroBatch, StepResult
from openwafer.train.gpu import GpuWorker
from openwafer.train.gpu_workers import GpuWorkers
from openwafer.train.schedule import Schedule, ScheduleConfig
from openwafer.train.streamed import Streamed
from openwafer.train.text_model import DTYPES
from openwafer.train.workers import LocalWorkers

Batch = Mapping[str, Any] | Sequence[MicroBatch]


class Trainer:
    """Trains `model`, whose forward takes a batch's entries by name and returns its loss.

    The loss is a scalar (a mean), a pair `(loss_sum, count)`, or a result with a `loss`. The module's own weights
    stay as they are: `state_dict` gives the trained ones. `schedule` maps the step (from 0) to a factor on the rate.
    `recompute` and `compile` are those of a params file.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerConfig | None = None,
        cluster: Cluster | None = None,
        memory: MemoryConfig | None = None,
        *,
        schedule: Schedule | None = None,
        micro_batch_size: int | None = None,
        recompute: bool = True,
        compile: bool = False,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.optimizer = optimizer or OptimizerConfig()
        self.cluster = cluster or Cluster()
        self.memory = memory or MemoryConfig()
        self.schedule = schedule or (lambda step: 1.0)
        self.micro_batch_size = micro_batch_size
        self.recompute = recompute
        self.compile = compile
        self.seed = seed
        self.last: StepResult | None = None
        self._engine: Streamed | None = None
        self._closer: Callable[[], object] = lambda: None  # gives back what the engine stands on
        self._is_closed = False
        self._example: MicroBatch | None = None  # the first micro-batch: what the model was captured with
        self._eval_graph: Graph | None = None
        self._resumed: checkpoint.Checkpoint | None = None
        if not isinstance(self.optimizer, OptimizerConfig):
            raise UserError(f"optimizer must be one such as ow.AdamW(lr=3e-4), got {type(self.optimizer).__name__}")
        if isinstance(schedule, ScheduleConfig):
            raise UserError("schedule must map a step to a factor: give ScheduleConfig(...).build(num_steps)")
        if micro_batch_size is not None and micro_batch_size < 1:
            raise UserError(f"micro_batch_size must be at least 1, got {micro_batch_size}")

    @property
    def num_steps_done(self) -> int:
        if self._engine is not None:
            return self._engine.num_steps_done
        return 0 if self._resumed is None else self._resumed.step

    # Training

    def step(self, batch: Batch) -> float:
        """One update; gives the mean loss of the batch. `last` has the details.

        A mapping is cut along its first dimension into micro-batches of `micro_batch_size` (on a GPU, if that is not
        given, the largest that fit); a list is taken as the micro-batches themselves. All micro-batches of a run have
        the same shapes.
        """
        micro_batches = self._micro_batches(batch)
        if self._engine is None:
            self._engine = self._start(self._resumed, batch)
            micro_batches = self._micro_batches(batch)  # they may have been made smaller
        with timeline.step(self.num_steps_done + 1):
            self.last = self._engine.step(micro_batches)
        return self.last.loss

    def fit(
        self,
        train_data: Iterable[Batch],
        num_steps: int | None = None,
        on_step: Callable[[int, StepResult], None] | None = None,
    ) -> list[float]:
        """Steps over the batches of `train_data`, again from its start when it ends; gives the losses.

        Without `num_steps`, one pass. `on_step` is called with the number of steps done and the step's result.
        """
        if num_steps is not None and num_steps < 0:
            raise UserError(f"num_steps must be at least 0, got {num_steps}")
        losses: list[float] = []
        for batch in _repeated(train_data, num_steps):
            losses.append(self.step(batch))
            if on_step is not None and self.last is not None:
                on_step(self.num_steps_done, self.last)
        return losses

    def evaluate(self, batch: Batch) -> float:
        """The mean loss of a batch in eval mode (no dropout); nothing is changed."""
        if self._engine is None:
            raise UserError("nothing was trained yet: take a step before evaluating")
        micro_batches = self._micro_batches(batch)
        if self._eval_graph is None:
            self._eval_graph = self._capture(micro_batches[0], training=False)
        return self._engine.evaluate(micro_batches, self._eval_graph)

    def _micro_batches(self, batch: Batch) -> list[MicroBatch]:
        if self._is_closed:
            raise UserError("this trainer is closed: make another one, and load what was saved")
        if not isinstance(batch, Mapping):
            if (
                isinstance(batch, Tensor)
                or not batch
                or not all(isinstance(micro_batch, Mapping) for micro_batch in batch)
            ):
                raise UserError("a batch is a mapping of names to tensors, or a list of such micro-batches, not empty")
            return [self._in_order(micro_batch) for micro_batch in batch]
        sizes = {name: value.shape[0] for name, value in batch.items() if isinstance(value, Tensor) and value.dim()}
        size = self.micro_batch_size
        if size is None or not sizes:
            return [self._in_order(batch)]
        if len(set(sizes.values())) > 1:
            raise UserError(f"the entries of a batch differ in their first dimension: {sizes}")
        total = next(iter(sizes.values()))
        if total % size:
            raise UserError(f"micro_batch_size {size} does not divide the batch of {total} samples")
        return [
            self._in_order({n: value[start : start + size] if n in sizes else value for n, value in batch.items()})
            for start in range(0, total, size)
        ]

    def _in_order(self, batch: MicroBatch) -> MicroBatch:
        """The entries as the first batch had them: the captured model knows its inputs by their places."""
        names = list(batch) if self._example is None else list(self._example)
        if batch.keys() != set(names):
            raise UserError(f"a batch has the entries {sorted(batch)}, the first one had {sorted(names)}")
        # One tensor may be given under two names, as ids and labels often are; the model has an input for each.
        return {n: batch[n].view_as(batch[n]) if isinstance(batch[n], Tensor) else batch[n] for n in names}

    # State

    def save(self, model_dir: str | Path, *, tokenizer: Path | None = None, keep: int | None = 3) -> Path:
        """Write a checkpoint of this step into `model_dir`; gives its folder."""
        if self._engine is None:
            raise UserError("nothing was trained yet: take a step before saving")
        meta: dict[str, Any] = {
            "trainer": {
                "optimizer": self.optimizer.kind,
                "model": type(self.model).__name__,
                "micro_batch_size": self.micro_batch_size,
            }
        }
        config = getattr(self.model, "config", None)
        if isinstance(config, ModelConfig):  # one of ours: it can be served and exported
            meta["params"] = {"model": dataclasses.asdict(config)}
        tensors = self._engine.tensors()
        return checkpoint.save(Path(model_dir), self.num_steps_done, tensors, meta, tokenizer=tokenizer, keep=keep)

    def load(self, folder: str | Path) -> None:
        """Go on from a checkpoint: a folder that `save` gave, or the newest in a model_dir."""
        path = Path(folder)
        newest = path if (path / "manifest.json").is_file() else checkpoint.latest(path)
        if newest is None:
            raise UserError(f"{folder} has no whole checkpoint")
        self._resumed = checkpoint.Checkpoint.open(newest)
        if self._engine is not None:
            self._closer()
            self._engine = self._start(self._resumed)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight and buffer by name, one at a time; each is valid until the next is asked for."""
        if self._engine is not None:
            source = self._engine.tensors()
        elif self._resumed is not None:
            stored = self._resumed
            source = ((name, stored.read(name)) for name in stored.names())
        else:
            yield from initialise(self.model, _names(self.model), self.seed)
            return
        for name, tensor in source:
            group, _, rest = name.partition("/")
            if group in ("weights", "buffers"):
                yield rest, tensor

    def state_dict(self) -> dict[str, Tensor]:
        """The current values as the module's own `state_dict` names them: a tied weight under all its names."""
        found = {name: tensor.clone() for name, tensor in self.weights()}
        aliases: dict[int, list[str]] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            aliases.setdefault(id(tensor), []).append(name)
        unused = [names[0] for names in aliases.values() if not any(name in found for name in names)]
        found |= dict(initialise(self.model, unused, self.seed))  # what the forward never reads
        return {
            alias: found[next(name for name in names if name in found)] for names in aliases.values() for alias in names
        }

    def _capture(self, micro_batch: MicroBatch, *, training: bool) -> Graph:
        graph = capture(self.model.train(training), (), dict(micro_batch), dtype=DTYPES[self.cluster.precision])
        return compiled(graph, torch.device(self.cluster.device)) if self.compile else graph

    def _start(self, stored: checkpoint.Checkpoint | None, first: Batch | None = None) -> Streamed:
        """An engine, from a checkpoint if there is one; `first` is the first batch, unless one was seen before."""
        settings = {} if stored is None else stored.meta.get("trainer", {})
        kind = settings.get("optimizer", self.optimizer.kind)
        if stored is not None and kind != self.optimizer.kind:
            raise UserError(
                f"{stored.folder} was trained with the optimizer {kind}, not {self.optimizer.kind}, whose state it has "
                f"not: load it into a Trainer with OptimizerConfig(kind={kind!r})"
            )
        workers = self._workers()
        try:
            if first is not None:
                if isinstance(workers, GpuWorker | GpuWorkers):
                    self._fit_micro_batch(workers, first, settings.get("micro_batch_size"))
                micro_batches = self._micro_batches(first)
                self._example, self._num_micro_batches = micro_batches[0], len(micro_batches)
            assembly = Assembly(self._plan(workers), workers, stored)
        except BaseException:
            if workers is not None:
                workers.close()
            raise
        # Processes, and files of the flash tier, go with the trainer, also when nobody closes it.
        self._closer = weakref.finalize(self, _close, assembly, workers)
        return assembly.engine

    def _plan(self, workers: Workers | None) -> Plan:
        assert self._example is not None
        graph = with_groups(self._capture(self._example, training=True), self.optimizer.groups)
        if isinstance(workers, GpuWorker | GpuWorkers):
            check_shares(self._num_micro_batches, self.cluster.num_csx)
            workers.check(graph, self._num_micro_batches)
        return Plan(
            graph=graph,
            module=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            memory=self.memory,
            precision=self.cluster.precision,
            seed=self.seed,
            options={"recompute": self.recompute},
        )

    def _workers(self) -> Workers | None:
        cluster, swarm = self.cluster, SwarmConfig(csx_threads=self.cluster.csx_threads)
        if cluster.device == "cuda" and cluster.num_csx == 1:
            return GpuWorker(cluster.device_memory, self.optimizer, recompute=self.recompute)
        if cluster.device == "cuda":
            return GpuWorkers(cluster.num_csx, swarm, cluster.device_memory, recompute=self.recompute)
        return LocalWorkers(cluster.num_csx, swarm) if cluster.num_csx > 1 else None

    def _fit_micro_batch(self, workers: GpuWorker | GpuWorkers, batch: Batch, before: int | None) -> None:
        """Unless it was given: the size that the run began with (another would change its bits), or what fits."""
        if self.micro_batch_size is not None or not isinstance(batch, Mapping):
            return
        sizes = {len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim()}
        if len(sizes) != 1:  # nothing to cut along
            return
        num_samples = sizes.pop()
        if num_samples < self.cluster.num_csx:
            raise UserError(f"a batch of {num_samples} samples is too small for num_csx {self.cluster.num_csx}")

        def graph_of(size: int) -> Graph:
            self.micro_batch_size = size
            return self._capture(self._micro_batches(batch)[0], training=True)

        try:
            size = workers.fit(graph_of, num_samples, before)
        finally:
            self.micro_batch_size = None
        self.micro_batch_size = size

    def close(self) -> None:
        """Give back memory and files. The trainer can be asked for nothing afterwards."""
        self._is_closed = True
        self._closer()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(assembly: Assembly, workers: Workers | None) -> None:
    if workers is not None:
        workers.close()
    assembly.close()


def _repeated(data: Iterable[Batch], num_steps: int | None) -> Iterator[Batch]:
    """`num_steps` batches; a collection is gone through again and again, an iterator must have enough."""
    count = 0
    while num_steps is None or count < num_steps:
        before = count
        for batch in data:
            yield batch
            count += 1
            if count == num_steps:
                return  # before another batch is taken from an iterator
        if num_steps is None:
            return
        if count == before:
            raise UserError(f"train_data ended after {count} of {num_steps} batches: give a list, or a longer iterator")


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_buffers()]
