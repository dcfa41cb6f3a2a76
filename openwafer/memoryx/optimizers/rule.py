"""What an update rule is."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

Shape = tuple[int, ...]


class Rule(Protocol):
    """Updates one fp32 weight in place."""

    def state_shapes(self, shape: Shape) -> dict[str, Shape]:
        """Names and shapes of the state of a weight of this shape; all starts at zero."""
        ...

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
        """One update; `step` counts from 1. `weight` and `state` are changed, `gradient` may be."""
        ...
