"""What a training engine is: one step on a global batch, evaluation, and the state a checkpoint holds."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from openwafer.csx.loss import LossNames
from openwafer.csx.worker import MicroBatch
from openwafer.errors import UserError
from openwafer.graph import Graph

__all__ = ["Engine", "Frozen", "MicroBatch", "StepResult", "mean_loss"]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step reports."""

    loss: float  # mean over the global batch
    grad_norm: float  # before clipping
    lr: float
    skipped: bool = False  # the step was vetoed: nothing was changed


@dataclass(frozen=True)
class Frozen:
    """The state at one moment: what `Engine.tensors` gave then, for another thread. `close` must be called."""

    tensors: Iterator[tuple[str, Tensor]]
    close: Callable[[], None]


class Engine(Protocol):
    """The reference and the streamed trainer, seen from the loop."""

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """One update on the global batch, given as its fixed list of micro-batches."""
        ...

    def evaluate(self, micro_batches: Sequence[MicroBatch], graph: Graph) -> float:
        """Mean loss of `graph` (the model captured in eval mode) with the current weights."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """`weights/<name>`, `buffers/<name>`, `optimizer/<kind>/<name>` and `guard/state`, one at a time."""
        ...


def mean_loss(names: LossNames, results: Iterable[dict[str, Tensor]]) -> float:
    """Mean over the values of several micro-batches."""
    losses, counts = [], []
    for values in results:
        losses.append(values[names.loss].item())
        counts.append(1 if names.count is None else int(values[names.count].item()))
    if sum(counts) == 0:
        raise UserError("the batches have no label to evaluate (count 0)")
    return math.fsum(losses) / sum(counts)
