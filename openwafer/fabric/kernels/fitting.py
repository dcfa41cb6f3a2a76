"""A kernel that is too large for its wafer: which of its options to change, and to what.

What fits is tried with the kernel itself, up to where it would start, so that nothing here repeats what it stores.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openwafer.errors import UserError
from openwafer.fabric.kernels.catalog import Kernel
from openwafer.fabric.kernels.outcome import Outcome, Setting
from openwafer.fabric.layout import Layout, TooManyPes
from openwafer.fabric.program import OutOfMemory, OutOfQueues
from openwafer.fabric.simulation import Simulation
from openwafer.systems import Wafer

FRACTION = 1000  # steps of an option that is a share


class _WouldStart(Exception):
    """All programs of a trial are placed."""


@dataclass(frozen=True, kw_only=True)
class _Trial(Setting):
    def start(self, layout: Layout) -> Simulation:
        raise _WouldStart


def run_fitting(kernel: Kernel, config: Any, wafer: Wafer, setting: Setting) -> Outcome:
    """Run a kernel; what is too large for the wafer is an error that names the flags."""
    try:
        return kernel.run(config, wafer, setting)
    except TooManyPes as error:
        raise UserError(f"{error}: lower {' or '.join(f'--{name}' for name in kernel.shape)}") from None
    except OutOfMemory:
        raise UserError(_advice(kernel, config, wafer)) from None
    except OutOfQueues:
        if "group" not in vars(config):
            raise
        group = _nearest_group(kernel, config, wafer)
        fix = "try another" if group is None else f"use {group}"
        raise UserError(f"--group {config.group} gives a PE of {wafer.name} too many streams: {fix}") from None


def _advice(kernel: Kernel, config: Any, wafer: Wafer) -> str:
    ways = []
    for name in kernel.load:
        value = _largest(kernel, config, wafer, name)
        if value is not None:
            ways.append(f"lower --{name} to {value} or less")
    for name in kernel.spread:
        value = _smallest(kernel, config, wafer, name)
        if value is not None:
            ways.append(f"raise --{name} to {value}")
    given = ", ".join(f"--{name} {getattr(config, name)}" for name in kernel.load)
    fix = ", or ".join(ways) or f"lower {' and '.join(f'--{name}' for name in kernel.load)}"
    return f"{given}: this takes more than the {wafer.sram_bytes:,} bytes of a PE of {wafer.name}: {fix}"


def _fits(kernel: Kernel, config: Any, wafer: Wafer, name: str, value: float) -> bool:
    try:
        kernel.run(dataclasses.replace(config, **{name: value}), wafer, _Trial())
    except _WouldStart:
        return True
    except UserError:
        return False
    raise AssertionError("a trial starts nothing")


def _is_allowed(config: Any, name: str, value: float) -> bool:
    """By the config's own rules, such as multiples of the grid."""
    try:
        dataclasses.replace(config, **{name: value})
    except UserError:
        return False
    return True


def _largest(kernel: Kernel, config: Any, wafer: Wafer, name: str) -> float | None:
    """The largest value below the one in `config` that fits, by halving: what is stored grows with it."""
    value = getattr(config, name)
    if isinstance(value, float):
        allowed: Sequence[float] = [number / FRACTION for number in range(1, int(value * FRACTION) + 1)]
    else:
        step = next((step for step in range(1, value) if _is_allowed(config, name, value - step)), value)
        allowed = range(value % step or step, value, step)
    low, high = 0, len(allowed)  # those before `low` fit, those from `high` on do not
    while low < high:
        middle = (low + high) // 2
        if _fits(kernel, config, wafer, name, allowed[middle]):
            low = middle + 1
        else:
            high = middle
    return allowed[low - 1] if low else None


def _smallest(kernel: Kernel, config: Any, wafer: Wafer, name: str) -> int | None:
    """The next number of PEs that the work fits on."""
    values = range(getattr(config, name) + 1, max(wafer.usable_columns, wafer.usable_rows) + 1)
    allowed = (value for value in values if _is_allowed(config, name, value))
    return next((value for value in allowed if _fits(kernel, config, wafer, name, value)), None)


def _nearest_group(kernel: Kernel, config: Any, wafer: Wafer) -> int | None:
    """Of a few groups: who is a root of both axes, and of a block of columns, depends on it."""
    near = [config.group + sign * distance for distance in range(1, 10) for sign in (1, -1)]
    fitting = (group for group in near if group >= 2 and _fits(kernel, config, wafer, "group", group))
    return next(fitting, None)
