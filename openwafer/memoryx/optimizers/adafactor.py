"""Adafactor: the second moment of a matrix as one number per row and one per column.

As torch.optim.Adafactor. Its sums are folded in a fixed order (`folded_sum`), because torch's own depend on
how columns are dealt to threads.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from openwafer.kernels.squares import square_sums
from openwafer.memoryx.norm import global_norm
from openwafer.memoryx.optimizers.rule import Shape

_DECAY = 0.8  # the second moment forgets at 1 - step ** -this
_LARGEST_UPDATE = 1.0  # root mean square that an update is cut down to
_TINY = torch.finfo(torch.float32).eps


class Adafactor:
    """Steps are relative to the weight's own size, which counts as at least `eps`."""

    def __init__(self, *, eps: float) -> None:
        self.eps = eps

    def state_shapes(self, shape: Shape) -> dict[str, Shape]:
        if len(shape) < 2:
            return {"v": shape}
        return {"row": (*shape[:-1], 1), "col": (*shape[:-2], 1, shape[-1])}

    def update(
        self,
        weight: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        *,
        lr: float,
        weight_decay: float,
        step: int,
    ) -> None:
        size = max(self.eps, _root_mean_square(weight)) * min(lr, step**-0.5)
        if weight_decay:
            weight.mul_(1.0 - lr * weight_decay)
        moment = _second_moment(gradient.square(), state, share=step**-_DECAY)
        update = gradient.div(moment.clamp_(min=_TINY * _TINY).sqrt_())
        size /= max(1.0, _root_mean_square(update) / _LARGEST_UPDATE)
        weight.sub_(update.mul_(size))


def _second_moment(squares: Tensor, state: Mapping[str, Tensor], share: float) -> Tensor:
    """Takes `squares` in (it is used up) and gives the estimate, which the caller may change."""
    if squares.dim() < 2:
        return _blend(state["v"], squares, share).clone()
    num_rows, num_columns = squares.shape[-2:]
    rows = _blend(state["row"], folded_sum(squares.clone(), dim=-1).div_(num_columns), share)
    columns = _blend(state["col"], folded_sum(squares, dim=-2).div_(num_rows), share)
    mean = folded_sum(rows.clone(), dim=-2).div_(num_rows).clamp_(min=_TINY)
    return (rows * columns).div_(mean)


def _blend(old: Tensor, new: Tensor, share: float) -> Tensor:
    return old.mul_(1.0 - share).add_(new.mul_(share))


def folded_sum(values: Tensor, dim: int) -> Tensor:
    """Sum along `dim`, which stays with size 1: the upper half is added to the lower until one is left.

    Works in place. Each addition is of single elements, so the result depends on the shape alone.
    """
    size = values.shape[dim]
    while size > 1:
        half = (size + 1) // 2
        values.narrow(dim, 0, size - half).add_(values.narrow(dim, half, size - half))
        size = half
    return values.narrow(dim, 0, 1).clone()


def _root_mean_square(values: Tensor) -> float:
    return global_norm([square_sums(values)]) / math.sqrt(values.numel())
