"""Adam and AdamW: torch's fused CPU kernels, called directly."""

from collections.abc import Mapping

import torch
from torch import Tensor

from openwafer.memoryx.optimizers.rule import Shape


class Adam:
    """Adam; weight decay is added to the gradient."""

    # Looked up when called: the C function is no method.
    _kernel = "_fused_adam_"

    def __init__(self, *, beta1: float, beta2: float, eps: float) -> None:
        self.beta1 = beta1
        self.beta2 = beta2
        self.eps = eps

    def state_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {"m": shape, "v": shape}

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
        getattr(torch, self._kernel)(
            [weight],
            [gradient],
            [state["m"]],
            [state["v"]],
            [],
            [torch.tensor(float(step))],
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )


class AdamW(Adam):
    """Adam with decoupled weight decay: the weight itself shrinks."""

    _kernel = "_fused_adamw_"
