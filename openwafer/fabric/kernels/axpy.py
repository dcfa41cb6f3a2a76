"""Weight streaming: Y[n] += w[n, k] * X[k], one AXPY per non-zero weight. Weights are never stored, zeros never sent.

The first PE of a row stands for the edge of the wafer: it sends the non-zero weights of each output as wavelets
(index k, value), then one that says "next output". The others hold T tokens each of X and Y and are driven by what
arrives: a wavelet starts a task, the task is one multiply-accumulate of T elements.
"""

from dataclasses import dataclass

import numpy as np

from openwafer.config import option
from openwafer.fabric.cost import vector_cycles
from openwafer.fabric.isa import Dtype, Op
from openwafer.fabric.kernels.outcome import Outcome, Setting, relative_error
from openwafer.fabric.layout import EAST, RAMP, WEST, Layout, Rect
from openwafer.fabric.program import ProgramBuilder
from openwafer.systems import Wafer

COLOUR = 0
NEXT_OUTPUT = 0xFFFF  # an index that no weight has
Y_BANK = 2  # X starts in bank 0: operands that are read together must differ


@dataclass(frozen=True, kw_only=True)
class AxpyConfig:
    """`openwafer simulate axpy`: a representative region of a layer, fp16."""

    num_pes: int = option(8, help="PEs that hold activations", minimum=1)
    tokens: int = option(128, help="tokens per PE", minimum=1)
    inputs: int = option(48, help="input features", minimum=1)
    outputs: int = option(32, help="output features", minimum=1)
    sparsity: float = option(0.9, help="share of weights that are zero", minimum=0, maximum=1)


def streamer(pe: ProgramBuilder, *, inputs: int, outputs: int) -> None:
    w = pe.array("w", inputs * outputs, "f16")
    marker, value = pe.array("marker", 1, "i32"), pe.register()
    with pe.task("main", start=True):
        pe.set(value, NEXT_OUTPUT - 2**16 << 16)
        pe.store(marker, value)
        for n in range(outputs):
            pe.mov(pe.send(COLOUR), w[n * inputs : (n + 1) * inputs], skip_zeros=True)
            pe.mov(pe.send(COLOUR), marker)


def worker(pe: ProgramBuilder, *, tokens: int, inputs: int, outputs: int) -> None:
    x = pe.array("x", inputs * tokens, "f16")
    y = pe.array("y", outputs * tokens, "f16", bank=Y_BANK)
    word, index, value, output, flag = (pe.register() for _ in range(5))
    with pe.task("weight", on=pe.receive(COLOUR), word=word):
        pe.unpack(index, value, word)
        pe.scalar(Op.IEQ, flag, index, NEXT_OUTPUT)
        with pe.when(flag):
            pe.scalar(Op.IADD, output, output, 2 * tokens)
        pe.scalar(Op.ILT, flag, index, NEXT_OUTPUT)
        with pe.when(flag):
            pe.scalar(Op.IMUL, index, index, 2 * tokens)
            pe.mac(y.at(output, tokens), x.at(index, tokens), value)


def per_weight(wafer: Wafer, config: AxpyConfig) -> float:
    """A task start, six scalars and the multiply-accumulate.

    Rows of X and Y that are no multiple of 16 bytes come to lie in all banks in turn, and some off 8 bytes: the mean.
    """
    tokens, y = config.tokens, Y_BANK * wafer.bank_bytes
    inputs, outputs = (range(0, min(16, count) * 2 * tokens, 2 * tokens) for count in (config.inputs, config.outputs))
    costs = [vector_cycles(wafer, Op.MAC, Dtype.f16, tokens, [(k, 1)], (y + n, 1)) for k in inputs for n in outputs]
    return wafer.costs.task_start + 6 * wafer.costs.scalar + sum(costs) / len(costs)


def formula(config: AxpyConfig, wafer: Wafer, non_zeros: list[int]) -> float:
    """Non-zero weights times the cost of one, plus the markers; where an output has so few (`non_zeros` of each) that
    the sender is slower, its two instructions per output."""
    costs = wafer.costs
    weight, marker = per_weight(wafer, config), costs.task_start + 6 * costs.scalar
    latency = 2 * wafer.ramp_cycles + costs.forward_latency + config.num_pes * wafer.hop_cycles
    sent = costs.task_start + 2 * costs.scalar + latency  # when what was sent so far is there
    done = 0.0  # when it has been worked on
    for count in non_zeros:
        sent += costs.fabric_startup
        done = max(done, sent) + count * weight if count else done
        sent += count + costs.fabric_startup
        done = max(done, sent) + marker
        sent += 1
    return done


def run(config: AxpyConfig, wafer: Wafer, setting: Setting) -> Outcome:
    layout = Layout(wafer, config.num_pes + 1, 1)
    layout.route(COLOUR, Rect(0, 0), RAMP, EAST)
    layout.route(COLOUR, Rect(1, 0, config.num_pes - 1), WEST, (EAST, RAMP))
    layout.route(COLOUR, Rect(config.num_pes, 0), WEST, RAMP)
    layout.place(streamer, Rect(0, 0), inputs=config.inputs, outputs=config.outputs)
    shape = {"tokens": config.tokens, "inputs": config.inputs, "outputs": config.outputs}
    layout.place(worker, Rect(1, 0, config.num_pes), **shape)
    simulation = setting.start(layout)
    rng = np.random.default_rng(setting.seed)
    x = rng.standard_normal((config.num_pes, config.inputs, config.tokens)).astype(np.float16)
    w = (rng.standard_normal((config.outputs, config.inputs)) / 8).astype(np.float16)
    w[rng.random(w.shape) < config.sparsity] = 0
    simulation.write("w", w.reshape(1, -1))
    simulation.write("x", x.reshape(config.num_pes, -1))
    report = setting.run(simulation)
    expected = np.einsum("nk,pkt->pnt", w.astype(np.float64), x.astype(np.float64))
    cycles = formula(config, wafer, np.count_nonzero(w, axis=1).tolist())
    return Outcome(
        report=report, simulation=simulation, formula_cycles=cycles,
        max_error=relative_error(simulation.read("y"), expected.reshape(config.num_pes, -1)), tolerance=0.01,
    )  # fmt: skip
