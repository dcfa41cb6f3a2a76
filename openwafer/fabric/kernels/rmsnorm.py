"""RMSNorm of a vector spread over a row of PEs: local sums of squares, an all-reduce of one word, a local scaling."""

from dataclasses import dataclass

import numpy as np

from openwafer.config import option
from openwafer.fabric.cost import vector_cycles
from openwafer.fabric.isa import Dtype, Mem, Op
from openwafer.fabric.kernels.allreduce import TwoLevel
from openwafer.fabric.kernels.axis import Axis
from openwafer.fabric.kernels.outcome import Outcome, Setting, relative_error
from openwafer.fabric.kernels.reduce import Collective
from openwafer.fabric.layout import Layout
from openwafer.fabric.program import ProgramBuilder
from openwafer.systems import Wafer

EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """`openwafer simulate rmsnorm` and `openwafer simulate softmax`: fp32."""

    num_pes: int = option(64, help="PEs in the row", minimum=2)
    size: int = option(16, help="elements of the vector in each PE", minimum=1)
    group: int = option(15, help="PEs per group of the two-level all-reduce", minimum=2)


def emit(pe: ProgramBuilder, collective: Collective, index: int, x: Mem, gain: Mem, out: Mem, total: int) -> None:
    """out = x / rms(x over all PEs) * gain; `total` elements in all, all fp32."""
    word = pe.array(f"sum_{x.base}", 1)
    square, other = pe.register(), pe.register()
    pe.set(square, 0.0)
    pe.vector(Op.DOT, square, x, x)
    pe.store(word, square)
    collective.emit(pe, index, word)
    pe.load(square, word)
    pe.set(other, 1.0 / total)
    pe.scalar(Op.FMUL, square, square, other)
    pe.set(other, EPSILON)
    pe.scalar(Op.FADD, square, square, other)
    pe.scalar(Op.FRSQRT, square, square)
    pe.mul(out, x, square)
    pe.mul(out, out, gain)


def program(pe: ProgramBuilder, *, collective: Collective, index: int, size: int, total: int) -> None:
    # Of two operands that are read together, each has banks of its own.
    x, gain, out = pe.array("x", size), pe.array("gain", size, bank=2), pe.array("out", size, bank=0)
    with pe.task("main", start=True):
        emit(pe, collective, index, x, gain, out, total)


def local_cycles(wafer: Wafer, size: int) -> float:
    """Everything but the all-reduce: DOT with itself (one bank), eight scalars, a root, two products."""
    dot = vector_cycles(wafer, Op.DOT, Dtype.f32, size, [(0, 1), (0, 1)], None)
    scale = vector_cycles(wafer, Op.MUL, Dtype.f32, size, [(0, 1)], (0, 1))
    gain = vector_cycles(wafer, Op.MUL, Dtype.f32, size, [(0, 1), (8, 1)], (0, 1))
    return dot + scale + gain + 7 * wafer.costs.scalar + wafer.costs.divide


def run(config: NormConfig, wafer: Wafer, setting: Setting) -> Outcome:
    collective = TwoLevel(config.num_pes, config.group)
    layout = Layout(wafer, config.num_pes, 1)
    axis = Axis(layout, "x")
    collective.route(axis)
    total = config.num_pes * config.size
    for index in range(config.num_pes):
        layout.place(program, axis.rect(index), collective=collective, index=index, size=config.size, total=total)
    simulation = setting.start(layout)
    rng = np.random.default_rng(setting.seed)
    x, gain = rng.standard_normal((2, config.num_pes, config.size)).astype(np.float32)
    simulation.write("x", x)
    simulation.write("gain", gain)
    report = setting.run(simulation)
    expected = x / np.sqrt(np.square(x.astype(np.float64)).mean() + EPSILON) * gain
    cycles = wafer.costs.task_start + local_cycles(wafer, config.size) + collective.cycles(wafer, 1)
    return Outcome(
        report=report, simulation=simulation, formula_cycles=cycles,
        max_error=relative_error(simulation.read("out"), expected), tolerance=1e-5,
    )  # fmt: skip
