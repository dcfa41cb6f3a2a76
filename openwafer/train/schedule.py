"""The learning rate as a pure function of the step: nothing to save, nothing to restore.

A schedule is a function from the step (steps done before this one, from 0) to a factor on the base rate. Small
ones are combined into larger ones (`warmed_up`, `in_sequence`).
"""

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from openwafer.config import option
from openwafer.errors import UserError

Schedule = Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class PartConfig:
    """One stretch of a sequence."""

    kind: Literal["constant", "linear", "cosine"] = option("linear", help="shape from start to end")
    steps: int | None = option(None, help="length (the last part: the rest of the run)", minimum=1)
    start: float | None = option(
        None, help="factor at its begin (default: where the part before ended, or 1)", minimum=0
    )
    end: float | None = option(None, help="factor at its end (default: start)", minimum=0)

    def __post_init__(self) -> None:
        if self.kind == "constant" and self.end is not None and self.end != self.start:
            raise UserError(f"a constant part has one factor, `start`, not also an end of {self.end}")
        if self.kind != "constant" and self.end is None:
            raise UserError(f"a {self.kind} part needs `end`, the factor it goes to")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate moves during a run."""

    kind: Literal["constant", "linear", "cosine", "piecewise", "sequence"] = option(
        "cosine", help="shape after the warm-up"
    )
    warmup_steps: int = option(0, help="steps of linear warm-up from near zero", minimum=0)
    total_steps: int | None = option(None, help="step at which the decay ends (default: num_steps)", minimum=1)
    min_ratio: float = option(0.0, help="final rate as a share of the base rate", minimum=0, maximum=1)
    pieces: tuple[tuple[int, float], ...] = option(
        (), help="piecewise: list of [step, factor], each from its step on", minimum=0
    )
    parts: tuple[PartConfig, ...] = option((), help="sequence: list of {kind, steps, start, end}, one after another")

    def __post_init__(self) -> None:
        for name, kinds in _KINDS_OF.items():
            if getattr(self, name) and self.kind not in kinds:
                raise UserError(f"{name} does nothing with kind: {self.kind}; it belongs to {' and '.join(kinds)}")
        if self.kind == "piecewise":
            self._check_pieces()
        if self.kind == "sequence":
            self._check_parts()

    def _check_pieces(self) -> None:
        steps = [step for step, _ in self.pieces]
        if not steps or steps[0] != 0:
            raise UserError(f"pieces must start at step 0, such as [[0, 1.0], [1000, 0.1]], got {list(self.pieces)}")
        if any(a >= b for a, b in itertools.pairwise(steps)):
            raise UserError(f"the steps of pieces must rise, got {steps}")

    def _check_parts(self) -> None:
        if not self.parts:
            raise UserError("kind: sequence needs parts, such as [{kind: linear, steps: 100, start: 0.1, end: 1}, ...]")
        for number, part in enumerate(self.parts[:-1], start=1):
            if part.steps is None:
                raise UserError(f"part {number} of the schedule needs `steps`: only the last may take the rest")

    def build(self, num_steps: int) -> Schedule:
        """The schedule of a run of `num_steps` steps."""
        if self.kind == "sequence":
            return in_sequence(self.parts, num_steps)
        if self.kind == "piecewise":
            return warming_up(piecewise(self.pieces), self.warmup_steps)
        total = num_steps if self.total_steps is None else self.total_steps
        if self.kind != "constant" and self.warmup_steps > total:
            raise UserError(
                f"warmup_steps {self.warmup_steps} is more than the schedule's {total} steps: "
                "shorten the warm-up or train longer"
            )
        shape = between(self.kind, max(1, total - self.warmup_steps), 1.0, self.min_ratio)
        return warmed_up(shape, self.warmup_steps)


# Options that only some kinds have; what would do nothing is refused.
_KINDS_OF = {
    "warmup_steps": ("constant", "linear", "cosine", "piecewise"),
    "total_steps": ("linear", "cosine"),
    "min_ratio": ("linear", "cosine"),
    "pieces": ("piecewise",),
    "parts": ("sequence",),
}

# What is left of the way from end to start at progress 0..1.
_SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def between(kind: str, steps: int, start: float, end: float) -> Schedule:
    """From `start` at step 0 along the shape to `end` at `steps`, which then holds."""
    shape = _SHAPES[kind]
    return lambda step: end + (start - end) * shape(min(step / steps, 1.0))


def warmed_up(then: Schedule, steps: int) -> Schedule:
    """Linear from 1/steps (the first step is not wasted) to 1, then `then` from its own step 0."""
    return lambda step: (step + 1) / steps if step < steps else then(step - steps)


def warming_up(of: Schedule, steps: int) -> Schedule:
    """A schedule whose own steps count from the start of the run, damped at first."""
    return lambda step: of(step) * min(1.0, (step + 1) / max(steps, 1))


def piecewise(pieces: Sequence[tuple[int, float]]) -> Schedule:
    """The factor of the last piece that has begun."""
    starts = [step for step, _ in pieces]
    return lambda step: pieces[bisect.bisect_right(starts, step) - 1][1]


def in_sequence(parts: Sequence[PartConfig], num_steps: int) -> Schedule:
    """Each part from where the one before ended; the last goes on to the end of the run, or holds its end."""
    begins: list[int] = []
    schedules: list[Schedule] = []
    begin, factor = 0, 1.0
    for part in parts:
        start = factor if part.start is None else part.start
        factor = start if part.end is None else part.end
        steps = part.steps or max(1, num_steps - begin)
        begins.append(begin)
        schedules.append(between(part.kind, steps, start, factor))
        begin += steps

    def schedule(step: int) -> float:
        index = bisect.bisect_right(begins, step) - 1
        return schedules[index](step - begins[index])

    return schedule
