"""Optimizers: what each keeps per weight, and how it updates one.

An optimizer sees one weight at a time, in its own shape, with its state; where these live is the store's matter.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from openwafer.memoryx.config import OptimizerConfig

Shape = tuple[int, ...]


class Optimizer(Protocol):
    """Updates one weight in place."""

    def state_shapes(self, shape: Shape) -> dict[str, Shape]:
        """Names and shapes of the fp32 state of a weight of this shape; all start at zero."""
        ...

    def update(self, weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor], *, lr: float, step: int) -> None:
        """One update; `step` counts from 1. `weight` and `state` are changed, `gradient` may be."""
        ...


class AdamW:
    """Adam with decoupled weight decay: torch's fused CPU kernel, called directly."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.config = config

    def state_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {"m": shape, "v": shape}

    def update(self, weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor], *, lr: float, step: int) -> None:
        config = self.config
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
            [weight],
            [gradient],
            [state["m"]],
            [state["v"]],
            [],
            [torch.tensor(float(step))],
            lr=lr,
            beta1=config.beta1,
            beta2=config.beta2,
            weight_decay=config.weight_decay if weight.dim() >= 2 else 0.0,
            eps=config.eps,
            amsgrad=False,
            maximize=False,
        )


def make_optimizer(config: OptimizerConfig) -> Optimizer:
    return {"adamw": AdamW}[config.kind](config)
