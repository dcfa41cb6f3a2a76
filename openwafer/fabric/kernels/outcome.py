"""What a kernel run returns: cycles, values checked against NumPy, and the closed formula beside the simulation."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from openwafer.fabric.layout import Layout
from openwafer.fabric.simulation import EngineName, Report, Simulation

ROWS_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How to run, apart from what."""

    engine: EngineName = "auto"
    trace: bool = False
    progress: Callable[[int], None] | None = None
    seed: int = 0

    def start(self, layout: Layout) -> Simulation:
        return Simulation(layout, engine=self.engine, trace=self.trace)

    def run(self, simulation: Simulation) -> Report:
        return simulation.run(progress=self.progress)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A finished kernel."""

    report: Report
    simulation: Simulation
    formula_cycles: float
    max_error: float  # against NumPy, relative to the largest expected value
    tolerance: float  # what the element type and the order of sums allow

    @property
    def is_right(self) -> bool:
        return self.max_error <= self.tolerance

    @property
    def formula_error(self) -> float:
        """Relative error of the closed formula against the simulation."""
        return self.formula_cycles / self.report.cycles - 1


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the largest expected value; a NaN is an infinite error."""
    wanted = np.broadcast_to(expected, got.shape)
    worst = 0.0
    for start in range(0, len(got), ROWS_AT_ONCE):  # a whole wafer of values in fp64 would be several times its memory
        part = slice(start, start + ROWS_AT_ONCE)
        difference = np.abs(got[part].astype(np.float64) - wanted[part])
        worst = max(worst, float(difference.max(initial=0.0)) if np.isfinite(difference).all() else float("inf"))
    return worst / max(float(np.abs(expected).max(initial=0.0)), 1e-30)
