"""Lion: steps of one size in the direction of a sign, half the state of Adam."""

from collections.abc import Mapping

from torch import Tensor

from openwafer.memoryx.optimizers.rule import Shape


class Lion:
    """w -= lr (sign(beta1 m + (1 - beta1) g) + decay w); m = beta2 m + (1 - beta2) g."""

    def __init__(self, *, beta1: float, beta2: float) -> None:
        self.beta1 = beta1
        self.beta2 = beta2

    def state_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {"m": shape}

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
        m = state["m"]
        direction = (m * self.beta1).add_(gradient * (1.0 - self.beta1)).sign_()
        if weight_decay:
            weight.mul_(1.0 - lr * weight_decay)
        weight.sub_(direction.mul_(lr))
        m.mul_(self.beta2).add_(gradient.mul_(1.0 - self.beta2))
