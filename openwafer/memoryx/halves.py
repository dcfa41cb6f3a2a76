"""Updates of weights that are kept as a bf16 wire and a 16-bit remainder."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from openwafer.errors import UserError
from openwafer.kernels.adamw import AdamWStep, Halves, adamw, adamw_reference
from openwafer.memoryx.optimizer import AdamW, Optimizer
from openwafer.memoryx.update import UpdateNumbers
from openwafer.memoryx.wire import merge, split


class Item(NamedTuple):
    """One weight of a Unit, in its own shape, with its summed gradient and its state."""

    wire: Tensor
    remainder: Tensor
    gradient: Tensor
    state: Mapping[str, Tensor]


def update_halves(optimizer: Optimizer, items: Sequence[Item], numbers: UpdateNumbers) -> None:
    """A Unit's weights in place. AdamW has a kernel of its own; any other works on the merged fp32 master."""
    if isinstance(optimizer, AdamW):
        _adamw(optimizer, items, numbers)
        return
    for item in items:
        master = merge(item.wire, item.remainder)
        optimizer.update(master, scaled(item.gradient, numbers), item.state, lr=numbers.lr, step=numbers.step)
        wire, remainder = split(master)
        item.wire.copy_(wire)
        item.remainder.copy_(remainder)


def _adamw(optimizer: AdamW, items: Sequence[Item], numbers: UpdateNumbers) -> None:
    config = optimizer.config
    step = AdamWStep(
        lr=numbers.lr,
        beta1=config.beta1,
        beta2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        step=numbers.step,
        divisor=float(numbers.divisor),
        factor=1.0 if numbers.factor is None else numbers.factor,
    )
    weights = [
        Halves(
            *(t.view(-1) for t in (item.wire, item.remainder, item.state["m"], item.state["v"], item.gradient)),
            decays=item.wire.dim() >= 2,
        )
        for item in items
    ]
    if items[0].wire.is_cuda:  # there the definition runs: the same bits as the C pass on the host
        is_finite = all([adamw_reference(weight, step) for weight in weights])
    else:
        is_finite = adamw(weights, step)
    if not is_finite:
        raise UserError(
            f"step {numbers.step}: an update made a weight non-finite: this run cannot go on; the last "
            "checkpoint is intact, resume from it with a lower learning rate or with clipping"
        )


def scaled(gradient: Tensor, numbers: UpdateNumbers) -> Tensor:
    """The gradient as the optimizer sees it: fp32, divided, and clipped if need be."""
    mean = gradient.float() / numbers.divisor
    return mean if numbers.factor is None else mean * numbers.factor
