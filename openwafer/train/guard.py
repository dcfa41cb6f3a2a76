"""What may veto a step: gradients that are not finite, and the loss scale that keeps them so.

The loss is multiplied by a power of two before backward and gradients are divided by it afterwards, which
changes no bit unless something over- or underflows. A dynamic scale halves when a gradient overflows, and that
step is skipped; it doubles after `loss_scale_window` good steps. A skipped step counts as a step (its data are
used up) but not as an update (bias corrections do not see it).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from openwafer.errors import UserError
from openwafer.memoryx.config import OptimizerConfig

STATE = "guard/state"  # its name in checkpoints
_FIRST_SCALE, _SMALLEST_SCALE, _LARGEST_SCALE = 2.0**16, 1.0, 2.0**24
_MOST_SKIPS_IN_A_ROW = 100


class Guard:
    """Judges steps. Its state is a few numbers: `tensor` and `restore` take them through a checkpoint."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.config = config
        self.is_dynamic = config.loss_scale == "dynamic"
        self.scale = _FIRST_SCALE if self.is_dynamic else float(config.loss_scale or 1.0)
        self.num_good = 0  # steps since the scale last changed
        self.num_skipped = 0
        self.num_skipped_in_a_row = 0

    @property
    def can_veto(self) -> bool:
        """Whether a step may turn out not to be applied, or to be applied otherwise, when backward is done."""
        return self.config.max_grad_norm is not None or self.is_dynamic or self.config.nan == "skip"

    def judge(self, loss: float, norm: float, error: Callable[[], UserError]) -> bool:
        """Whether to apply a step with this loss and gradient norm. Raises `error()` where the run must stop."""
        if math.isfinite(loss) and math.isfinite(norm):
            self._note_good()
            return True
        overflowed = self.is_dynamic and math.isfinite(loss) and self.scale > _SMALLEST_SCALE
        if overflowed:
            self.scale, self.num_good = self.scale / 2, 0
        elif self.config.nan == "stop":
            raise error()
        self.num_skipped += 1
        self.num_skipped_in_a_row += 1
        if self.num_skipped_in_a_row > _MOST_SKIPS_IN_A_ROW:
            raise UserError(
                f"{error()} (it was the {self.num_skipped_in_a_row}th step in a row that had to be skipped)"
            )
        return False

    def _note_good(self) -> None:
        self.num_skipped_in_a_row = 0
        self.num_good += 1
        if self.is_dynamic and self.num_good >= self.config.loss_scale_window:
            self.scale, self.num_good = min(2 * self.scale, _LARGEST_SCALE), 0

    def tensor(self) -> Tensor:
        counts = [self.num_good, self.num_skipped, self.num_skipped_in_a_row]
        return torch.tensor([self.scale, *counts], dtype=torch.float64)

    def restore(self, state: Tensor) -> None:
        scale, *counts = state.tolist()
        if self.is_dynamic:  # a fixed scale is the configuration's
            self.scale = scale
        self.num_good, self.num_skipped, self.num_skipped_in_a_row = map(int, counts)
