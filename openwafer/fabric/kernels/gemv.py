"""y = x @ W with stationary weights on a P x P grid: local products, then an all-reduce down every column.

PE (i, j) (column i, row j) holds the tile W[j-th rows, i-th columns] and the j-th piece of x. `mesh` sums partial
results in a tree of two levels, `pipelined` in a chain; both broadcast, so every row ends up with y.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from openwafer.config import option
from openwafer.errors import UserError
from openwafer.fabric.cost import tile_cycles, vector_cycles
from openwafer.fabric.isa import Op
from openwafer.fabric.kernels.allreduce import Pipelined, TwoLevel
from openwafer.fabric.kernels.axis import Axis
from openwafer.fabric.kernels.outcome import Outcome, Setting, relative_error
from openwafer.fabric.kernels.reduce import Collective
from openwafer.fabric.layout import Layout, Rect
from openwafer.fabric.program import ProgramBuilder, parse_dtype
from openwafer.fabric.simulation import Simulation
from openwafer.systems import Wafer

WEIGHTS_AT_ONCE = 2**23  # made, written and multiplied on the host


@dataclass(frozen=True, kw_only=True)
class GemvConfig:
    """`openwafer simulate gemv`."""

    grid: int = option(120, help="PEs in each direction", minimum=3)
    size: int = option(4320, help="rows and columns of the matrix; a multiple of the grid", minimum=1)
    algorithm: Literal["mesh", "pipelined"] = option("mesh", help="two-level tree or chain of partial sums")
    group: int = option(15, help="PEs per group of the two-level tree", minimum=2)
    dtype: Literal["f16", "bf16", "f32"] = option("f16", help="element type")

    def __post_init__(self) -> None:
        if self.size % self.grid:
            raise UserError(f"--size must be a multiple of --grid, got {self.size} and {self.grid}")

    @property
    def tile(self) -> int:
        return self.size // self.grid

    def collective(self) -> Collective:
        if self.algorithm == "pipelined":
            return Pipelined(self.grid, (0, 1, 2))
        return TwoLevel(self.grid, self.group)


def program(pe: ProgramBuilder, *, collective: Collective, index: int, tile: int, dtype: str) -> None:
    w = pe.array("w", tile * tile, dtype)
    x = pe.array("x", tile, dtype)
    y = pe.array("y", tile, dtype)
    zero = pe.register()
    with pe.task("main", start=True):
        pe.mov(y, zero)
        pe.tile(y, w, x, m=tile, n=1, k=tile, outer_n=True)
        collective.emit(pe, index, y)


def formula(config: GemvConfig, wafer: Wafer) -> float:
    """Task start, clear y, the products, the all-reduce."""
    dtype, tile = parse_dtype(config.dtype), config.tile
    local = vector_cycles(wafer, Op.MOV, dtype, tile, [], (0, 1)) + tile_cycles(
        wafer, dtype, tile, 1, tile, outer_n=True
    )
    return wafer.costs.task_start + local + config.collective().cycles(wafer, tile)


def _write_weights(simulation: Simulation, config: GemvConfig, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Random weights into the PEs, some rows of the grid at a time: whole, they would take several times the SRAM.

    Returns what NumPy makes of them: y [size].
    """
    grid, tile, size = config.grid, config.tile, config.size
    half = {"f16": np.float16, "f32": np.float32}.get(config.dtype, np.float32)
    expected = np.zeros(size, np.float32)
    at_once = max(1, WEIGHTS_AT_ONCE // (tile * size))
    for first in range(0, grid, at_once):
        rows = min(at_once, grid - first)
        w = rng.standard_normal((rows * tile, size), np.float32) / np.float32(np.sqrt(size))
        # [j, row, i, column] -> one column-major [column, row] tile per PE, so that a row of W is one vector
        tiles = w.reshape(rows, tile, grid, tile).transpose(0, 2, 1, 3)
        simulation.write("w", tiles, Rect(0, first, grid, rows))
        part = slice(first * tile, (first + rows) * tile)
        expected += x[part].astype(half).astype(np.float32) @ w.astype(half).astype(np.float32)
    return expected


def run(config: GemvConfig, wafer: Wafer, setting: Setting) -> Outcome:
    grid, tile, collective = config.grid, config.tile, config.collective()
    layout = Layout(wafer, grid, grid)
    axis = Axis(layout, "y")
    collective.route(axis)
    for index in range(grid):
        layout.place(program, axis.rect(index), collective=collective, index=index, tile=tile, dtype=config.dtype)
    simulation = setting.start(layout)
    rng = np.random.default_rng(setting.seed)
    x = rng.standard_normal(config.size, np.float32)
    simulation.write("x", np.repeat(x.reshape(grid, 1, tile), grid, axis=1))
    expected = _write_weights(simulation, config, x, rng)
    report = setting.run(simulation)
    got = simulation.read("y").reshape(grid, config.size)
    tolerance = {"f16": 0.02, "bf16": 0.2, "f32": 2e-5}[config.dtype]
    return Outcome(
        report=report, simulation=simulation, formula_cycles=formula(config, wafer),
        max_error=relative_error(got, expected[None]), tolerance=tolerance,
    )  # fmt: skip
