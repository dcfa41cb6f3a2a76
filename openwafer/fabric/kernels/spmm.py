"""Sparse matrix times dense matrix, Y[N, M] = S[N, K] @ X[K, M]: one AXPY of M elements per non-zero of S.

The width of the grid divides N, its height divides K. Every PE holds its part of X and the non-zeros of its block of S,
adds up its rows of Y, and an all-reduce down each column completes them. `csc` and `coo` differ in what one non-zero
costs to look up.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from openwafer.config import option
from openwafer.errors import UserError
from openwafer.fabric.cost import vector_cycles
from openwafer.fabric.isa import Dtype, Op
from openwafer.fabric.kernels.allreduce import Pipelined
from openwafer.fabric.kernels.axis import Axis
from openwafer.fabric.kernels.outcome import Outcome, Setting, relative_error
from openwafer.fabric.layout import Layout
from openwafer.fabric.program import ProgramBuilder
from openwafer.systems import Wafer

# A coordinate needs a second index and its row address: the one constant fitted to the two COO rows of facts.md.
COO_EXTRA_CYCLES = 17


@dataclass(frozen=True, kw_only=True)
class SpmmConfig:
    """`openwafer simulate spmm`: fp32; the non-zeros are spread evenly over the PEs."""

    width: int = option(64, help="PEs that divide the rows of S", minimum=1)
    height: int = option(8, help="PEs that divide the columns of S", minimum=2)
    size: int = option(1024, help="rows and columns of S; a multiple of width and height", minimum=1)
    columns: int = option(68, help="columns of the dense matrix", minimum=1)
    density: float = option(0.05, help="share of non-zeros in S", minimum=0, maximum=1)
    algorithm: Literal["csc", "coo"] = option("csc", help="format of the non-zeros")

    def __post_init__(self) -> None:
        if self.size % self.width or self.size % self.height:
            raise UserError(f"--size must be a multiple of {self.width} and {self.height}, got {self.size}")
        rows, columns = self.block
        if self.non_zeros == 0:
            least = math.ceil(1e4 / (rows * columns)) / 1e4
            raise UserError(
                f"--density must be at least {least} for a non-zero in the {rows} x {columns} block of a PE, got "
                f"{self.density}"
            )

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of S in one PE."""
        return self.size // self.width, self.size // self.height

    @property
    def non_zeros(self) -> int:
        """Per PE."""
        return round(self.block[0] * self.block[1] * self.density)

    def overhead(self, wafer: Wafer) -> int:
        return wafer.costs.loop_inner + (COO_EXTRA_CYCLES if self.algorithm == "coo" else 0)


def program(pe: ProgramBuilder, *, config: SpmmConfig, index: int) -> None:
    rows, features = config.block
    count, m = config.non_zeros, config.columns
    x, y = pe.array("x", features * m, bank=0), pe.array("y", rows * m, bank=0)
    values, targets, sources = pe.array("s", count), pe.array("row", count, "i32"), pe.array("column", count, "i32")
    step, row, column, value = (pe.register() for _ in range(4))
    with pe.task("main", start=True):
        with pe.loop(count, overhead=config.overhead(pe.wafer)):
            pe.load(value, values.at(step, 1))
            pe.load(row, targets.at(step, 1))
            pe.load(column, sources.at(step, 1))
            pe.mac(y.at(row, m), x.at(column, m), value)
            pe.scalar(Op.IADD, step, step, 4)
        collective(config).emit(pe, index, y)


def collective(config: SpmmConfig) -> Pipelined:
    return Pipelined(config.height, (0, 1, 2))


def formula(config: SpmmConfig, wafer: Wafer) -> float:
    """Non-zeros times (look-up, four scalars, an AXPY), then the all-reduce.

    Operands share a bank if a row is a multiple of 16 bytes, else they lie in all of them in turn: the mean.
    """
    length = config.columns
    targets, sources = (range(0, min(4, count) * 4 * length, 4 * length) for count in config.block)
    costs = [vector_cycles(wafer, Op.MAC, Dtype.f32, length, [(x, 1)], (y, 1)) for x in sources for y in targets]
    one = config.overhead(wafer) + 4 * wafer.costs.scalar + sum(costs) / len(costs)
    words = config.block[0] * config.columns
    return wafer.costs.task_start + config.non_zeros * one + collective(config).cycles(wafer, words)


def run(config: SpmmConfig, wafer: Wafer, setting: Setting) -> Outcome:
    rows, features = config.block
    layout = Layout(wafer, config.width, config.height)
    axis = Axis(layout, "y")
    collective(config).route(axis)
    for index in range(config.height):
        layout.place(program, axis.rect(index), config=config, index=index)
    simulation = setting.start(layout)
    rng = np.random.default_rng(setting.seed)
    x = rng.standard_normal((config.size, config.columns)).astype(np.float32)
    shape = (config.height, config.width, config.non_zeros)
    cells = np.argsort(rng.random((config.height, config.width, rows * features)), axis=2)[:, :, : config.non_zeros]
    values = rng.standard_normal(shape).astype(np.float32)
    simulation.write("x", np.repeat(x.reshape(config.height, 1, -1), config.width, axis=1))
    simulation.write("s", values)
    simulation.write("row", cells // features * config.columns * 4)
    simulation.write("column", cells % features * config.columns * 4)
    report = setting.run(simulation)
    matrix = np.zeros((config.size, config.size))
    down, across = np.ogrid[: config.height, : config.width]
    matrix[across[..., None] * rows + cells // features, down[..., None] * features + cells % features] = values
    got = simulation.read("y").reshape(config.height, config.size, config.columns)
    return Outcome(
        report=report, simulation=simulation, formula_cycles=formula(config, wafer),
        max_error=relative_error(got, (matrix @ x)[None]), tolerance=1e-5,
    )  # fmt: skip
