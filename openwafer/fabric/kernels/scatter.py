"""Pieces of one PE's memory to the PEs of a row. Every router keeps the first piece and then lets the rest pass:
the control wavelet after each piece advances the switch of the router that took it."""

from dataclasses import dataclass

import numpy as np

from openwafer.config import option
from openwafer.fabric.kernels.outcome import Outcome, Setting, relative_error
from openwafer.fabric.layout import EAST, RAMP, WEST, Layout, Rect
from openwafer.fabric.program import ProgramBuilder
from openwafer.systems import Wafer

COLOUR = 0


@dataclass(frozen=True, kw_only=True)
class ScatterConfig:
    """`openwafer simulate scatter`."""

    num_pes: int = option(64, help="PEs in the row, besides the one that sends", minimum=2)
    words: int = option(32, help="fp32 words for each PE", minimum=1)


def sender(pe: ProgramBuilder, *, num_pes: int, words: int) -> None:
    x = pe.array("x", num_pes * words)
    with pe.task("main", start=True):
        for index in range(num_pes):
            pe.mov(pe.send(COLOUR), x[index * words : (index + 1) * words])
            pe.control(pe.send(COLOUR))


def receiver(pe: ProgramBuilder, *, words: int) -> None:
    y = pe.array("y", words)
    with pe.task("main", start=True):
        pe.mov(y, pe.receive(COLOUR))


def formula(config: ScatterConfig, wafer: Wafer) -> float:
    """Each piece and each control wavelet is an instruction of its own; the last piece goes furthest."""
    costs = wafer.costs
    per_piece = 2 * costs.fabric_startup + config.words + 1
    latency = 2 * wafer.ramp_cycles + costs.forward_latency + config.num_pes * wafer.hop_cycles
    return costs.task_start + config.num_pes * per_piece - costs.fabric_startup - 1 + latency


def run(config: ScatterConfig, wafer: Wafer, setting: Setting) -> Outcome:
    num_pes, words = config.num_pes, config.words
    layout = Layout(wafer, num_pes + 1, 1)
    layout.route(COLOUR, Rect(0, 0), RAMP, EAST)
    layout.switch(COLOUR, Rect(1, 0, num_pes - 1), [(WEST, RAMP), (WEST, EAST)])
    layout.switch(COLOUR, Rect(num_pes, 0), [(WEST, RAMP), (WEST, ())])
    layout.place(sender, Rect(0, 0), num_pes=num_pes, words=words)
    layout.place(receiver, Rect(1, 0, num_pes), words=words)
    simulation = setting.start(layout)
    values = np.random.default_rng(setting.seed).standard_normal((num_pes, words)).astype(np.float32)
    simulation.write("x", values.reshape(1, -1))
    report = setting.run(simulation)
    error = relative_error(simulation.read("y"), values)
    return Outcome(
        report=report, simulation=simulation, formula_cycles=formula(config, wafer), max_error=error, tolerance=0.0
    )
