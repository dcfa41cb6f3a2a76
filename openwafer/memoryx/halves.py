"""Updates of weights that are kept as a bf16 wire and a 16-bit remainder."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from openwafer.errors import UserError
from openwafer.kernels.adamw import AdamWStep, Halves, adamw, adamw_reference
from openwafer.memoryx.optimizer import Optimizer
from openwafer.memoryx.optimizers.adam import AdamW
from openwafer.memoryx.update import UpdateNumbers
from openwafer.memoryx.wire import merge, split


class Item(NamedTuple):
    """One weight of a Unit, in its own shape, with its summed gradient and its state."""

    name: str
    wire: Tensor
    remainder: Tensor
    gradient: Tensor
    state: Mapping[str, Tensor]


def can_go_elsewhere(optimizer: Optimizer) -> bool:
    """Whether `update_halves` can leave the old state as it is."""
    return isinstance(optimizer.rule, AdamW) and optimizer.state_dtype == torch.float32


def update_halves(
    optimizer: Optimizer, items: Sequence[Item], numbers: UpdateNumbers, *, to: Sequence[Item] | None = None
) -> None:
    """A Unit's weights, in place or into those of `to`. AdamW has a kernel of its own; any other works in place on
    the merged fp32 master."""
    if can_go_elsewhere(optimizer) and numbers.max_value is None:
        targets = items if to is None else to
        for lr_scale in sorted({optimizer.lr_scale(item.name) for item in items}):
            pairs = [p for p in zip(items, targets, strict=True) if optimizer.lr_scale(p[0].name) == lr_scale]
            _adamw(optimizer, pairs, lr_scale, numbers)
        return
    assert to is None
    for item in items:
        master = merge(item.wire, item.remainder)
        mean = scaled(item.gradient, numbers)
        optimizer.update(item.name, master, mean, item.state, lr=numbers.lr, step=numbers.step)
        wire, remainder = split(master)
        item.wire.copy_(wire)
        item.remainder.copy_(remainder)


def _adamw(optimizer: Optimizer, pairs: Sequence[tuple[Item, Item]], lr_scale: float, numbers: UpdateNumbers) -> None:
    options = optimizer.config.options
    step = AdamWStep(
        lr=numbers.lr * lr_scale,
        beta1=options["beta1"],
        beta2=options["beta2"],
        eps=options["eps"],
        step=numbers.step,
        divisor=numbers.divisor,
        factor=1.0 if numbers.factor is None else numbers.factor,
    )
    # All in one type: a weight with several uses has an fp32 sum although others are bf16.
    dtype = max((item.gradient.dtype for item, _ in pairs), key=lambda dtype: dtype.itemsize)
    pairs = [(item._replace(gradient=item.gradient.to(dtype)), target) for item, target in pairs]
    weights, targets = ([_halves(optimizer, pair[place]) for pair in pairs] for place in (0, 1))
    if pairs[0][0].wire.is_cuda:  # there the definition runs: the same bits as the C pass on the host
        is_finite = all([adamw_reference(weight, step) for weight in weights])
    else:
        is_finite = adamw(weights, step, to=targets)
    if not is_finite:
        raise UserError(
            f"step {numbers.step}: an update made a weight non-finite: this run cannot go on; the last "
            "checkpoint is intact, resume from it with a lower learning rate or with clipping"
        )


def _halves(optimizer: Optimizer, item: Item) -> Halves:
    return Halves(
        item.wire.view(-1),
        item.remainder.view(-1),
        item.state["m"].view(-1),
        item.state["v"].view(-1),
        item.gradient.view(-1),
        optimizer.decay(item.name, item.wire),
    )


def scaled(gradient: Tensor, numbers: UpdateNumbers) -> Tensor:
    """The gradient as the optimizer sees it: fp32, divided, and limited if need be."""
    mean = gradient.float() / numbers.divisor
    if numbers.max_value is not None:
        return mean.clamp_(-numbers.max_value, numbers.max_value)
    return mean if numbers.factor is None else mean * numbers.factor
