"""What the training engines give: the result of a step, the state that a checkpoint holds, a mean loss."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from openwafer.csx.loss import LossNames
from openwafer.csx.worker import MicroBatch
from openwafer.errors import UserError

__all__ = ["Frozen", "MicroBatch", "StepResult", "mean_loss"]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step reports."""

    loss: float  # mean over the global batch
    grad_norm: float  # before clipping
    lr: float
    skipped: bool = False  # the step was vetoed: nothing was changed


@dataclass(frozen=True)
class Frozen:
    """The state at one moment: what an engine's `tensors` gave then, for another thread. `close` must be called."""

    tensors: Iterator[tuple[str, Tensor]]
    close: Callable[[], None]


def mean_loss(names: LossNames, results: Iterable[dict[str, Tensor]]) -> float:
    """Mean over the values of several micro-batches."""
    losses, counts = [], []
    for values in results:
        losses.append(values[names.loss].item())
        counts.append(1 if names.count is None else int(values[names.count].item()))
    if sum(counts) == 0:
        raise UserError("the batches have no label to evaluate (count 0)")
    return math.fsum(losses) / sum(counts)
