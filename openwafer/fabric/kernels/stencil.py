"""A 3D 7-point stencil: x and y over the PEs, z in each PE's memory. Every step, columns go to the four neighbours,
and out = centre * u + side * (the six neighbours); outside is zero."""

from dataclasses import dataclass

import numpy as np

from openwafer.config import option
from openwafer.fabric.cost import vector_cycles
from openwafer.fabric.isa import Dtype, Mem, Op, Reg
from openwafer.fabric.kernels.outcome import Outcome, Setting, relative_error
from openwafer.fabric.kernels.reduce import step_cycles
from openwafer.fabric.layout import EAST, NORTH, RAMP, SOUTH, WEST, Layout, Rect, opposite
from openwafer.fabric.program import ProgramBuilder
from openwafer.systems import Wafer

CENTRE, SIDE = 0.4, 0.1
STEP = {NORTH: (0, -1), EAST: (1, 0), SOUTH: (0, 1), WEST: (-1, 0)}


@dataclass(frozen=True, kw_only=True)
class StencilConfig:
    """`openwafer simulate stencil`: fp32."""

    width: int = option(8, help="PEs (cells) from west to east", minimum=2)
    height: int = option(8, help="PEs (cells) from north to south", minimum=2)
    depth: int = option(64, help="cells per PE", minimum=2)
    steps: int = option(4, help="time steps", minimum=1)


def colour_of(direction: int, x: int, y: int) -> int:
    """Of the columns sent by PE (x, y): neighbours alternate, or a stream would run on through the next router."""
    return 2 * direction + (x + y) % 2


def program(pe: ProgramBuilder, *, depth: int, steps: int, odd: int, sides: tuple[int, ...]) -> None:
    u, out = pe.array("u", depth), pe.array("out", depth, bank=2)
    halo = {side: pe.array(f"halo{side}", depth, bank=0) for side in sides}
    centre, side_weight = pe.register(), pe.register()
    with pe.task("main", start=True):
        pe.set(centre, CENTRE)
        pe.set(side_weight, SIDE)
        with pe.loop(steps, overhead=pe.wafer.costs.scalar):
            step(pe, u, out, halo, odd, (centre, side_weight))


def step(pe: ProgramBuilder, u: Mem, out: Mem, halo: dict[int, Mem], odd: int, weights: tuple[Reg, Reg]) -> None:
    for thread, (side, buffer) in enumerate(halo.items()):
        pe.mov(pe.send(colour_of(side, odd, 0)), u, thread=2 * thread)
        pe.mov(buffer, pe.receive(colour_of(opposite(side), odd, 1)), thread=2 * thread + 1)
    depth = u.length
    pe.mul(out, u, weights[0])
    pe.mac(out[1:], u[: depth - 1], weights[1])
    pe.mac(out[: depth - 1], u[1:], weights[1])
    for thread, buffer in enumerate(halo.values()):
        pe.wait(2 * thread + 1)
        pe.mac(out, buffer, weights[1])
    for thread in range(len(halo)):
        pe.wait(2 * thread)
    pe.mov(u, out)


def formula(config: StencilConfig, wafer: Wafer) -> float:
    """Of the PE with most neighbours (S, four but at the smallest sizes): 2 S issues, S + 3 products, 2 S waits, or the
    transfer if that is longer."""
    costs, depth = wafer.costs, config.depth
    sides = min(2, config.width - 1) + min(2, config.height - 1)
    copy = vector_cycles(wafer, Op.MOV, Dtype.f32, depth, [(8, 1)], (0, 1))
    product = vector_cycles(wafer, Op.MUL, Dtype.f32, depth, [(0, 1)], (8, 1))
    shifted = vector_cycles(wafer, Op.MAC, Dtype.f32, depth - 1, [(4, 1)], (8, 1))
    aligned = vector_cycles(wafer, Op.MAC, Dtype.f32, depth, [(0, 1)], (8, 1))
    local = product + 2 * shifted
    # The streams share the ramp of a core, in and out.
    transfer = sides * depth + step_cycles(wafer)
    step = (
        2 * sides * costs.fabric_startup
        + max(local, transfer - (2 * sides - 2) * costs.fabric_startup)
        + sides * aligned
        + 2 * sides * costs.task_start
        + copy
    )
    return costs.task_start + 2 * costs.scalar + config.steps * (step + costs.scalar)


def expected_values(u: np.ndarray, steps: int) -> np.ndarray:
    for _ in range(steps):
        p = np.pad(u, 1)
        sides = p[:-2, 1:-1, 1:-1] + p[2:, 1:-1, 1:-1] + p[1:-1, :-2, 1:-1] + p[1:-1, 2:, 1:-1]
        u = CENTRE * u + SIDE * (sides + p[1:-1, 1:-1, :-2] + p[1:-1, 1:-1, 2:])
    return u


def place(layout: Layout, config: StencilConfig) -> None:
    """Routes and one program for each kind of border and parity."""
    for y in range(config.height):
        for x in range(config.width):
            inside = {d: 0 <= x + dx < config.width and 0 <= y + dy < config.height for d, (dx, dy) in STEP.items()}
            sides = tuple(d for d in STEP if inside[d])
            for d in sides:
                layout.route(colour_of(d, x, y), Rect(x, y), RAMP, d)
                dx, dy = STEP[d]
                layout.route(colour_of(opposite(d), x + dx, y + dy), Rect(x, y), d, RAMP)
            layout.place(program, Rect(x, y), depth=config.depth, steps=config.steps, odd=(x + y) % 2, sides=sides)


def run(config: StencilConfig, wafer: Wafer, setting: Setting) -> Outcome:
    layout = Layout(wafer, config.width, config.height)
    place(layout, config)
    simulation = setting.start(layout)
    shape = (config.height, config.width, config.depth)
    u = np.random.default_rng(setting.seed).standard_normal(shape).astype(np.float32)
    simulation.write("u", u.reshape(-1, config.depth))
    report = setting.run(simulation)
    expected = expected_values(u.astype(np.float64), config.steps)
    return Outcome(
        report=report, simulation=simulation, formula_cycles=formula(config, wafer),
        max_error=relative_error(simulation.read("u").reshape(shape), expected), tolerance=1e-5,
    )  # fmt: skip
