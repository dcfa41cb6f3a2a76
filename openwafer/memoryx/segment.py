"""Where one weight's part of a field lies in its Unit's flat array."""

import math
from dataclasses import dataclass

from torch import Tensor

from openwafer.memoryx.optimizer import Shape
from openwafer.memoryx.tier import Key


@dataclass(frozen=True)
class Segment:
    """Elements `offset` to `offset + num_elements` of the array `key`, seen in the weight's shape."""

    key: Key
    offset: int
    shape: Shape

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.num_elements].view(self.shape)
