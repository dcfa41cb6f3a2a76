"""C = A @ B by multicast (SUMMA): in step k, column k of the grid sends its tiles of A along the rows and row k its
tiles of B along the columns; every PE multiplies what arrived.

Each axis uses two colours per direction. A router passes on what comes from behind and what its own core injects,
to the next router and to its core. Only one PE of a line sends on a colour at a time: even and odd steps use different
ones, and the sender of step k+2 starts when it has the tile of step k+1, a whole step later. Tiles of step k+1 travel
while those of step k are multiplied.

The measured steps take longer than this needs. We suppose that those programs set up router and queues anew for each
broadcast, because its sender moves on, and let every PE spend the time (`reroute`, fitted) once per axis and step.
"""

import numpy as np

from openwafer.fabric.cost import tile_cycles, vector_cycles
from openwafer.fabric.isa import Mem, Op, Reg
from openwafer.fabric.kernels.axis import Axis
from openwafer.fabric.kernels.matrices import GemmConfig, product_error, random_matrices, to_tiles, tolerance
from openwafer.fabric.kernels.outcome import Outcome, Setting
from openwafer.fabric.kernels.reduce import step_cycles
from openwafer.fabric.layout import RAMP, Layout, Rect
from openwafer.fabric.program import ProgramBuilder, parse_dtype
from openwafer.systems import Wafer

A_COLOURS, B_COLOURS = ((0, 1), (2, 3)), ((4, 5), (6, 7))  # (onwards, backwards) of even and of odd steps
Colours = tuple[tuple[int, int], tuple[int, int]]


def route_multicast(axis: Axis, colours: Colours) -> None:
    for onwards, backwards in colours:
        for colour, onward, back in ((onwards, axis.forward, axis.backward), (backwards, axis.backward, axis.forward)):
            last = axis.length - 1 if onward == axis.forward else 0
            axis.route(colour, int(last == 0), (RAMP, back), (onward, RAMP), axis.length - 1)
            axis.route(colour, last, (RAMP, back), RAMP)


class Line:
    """What a PE does along one axis in each step: send its own tile, or receive from before or from behind."""

    def __init__(
        self, pe: ProgramBuilder, colours: Colours, index: Reg, is_odd: int, first_thread: int, tile: Mem
    ) -> None:
        self.pe, self.colours, self.index, self.thread, self.tile = pe, colours, index, first_thread, tile
        self.is_odd = is_odd  # whether it is this PE's turn in odd steps
        self.flag = pe.register()
        self.spare = pe.array(f"spare{first_thread}", tile.length, tile.dtype.name)

    def fetch(self, step: Reg, buffer: Mem, odd: int) -> None:
        """Start to get the tile of `step` into `buffer`; thread `self.thread` completes when it is there."""
        pe, (onward, backward), thread = self.pe, self.colours[odd], self.thread
        with pe.loop(1, overhead=pe.wafer.costs.reroute):
            pass
        if odd == self.is_odd:
            pe.scalar(Op.IEQ, self.flag, step, self.index)
            with pe.when(self.flag):
                pe.mov(self.spare, pe.receive(backward), thread=thread + 1)  # its own words come back to it
                pe.mov(buffer, pe.receive(onward), thread=thread)
                pe.mov(pe.send(backward), self.tile, thread=thread + 2)
                pe.mov(pe.send(onward), self.tile, thread=thread + 3)
        pe.scalar(Op.ILT, self.flag, step, self.index)
        with pe.when(self.flag):
            pe.mov(buffer, pe.receive(onward), thread=thread)
        pe.scalar(Op.ILT, self.flag, self.index, step)
        with pe.when(self.flag):
            pe.mov(buffer, pe.receive(backward), thread=thread)


def program(pe: ProgramBuilder, *, tile: int, dtype: str, grid: int, odd_x: int, odd_y: int) -> None:
    size = tile * tile
    own = [pe.array(name, size, dtype) for name in ("a", "b")]
    buffers = [[pe.array(f"{name}{i}", size, dtype) for name in ("a", "b")] for i in range(2)]
    c = pe.array("c", size, dtype)
    lines = [
        Line(pe, A_COLOURS, pe.param("x"), odd_x, 0, own[0]),
        Line(pe, B_COLOURS, pe.param("y"), odd_y, 4, own[1]),
    ]
    step, zero, more = pe.register(), pe.register(), pe.register()
    with pe.task("main", start=True):
        pe.mov(c, zero)
        fetch_both(pe, lines, step, buffers[0], 0)
        with pe.loop((grid + 1) // 2, overhead=pe.wafer.costs.scalar):
            for now in range(2):
                pe.scalar(Op.ILT, more, step, grid)
                with pe.when(more):
                    for line in lines:
                        pe.wait(line.thread)
                    pe.scalar(Op.IADD, step, step, 1)
                    pe.scalar(Op.ILT, more, step, grid)
                    with pe.when(more):
                        fetch_both(pe, lines, step, buffers[1 - now], 1 - now)
                    pe.tile(c, buffers[now][0], buffers[now][1], m=tile, n=tile, k=tile)


def fetch_both(pe: ProgramBuilder, lines: list[Line], step: Reg, buffers: list[Mem], odd: int) -> None:
    for line, buffer in zip(lines, buffers, strict=True):
        line.fetch(step, buffer, odd)


def formula(config: GemmConfig, wafer: Wafer) -> float:
    """P steps of two set-ups, waits and receives and a product; a PE's own sends delay it once along each axis."""
    costs, dtype, tile = wafer.costs, parse_dtype(config.dtype), config.tile
    size = tile * tile
    clear = vector_cycles(wafer, Op.MOV, dtype, size, [], (0, 1))
    step = (
        2 * costs.task_start
        + 2 * costs.fabric_startup
        + 2 * costs.reroute
        + tile_cycles(wafer, dtype, tile, tile, tile)
        + 15 * costs.scalar
    )
    sender = 3 * costs.fabric_startup
    return (
        costs.task_start
        + clear
        + config.grid * step
        + 2 * sender
        + (size + step_cycles(wafer, 0))
        + config.grid * wafer.hop_cycles
    )


def run(config: GemmConfig, wafer: Wafer, setting: Setting) -> Outcome:
    grid = config.grid
    layout = Layout(wafer, grid, grid)
    route_multicast(Axis(layout, "x"), A_COLOURS)
    route_multicast(Axis(layout, "y"), B_COLOURS)
    for odd_x, odd_y in ((0, 0), (0, 1), (1, 0), (1, 1)):
        rect = Rect(odd_x, odd_y, grid - odd_x, grid - odd_y, 2, 2)
        layout.place(program, rect, tile=config.tile, dtype=config.dtype, grid=grid, odd_x=odd_x, odd_y=odd_y)
    layout.param("x", np.arange(grid)[None, :])
    layout.param("y", np.arange(grid)[:, None])
    simulation = setting.start(layout)
    a, b = random_matrices(config, setting.seed)
    simulation.write("a", to_tiles(a, grid))
    simulation.write("b", to_tiles(b, grid))
    report = setting.run(simulation)
    error = product_error(simulation, config, a, b, np.arange(grid))
    return Outcome(
        report=report, simulation=simulation, formula_cycles=formula(config, wafer), max_error=error,
        tolerance=tolerance(config),
    )  # fmt: skip
