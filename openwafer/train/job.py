"""A training run from start to end: build, capture, resume, step, measure, save.

The same command continues an interrupted run from its last checkpoint.
"""

import contextlib
import json
import math
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from openwafer import checkpoint, timeline
from openwafer.data.batches import Batches
from openwafer.data.config import DataConfig
from openwafer.data.prepare import folder_of
from openwafer.data.shards import Shards
from openwafer.errors import UserError
from openwafer.graph import Graph
from openwafer.graph.compiled import compiled
from openwafer.graph.deferred import deferred
from openwafer.memoryx.config import MemoryConfig, OptimizerConfig
from openwafer.memoryx.groups import with_groups
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.swarmx.config import SwarmConfig
from openwafer.train.assembly import Assembly, Plan
from openwafer.train.config import TraceConfig, TrainConfig
from openwafer.train.engine import MicroBatch
from openwafer.train.gpu import GpuWorker
from openwafer.train.gpu_workers import GpuWorkers
from openwafer.train.metrics import MetricsLog, StepMetrics
from openwafer.train.network_workers import NetworkWorkers
from openwafer.train.progress import ProgressDisplay
from openwafer.train.resume import changes
from openwafer.train.saver import Saver
from openwafer.train.schedule import ScheduleConfig
from openwafer.train.swarm import Swarm
from openwafer.train.text_model import DTYPES, capture_text_model, context_of
from openwafer.train.workers import LocalWorkers


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """The sections of a params file that a run needs, and the file itself as plain values."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    memoryx: MemoryConfig = field(default_factory=MemoryConfig)
    swarmx: SwarmConfig = field(default_factory=SwarmConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    params: dict[str, Any]  # stored in checkpoints, so that they can be served and compared


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """How a run ended."""

    step: int
    loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    checkpoint: Path | None


class Job:
    """One run in one model_dir."""

    def __init__(self, config: JobConfig, workers: LocalWorkers | GpuWorker | NetworkWorkers | None = None) -> None:
        """`workers` compute, where it is not simply this process on the CPU; whoever made them closes them."""
        train = config.train
        self.workers = workers
        self.config = config
        folder = folder_of(config.data, config.model.vocab_size)
        self.train_shards = Shards.open(folder, "train", verify=config.data.verify)
        context = context_of(config.model, config.data)
        self.batches = Batches(self.train_shards, context, train.batch_size, seed=train.seed)
        self.data_folder = folder
        self.context = context
        with deferred():
            self.module = build(config.model)
        self.resumed = workers.resumed if isinstance(workers, NetworkWorkers) else checkpoint.latest(train.model_dir)
        if train.mode == "eval" and self.resumed is None:
            raise UserError(
                f"{train.model_dir} has no checkpoint to evaluate: train first, or name another --model_dir"
            )
        stored = None if self.resumed is None else checkpoint.Checkpoint.open(self.resumed)
        self.kept_meta: dict[str, Any] = {}  # what came with imported weights
        if stored is not None:
            for line in changes(str(self.resumed), stored.step, stored.meta["params"], config.params):
                _say(line)
            self._check_same_tokens(stored)
            self.kept_meta = {key: value for key, value in stored.meta.items() if key != "params"}
        self.micro_batch = self._micro_batch(stored)
        self.graph = with_groups(self._capture(self.micro_batch), config.optimizer.groups)
        plan = Plan(
            graph=self.graph,
            module=self.module,
            optimizer=config.optimizer,
            schedule=config.schedule.build(train.num_steps),
            memory=config.memoryx,
            precision=train.precision,
            seed=train.seed,
            options={"recompute": train.recompute},
            saves_while_training=train.mode != "eval" and train.checkpoint_every is not None,
            part=workers.part(self.graph, config.optimizer) if isinstance(workers, NetworkWorkers) else None,
        )
        self.assembly = Assembly(plan, workers, stored)
        self.engine = self.assembly.engine

    def run(self) -> JobResult:
        """What `mode` asks for; afterwards the job is over."""
        try:
            self._announce()
            if self.config.train.mode == "eval":
                return self._result(None, self._evaluate(), None)
            return self._fit()
        finally:
            self.assembly.close()

    def _fit(self) -> JobResult:
        train, engine = self.config.train, self.engine
        loss = eval_loss = rate = None
        saver = Saver(self._save, _say)
        saver.saved_step = engine.num_steps_done if self.resumed else None
        with (
            _closing(saver),
            MetricsLog(train.model_dir, resumed_step=engine.num_steps_done) as log,
            ProgressDisplay(
                train.num_steps,
                start=engine.num_steps_done,
                every=train.log_every,
                workers=engine.swarm.lines if isinstance(engine.swarm, Swarm) else tuple,
            ) as display,
            self._timeline() as times,
            _interruptible() as interrupted,
        ):
            while engine.num_steps_done < train.num_steps and not interrupted:
                with times.step(engine.num_steps_done + 1) as spent:
                    with times.span(timeline.DATA, "batch"):
                        micro_batches = self._micro_batches(self.batches, engine.num_steps_done)
                    result = engine.step(micro_batches)
                loss, rate = result.loss, train.batch_size * self.context / spent.seconds
                eval_loss = self._evaluate() if self._is_due(train.eval_every) else None
                metrics = StepMetrics(
                    step=engine.num_steps_done,
                    loss=loss,
                    grad_norm=result.grad_norm,
                    lr=result.lr,
                    tokens_per_s=rate,
                    time=time.time(),
                    skipped=result.skipped,
                    eval_loss=eval_loss,
                    **self._traffic(),
                    step_s=spent.seconds,
                    spent_s=spent.by_lane,
                )
                log.write(metrics)
                display.update(metrics)
                saver.poll()
                if self._is_due(train.checkpoint_every):
                    saver.start(engine.num_steps_done, engine.freeze)
            saver.wait()
            if saver.saved_step != engine.num_steps_done:
                saver.save_now(engine.num_steps_done, engine.freeze)
            if interrupted:
                step = engine.num_steps_done
                _say(f"interrupted after step {step}; it is saved, and the same command goes on from there")
                raise KeyboardInterrupt
        if train.mode == "train_and_eval" and eval_loss is None:
            eval_loss = self._evaluate()
        return self._result(loss, eval_loss, rate)

    def _traffic(self) -> dict[str, Any]:
        """What went over the fabric in the last step."""
        swarm = self.engine.swarm
        if swarm is None or swarm.report is None:
            return {}
        report = swarm.report
        return {"broadcast_bytes": report.broadcast_bytes, "reduced_bytes": report.reduced_bytes, "csx": report.csx}

    def _timeline(self) -> timeline.Timeline:
        steps = self.config.trace.trace_steps or (None,)
        return timeline.Timeline(self.config.trace.trace, steps[0], steps[-1])

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.engine.num_steps_done % every == 0

    def _result(self, loss: float | None, eval_loss: float | None, rate: float | None) -> JobResult:
        return JobResult(
            step=self.engine.num_steps_done,
            loss=loss if loss is not None and math.isfinite(loss) else None,  # a skipped step may have none
            eval_loss=eval_loss,
            tokens_per_s=rate,
            checkpoint=checkpoint.latest(self.config.train.model_dir),
        )

    # Model and state

    def _capture(self, micro_batch: int, *, training: bool = True) -> Graph:
        train = self.config.train
        graph = capture_text_model(self.module, micro_batch, self.context, DTYPES[train.precision], training=training)
        computes = not isinstance(self.workers, NetworkWorkers)  # a store does not
        return compiled(graph, torch.device(train.device)) if train.compile and computes else graph

    def _micro_batch(self, stored: checkpoint.Checkpoint | None) -> int:
        """The given one, the one the run began with (another would change its bits), or what fits the device."""
        train = self.config.train
        if not isinstance(self.workers, GpuWorker | GpuWorkers):
            return train.micro_batch
        before = {} if stored is None else stored.meta["params"].get("train", {})
        # What was found before a worker was lost is among our params.
        size = train.micro_batch_size or self.config.params.get("train", {}).get("micro_batch_size")
        if size is None and before.get("batch_size") == train.batch_size:
            size = before.get("micro_batch_size")
        size = self.workers.fit(self._capture, train.batch_size, size)
        self.config.params.setdefault("train", {})["micro_batch_size"] = size
        return size

    def _check_same_tokens(self, stored: checkpoint.Checkpoint) -> None:
        """A model goes on with the tokens it knows: others would be noise to it."""
        ours, theirs = stored.tokenizer, self.train_shards.tokenizer
        if ours is not None and theirs is not None and _vocabulary(ours) != _vocabulary(theirs):
            raise UserError(
                f"{self.data_folder} was prepared with another tokenizer than that of {self.resumed}: "
                f"prepare the text with `openwafer data prepare --tokenizer {ours} ...`"
            )

    def _save(self, step: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Path:
        train = self.config.train
        return checkpoint.save(
            train.model_dir,
            step,
            tensors,
            {"params": self.config.params, **self.kept_meta},
            tokenizer=self.train_shards.tokenizer,
            keep=train.keep_checkpoints,
        )

    # Data

    def _micro_batches(self, batches: Batches, step: int) -> list[MicroBatch]:
        arrays = batches.at(step)
        size = self.micro_batch
        return [
            {key: torch.from_numpy(array[start : start + size]) for key, array in arrays.items()}
            for start in range(0, batches.batch_size, size)
        ]

    def _evaluate(self) -> float:
        """Mean loss over the same held-out batches every time."""
        if not hasattr(self, "_eval_graph"):
            self._eval_graph = self._capture(self.micro_batch, training=False)
            val = Shards.open(self.data_folder, "val", verify=self.config.data.verify)
            batches = Batches(val, self.context, self.config.train.batch_size, seed=0)
            steps = range(self.config.train.eval_batches)
            self._eval_data = [mb for step in steps for mb in self._micro_batches(batches, step)]
        return self.engine.evaluate(self._eval_data, self._eval_graph)

    def _announce(self) -> None:
        train, graph = self.config.train, self.graph
        _say(
            f"{graph.num_parameters:,} parameters in {len(graph.units)} Units ({len(graph.functions)} distinct), "
            f"{train.batch_size} x {self.context} tokens per step of {self.data_folder}, on {train.device}"
        )
        if train.compile:
            _say(f"compiling {len(graph.functions)} Unit functions: the first step takes longer")
        if self.config.memoryx.flash is not None and self.config.memoryx.dram is None:
            _say("all weights and optimizer state are in DRAM: --flash is used when --dram limits that, as in 20GiB")
        if isinstance(self.workers, LocalWorkers | NetworkWorkers):
            _say(f"{self.workers.num_csx} workers with {self.workers.threads} threads each")
        is_gpu = isinstance(self.workers, GpuWorker | GpuWorkers)
        if isinstance(self.workers, GpuWorker | GpuWorkers):
            per = "" if isinstance(self.workers, GpuWorker) else f", per worker, on {self.workers.num_gpus} GPUs"
            count = train.batch_size // self.micro_batch
            _say(f"{count} micro-batches of {self.micro_batch}; {self.workers.footprint}{per}")
        if self.assembly.placement.flash or is_gpu:
            _say(str(self.assembly.placement))
        if self.resumed is not None:
            _say(f"resuming from {self.resumed}")


def _vocabulary(tokenizer: Path) -> Any:
    return json.loads(tokenizer.read_text(encoding="utf-8")).get("model", {}).get("vocab")


@contextlib.contextmanager
def _closing(saver: Saver) -> Iterator[None]:
    """A checkpoint under way is finished whatever happens to training, except when the user wants out at once."""
    try:
        yield
    except KeyboardInterrupt:
        saver.close(at_once=True)
        raise
    except BaseException:
        saver.close()
        raise
    saver.close()


@contextlib.contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Ctrl-C fills the list instead of breaking into a step; a second one breaks in."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        _say("finishing this step, then saving (Ctrl-C again to stop at once)")

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread: signals go elsewhere
        yield received
        return
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
