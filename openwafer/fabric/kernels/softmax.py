"""Softmax of a vector spread over a row of PEs: all-reduce of the maximum, exponentials, all-reduce of their sum."""

import numpy as np

from openwafer.fabric.cost import vector_cycles
from openwafer.fabric.isa import Dtype, Mem, Op
from openwafer.fabric.kernels.allreduce import TwoLevel
from openwafer.fabric.kernels.axis import Axis
from openwafer.fabric.kernels.outcome import Outcome, Setting, relative_error
from openwafer.fabric.kernels.reduce import Collective
from openwafer.fabric.kernels.rmsnorm import NormConfig
from openwafer.fabric.layout import Layout
from openwafer.fabric.program import ProgramBuilder
from openwafer.systems import Wafer


def emit(pe: ProgramBuilder, collective: Collective, index: int, x: Mem) -> None:
    """x = softmax(x over all PEs), in fp32."""
    word = pe.array(f"softmax_{x.base}", 1)
    value = pe.register()
    pe.set(value, -3.0e38)
    pe.vector(Op.MAXOF, value, x)
    pe.store(word, value)
    collective.emit(pe, index, word, Op.MAX)
    pe.load(value, word)
    pe.vector(Op.SUB, x, x, value)
    pe.vector(Op.EXP, x, x)
    pe.set(value, 0.0)
    pe.vector(Op.SUM, value, x)
    pe.store(word, value)
    collective.emit(pe, index, word)
    pe.load(value, word)
    pe.scalar(Op.FRECIP, value, value)
    pe.mul(x, x, value)


def program(pe: ProgramBuilder, *, collective: Collective, index: int, size: int) -> None:
    x = pe.array("x", size)
    with pe.task("main", start=True):
        emit(pe, collective, index, x)


def local_cycles(wafer: Wafer, size: int) -> float:
    """Two reductions, two scalings, `size` exponentials, one reciprocal, six scalars."""
    costs = wafer.costs
    reduce = vector_cycles(wafer, Op.SUM, Dtype.f32, size, [(0, 1)], None)
    scale = vector_cycles(wafer, Op.SUB, Dtype.f32, size, [(0, 1)], (0, 1))
    exponentials = costs.vector_startup + size * costs.divide
    return 2 * reduce + 2 * scale + exponentials + costs.divide + 6 * costs.scalar


def run(config: NormConfig, wafer: Wafer, setting: Setting) -> Outcome:
    collective = TwoLevel(config.num_pes, config.group)
    layout = Layout(wafer, config.num_pes, 1)
    axis = Axis(layout, "x")
    collective.route(axis)
    for index in range(config.num_pes):
        layout.place(program, axis.rect(index), collective=collective, index=index, size=config.size)
    simulation = setting.start(layout)
    x = np.random.default_rng(setting.seed).standard_normal((config.num_pes, config.size)).astype(np.float32)
    simulation.write("x", x)
    report = setting.run(simulation)
    powers = np.exp(x.astype(np.float64) - x.max())
    cycles = wafer.costs.task_start + local_cycles(wafer, config.size) + 2 * collective.cycles(wafer, 1)
    return Outcome(
        report=report, simulation=simulation, formula_cycles=cycles,
        max_error=relative_error(simulation.read("x"), powers / powers.sum()), tolerance=1e-5,
    )  # fmt: skip
