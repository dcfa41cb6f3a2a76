"""Updates of weights that are kept as a bf16 wire and a 16-bit remainder."""

from collections.abc import Mapping

from torch import Tensor

from openwafer.errors import UserError
from openwafer.kernels.adamw import AdamWStep, adamw, adamw_reference
from openwafer.memoryx.optimizer import AdamW, Optimizer
from openwafer.memoryx.update import UpdateNumbers
from openwafer.memoryx.wire import merge, split


def update_halves(
    optimizer: Optimizer,
    wire: Tensor,
    remainder: Tensor,
    gradient: Tensor,
    state: Mapping[str, Tensor],
    numbers: UpdateNumbers,
) -> None:
    """One weight in place. AdamW has a kernel of its own; any other works on the merged fp32 master."""
    if isinstance(optimizer, AdamW):
        config = optimizer.config
        step = AdamWStep(
            lr=numbers.lr,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay if wire.dim() >= 2 else 0.0,
            step=numbers.step,
            divisor=float(numbers.divisor),
            factor=1.0 if numbers.factor is None else numbers.factor,
        )
        m, v = state["m"].view(-1), state["v"].view(-1)
        # On a device the definition runs: the same bits as the C pass on the host.
        pass_over = adamw_reference if wire.is_cuda else adamw
        is_finite = pass_over(wire.view(-1), remainder.view(-1), m, v, gradient.view(-1), step)
        if not is_finite:
            raise UserError(
                f"step {numbers.step}: an update made a weight non-finite: this run cannot go on; the last "
                "checkpoint is intact, resume from it with a lower learning rate or with clipping"
            )
        return
    master = merge(wire, remainder)
    optimizer.update(master, scaled(gradient, numbers), state, lr=numbers.lr, step=numbers.step)
    new_wire, new_remainder = split(master)
    wire.copy_(new_wire)
    remainder.copy_(new_remainder)


def scaled(gradient: Tensor, numbers: UpdateNumbers) -> Tensor:
    """The gradient as the optimizer sees it: fp32, divided, and clipped if need be."""
    mean = gradient.float() / numbers.divisor
    return mean if numbers.factor is None else mean * numbers.factor
