"""The learning rate as a pure function of the step: nothing to save, nothing to restore.

A schedule is a function from the step (updates done before this one, from 0) to a factor on the base rate.
Small ones are combined into larger ones (`warmed_up`), so a piecewise schedule or a sequence is one more
function that returns a Schedule.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from openwafer.config import option
from openwafer.errors import UserError

Schedule = Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate moves during a run."""

    kind: Literal["constant", "linear", "cosine"] = option("cosine", help="shape after the warm-up")
    warmup_steps: int = option(0, help="steps of linear warm-up from near zero", minimum=0)
    total_steps: int | None = option(None, help="step at which the decay ends (default: num_steps)", minimum=1)
    min_ratio: float = option(0.0, help="final rate as a share of the base rate", minimum=0, maximum=1)

    def build(self, num_steps: int) -> Schedule:
        """The schedule of a run of `num_steps` updates."""
        total = num_steps if self.total_steps is None else self.total_steps
        if self.kind != "constant" and self.warmup_steps > total:
            raise UserError(
                f"warmup_steps {self.warmup_steps} is more than the schedule's {total} steps: "
                "shorten the warm-up or train longer"
            )
        shape = decay(_SHAPES[self.kind], max(1, total - self.warmup_steps), self.min_ratio)
        return warmed_up(shape, self.warmup_steps)


# What is left of the rate at progress 0..1 of the decay.
_SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def decay(shape: Callable[[float], float], steps: int, min_ratio: float) -> Schedule:
    """From 1 at step 0 along `shape` towards `min_ratio` at `steps`, which then holds."""
    return lambda step: min_ratio + (1.0 - min_ratio) * shape(min(step / steps, 1.0))


def warmed_up(then: Schedule, steps: int) -> Schedule:
    """Linear from 1/steps (the first update is not wasted) to 1, then `then` from its own step 0."""
    return lambda step: (step + 1) / steps if step < steps else then(step - steps)
