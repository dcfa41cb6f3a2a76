"""Pieces of the PEs of a row into one PE, nearest first: a router sends its own piece, then a control wavelet
switches it to let the pieces from further away pass."""

from dataclasses import dataclass

import numpy as np

from openwafer.config import option
from openwafer.fabric.kernels.outcome import Outcome, Setting, relative_error
from openwafer.fabric.layout import EAST, RAMP, WEST, Layout, Rect
from openwafer.fabric.program import ProgramBuilder
from openwafer.systems import Wafer

COLOUR = 0


@dataclass(frozen=True, kw_only=True)
class GatherConfig:
    """`openwafer simulate gather`."""

    num_pes: int = option(64, help="PEs in the row, besides the one that receives", minimum=2)
    words: int = option(32, help="fp32 words from each PE", minimum=1)


def sender(pe: ProgramBuilder, *, words: int) -> None:
    y = pe.array("y", words)
    with pe.task("main", start=True):
        pe.mov(pe.send(COLOUR), y)
        pe.control(pe.send(COLOUR))


def receiver(pe: ProgramBuilder, *, num_pes: int, words: int) -> None:
    x = pe.array("x", num_pes * words)
    with pe.task("main", start=True):
        pe.mov(x, pe.receive(COLOUR))


def formula(config: GatherConfig, wafer: Wafer) -> float:
    """The first piece, then all others, each behind the control wavelet of the one before.

    Between a piece and its control wavelet lies the start of an instruction, as far as the output queue does not hide
    it. A piece that fits the queues of core and router is followed by its control wavelet at once: then only the
    switch takes time. The first piece passes at once, its control wavelet never waits anywhere.
    """
    costs = wafer.costs
    queue = wafer.output_queue_words[0] + costs.forward_latency - 1
    if config.words <= queue + wafer.router_queue_words:
        gap = wafer.hop_cycles
    else:
        gap = costs.fabric_startup if queue < costs.fabric_startup else costs.forward_latency
    first = 2 * costs.fabric_startup + config.words + 2 * wafer.ramp_cycles + costs.forward_latency - gap
    return costs.task_start + first + 2 * wafer.hop_cycles + (config.num_pes - 1) * (config.words + 1 + gap)


def run(config: GatherConfig, wafer: Wafer, setting: Setting) -> Outcome:
    num_pes, words = config.num_pes, config.words
    layout = Layout(wafer, num_pes + 1, 1)
    layout.route(COLOUR, Rect(0, 0), EAST, RAMP)
    layout.switch(COLOUR, Rect(1, 0, num_pes), [(RAMP, WEST), (EAST, WEST)])
    layout.place(receiver, Rect(0, 0), num_pes=num_pes, words=words)
    layout.place(sender, Rect(1, 0, num_pes), words=words)
    simulation = setting.start(layout)
    values = np.random.default_rng(setting.seed).standard_normal((num_pes, words)).astype(np.float32)
    simulation.write("y", values)
    report = setting.run(simulation)
    error = relative_error(simulation.read("x"), values.reshape(1, -1))
    return Outcome(
        report=report, simulation=simulation, formula_cycles=formula(config, wafer), max_error=error, tolerance=0.0
    )
