"""AdamW on one weight: torch's fused kernel, called directly."""

from dataclasses import dataclass

import torch
from torch import Tensor

from openwafer.train.config import OptimizerConfig


@dataclass(eq=False)
class AdamState:
    """First and second moment of one weight."""

    m: Tensor
    v: Tensor

    @classmethod
    def zeros(cls, weight: Tensor) -> "AdamState":
        return cls(torch.zeros_like(weight), torch.zeros_like(weight))


def update(
    weight: Tensor, gradient: Tensor, state: AdamState, *, config: OptimizerConfig, lr: float, step: int, decays: bool
) -> None:
    """One update in place; `step` counts from 1. The fused kernel is what the streamed engine runs as well."""
    torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
        [weight],
        [gradient],
        [state.m],
        [state.v],
        [],
        [torch.tensor(float(step))],
        lr=lr,
        beta1=config.beta1,
        beta2=config.beta2,
        weight_decay=config.weight_decay if decays else 0.0,
        eps=config.eps,
        amsgrad=False,
        maximize=False,
    )
