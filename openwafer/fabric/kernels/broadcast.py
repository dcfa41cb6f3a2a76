"""One vector to every PE of a grid: east along the first row, and south down every column on the way."""

from dataclasses import dataclass

import numpy as np

from openwafer.config import option
from openwafer.fabric.kernels.outcome import Outcome, Setting, relative_error
from openwafer.fabric.layout import EAST, NO_PROGRAM, NORTH, RAMP, SOUTH, WEST, Layout, Rect
from openwafer.fabric.program import ProgramBuilder
from openwafer.systems import Wafer

COLOUR = 0
ROWS_AT_ONCE = 32  # are read back: all of a wafer's memory would be there twice


@dataclass(frozen=True, kw_only=True)
class BroadcastConfig:
    """`openwafer simulate broadcast`."""

    width: int = option(64, help="PEs from west to east", minimum=2)
    height: int = option(64, help="PEs from north to south", minimum=2)
    words: int = option(1024, help="fp32 words", minimum=1)


def program(pe: ProgramBuilder, *, words: int, source: bool) -> None:
    x = pe.array("x", words)
    with pe.task("main", start=True):
        if source:
            pe.mov(pe.send(COLOUR), x)
        else:
            pe.mov(x, pe.receive(COLOUR))


def formula(config: BroadcastConfig, wafer: Wafer) -> float:
    hops = config.width + config.height - 2
    costs = wafer.costs
    latency = 2 * wafer.ramp_cycles + costs.forward_latency + hops * wafer.hop_cycles
    return costs.task_start + costs.fabric_startup + config.words + latency


def run(config: BroadcastConfig, wafer: Wafer, setting: Setting) -> Outcome:
    width, height = config.width, config.height
    layout = Layout(wafer, width, height)
    layout.route(COLOUR, Rect(0, 1, width, height - 2), NORTH, (SOUTH, RAMP))
    layout.route(COLOUR, Rect(0, height - 1, width), NORTH, RAMP)
    layout.route(COLOUR, Rect(1, 0, width - 2), WEST, (EAST, SOUTH, RAMP))
    layout.route(COLOUR, Rect(width - 1, 0), WEST, (SOUTH, RAMP))
    layout.route(COLOUR, Rect(0, 0), RAMP, (EAST, SOUTH))
    layout.place(program, Rect(0, 0), words=config.words, source=True)
    layout.place(program, layout.program_of == NO_PROGRAM, words=config.words, source=False)
    simulation = setting.start(layout)
    values = np.random.default_rng(setting.seed).standard_normal((1, config.words)).astype(np.float32)
    simulation.write("x", values, Rect(0, 0))
    report = setting.run(simulation)
    bands = [Rect(0, y, width, min(ROWS_AT_ONCE, height - y)) for y in range(0, height, ROWS_AT_ONCE)]
    error = max(relative_error(simulation.read("x", band), values) for band in bands)
    return Outcome(
        report=report, simulation=simulation, formula_cycles=formula(config, wafer), max_error=error, tolerance=0.0
    )
