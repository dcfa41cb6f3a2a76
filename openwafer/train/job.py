"""A training run from start to end: build, capture, resume, step, measure, save.

The same command continues an interrupted run from its last checkpoint.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from openwafer import checkpoint
from openwafer.data.batches import Batches
from openwafer.data.config import DataConfig
from openwafer.data.prepare import folder_of
from openwafer.data.shards import Shards
from openwafer.errors import UserError
from openwafer.graph import Graph, capture
from openwafer.graph.deferred import deferred, initialise
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.train.adamw import AdamState
from openwafer.train.config import OptimizerConfig, TrainConfig
from openwafer.train.metrics import MetricsLog, StepMetrics
from openwafer.train.progress import ProgressDisplay
from openwafer.train.reference import MicroBatch, Reference, State
from openwafer.train.schedule import ScheduleConfig


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """The sections of a params file that a run needs, and the file itself as plain values."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
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

    def __init__(self, config: JobConfig) -> None:
        train = config.train
        if train.device == "cuda":
            raise UserError("device cuda: training on a GPU does not work yet; use --device cpu")
        self.config = config
        folder = folder_of(config.data, config.model.vocab_size)
        self.train_shards = Shards.open(folder, "train", verify=config.data.verify)
        context = config.data.context or config.model.max_position_embeddings
        if context > config.model.max_position_embeddings:
            raise UserError(
                f"context {context} is longer than the model's max_position_embeddings "
                f"{config.model.max_position_embeddings}: shorten the one or raise the other"
            )
        self.batches = Batches(self.train_shards, context, train.batch_size, seed=train.seed)
        self.val_shards = folder
        self.context = context
        with deferred():
            self.module = build(config.model)
        self.graph = self._capture(training=True)
        self.resumed = checkpoint.latest(train.model_dir)
        self.engine = Reference(
            graph=self.graph,
            state=self._state(),
            config=config.optimizer,
            schedule=config.schedule.build(train.num_steps),
            seed=train.seed,
        )

    def run(self) -> JobResult:
        """What `mode` asks for."""
        self._announce()
        if self.config.train.mode == "eval":
            return self._result(None, self._evaluate(), None)
        return self._fit()

    def _fit(self) -> JobResult:
        train, state = self.config.train, self.engine.state
        loss = eval_loss = rate = None
        saved_step = state.step if self.resumed else None
        with (
            MetricsLog(train.model_dir, resumed_step=state.step) as log,
            ProgressDisplay(train.num_steps, start=state.step, every=train.log_every) as display,
            _interruptible() as interrupted,
        ):
            while state.step < train.num_steps and not interrupted:
                began = time.perf_counter()
                result = self.engine.step(self._micro_batches(self.batches, state.step))
                loss, rate = result.loss, train.batch_size * self.context / (time.perf_counter() - began)
                eval_loss = self._evaluate() if self._is_due(train.eval_every) else None
                metrics = StepMetrics(
                    step=state.step,
                    loss=loss,
                    grad_norm=result.grad_norm,
                    lr=result.lr,
                    tokens_per_s=rate,
                    time=time.time(),
                    eval_loss=eval_loss,
                )
                log.write(metrics)
                display.update(metrics)
                if self._is_due(train.checkpoint_every):
                    self._save()
                    saved_step = state.step
            if saved_step != state.step:
                self._save()
            if interrupted:
                _say(f"interrupted after step {state.step}; it is saved, and the same command goes on from there")
                raise KeyboardInterrupt
        if train.mode == "train_and_eval" and eval_loss is None:
            eval_loss = self._evaluate()
        return self._result(loss, eval_loss, rate)

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.engine.state.step % every == 0

    def _result(self, loss: float | None, eval_loss: float | None, rate: float | None) -> JobResult:
        return JobResult(
            step=self.engine.state.step,
            loss=loss,
            eval_loss=eval_loss,
            tokens_per_s=rate,
            checkpoint=checkpoint.latest(self.config.train.model_dir),
        )

    # Model and state

    def _capture(self, training: bool) -> Graph:
        ids = torch.zeros(self.config.train.micro_batch, self.context, dtype=torch.int64, device="meta")
        return capture(self.module.train(training), (), {"input_ids": ids, "labels": ids.clone()})

    def _state(self) -> State:
        """From the last checkpoint if there is one, else the model's own initialisation."""
        buffers = [name for name in self.graph.buffers if name not in self.graph.constants]
        if self.resumed is None:
            return State(
                weights=dict(initialise(self.module, self.graph.weights, self.config.train.seed)),
                buffers=dict(initialise(self.module, buffers, self.config.train.seed)),
            )
        stored = checkpoint.Checkpoint.open(self.resumed)
        self._check_same_model(stored)
        return State(
            weights={name: stored.read(f"weights/{name}") for name in self.graph.weights},
            buffers={name: stored.read(f"buffers/{name}") for name in buffers},
            optimizer={
                name: AdamState(stored.read(f"optimizer/m/{name}"), stored.read(f"optimizer/v/{name}"))
                for name, weight in self.graph.weights.items()
                if weight.requires_grad
            },
            step=stored.step,
        )

    def _check_same_model(self, stored: checkpoint.Checkpoint) -> None:
        before, now = stored.meta["params"]["model"], self.config.params["model"]
        changed = [key for key in now if now[key] != before.get(key)]
        if changed:
            key = changed[0]
            raise UserError(
                f"{self.resumed} holds another model ({key} was {before.get(key)}, is {now[key]}): "
                "use another --model_dir, or the params it was trained with"
            )

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        state = self.engine.state
        yield from ((f"weights/{name}", tensor) for name, tensor in state.weights.items())
        yield from ((f"buffers/{name}", tensor) for name, tensor in state.buffers.items())
        yield from ((f"optimizer/m/{name}", adam.m) for name, adam in state.optimizer.items())
        yield from ((f"optimizer/v/{name}", adam.v) for name, adam in state.optimizer.items())

    def _save(self) -> None:
        train = self.config.train
        checkpoint.save(
            train.model_dir,
            self.engine.state.step,
            self._tensors(),
            {"params": self.config.params},
            tokenizer=self.train_shards.tokenizer,
            keep=train.keep_checkpoints,
        )

    # Data

    def _micro_batches(self, batches: Batches, step: int) -> list[MicroBatch]:
        arrays = batches.at(step)
        size = self.config.train.micro_batch
        return [
            {key: torch.from_numpy(array[start : start + size]) for key, array in arrays.items()}
            for start in range(0, batches.batch_size, size)
        ]

    def _evaluate(self) -> float:
        """Mean loss over the same held-out batches every time."""
        if not hasattr(self, "_eval_graph"):
            self._eval_graph = self._capture(training=False)
            val = Shards.open(self.val_shards, "val", verify=self.config.data.verify)
            batches = Batches(val, self.context, self.config.train.batch_size, seed=0)
            steps = range(self.config.train.eval_batches)
            self._eval_data = [mb for step in steps for mb in self._micro_batches(batches, step)]
        return self.engine.evaluate(self._eval_data, self._eval_graph)

    def _announce(self) -> None:
        train, graph = self.config.train, self.graph
        _say(
            f"{graph.num_parameters:,} parameters in {len(graph.units)} Units ({len(graph.functions)} distinct), "
            f"{train.batch_size} x {self.context} tokens per step, on {train.device}"
        )
        if self.resumed is not None:
            _say(f"resuming from {self.resumed}")


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
