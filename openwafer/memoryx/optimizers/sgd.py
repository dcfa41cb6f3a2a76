"""Stochastic gradient descent with momentum: torch's fused CPU kernel, called directly."""

from collections.abc import Mapping

import torch
from torch import Tensor

from openwafer.memoryx.optimizers.rule import Shape


class SGD:
    """v = momentum v + g + decay w; w -= lr v (or lr (g + momentum v) with nesterov)."""

    def __init__(self, *, momentum: float, nesterov: bool) -> None:
        self.momentum = momentum
        self.nesterov = nesterov

    def state_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {"m": shape} if self.momentum else {}

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
        torch._fused_sgd_(  # pyright: ignore[reportPrivateImportUsage]
            [weight],
            [gradient],
            [state["m"]] if self.momentum else [],
            weight_decay=weight_decay,
            momentum=self.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=self.nesterov,
            maximize=False,
            is_first_step=False,  # a velocity of zero gives the same first step
        )
