"""C = A @ B by cyclic shifts: in every step each PE multiplies its tiles and passes both on around a ring.

A ring on a line without long wires: 0, 2, 4, ... out and ..., 5, 3, 1 back, so that nobody sends further than two
hops. A moves along x, B along y. B is loaded where it starts; A is aligned on the wafer, row R of the ring by R steps.
"""

import numpy as np

from openwafer.fabric.cost import tile_cycles, vector_cycles
from openwafer.fabric.isa import Mem, Op, Reg
from openwafer.fabric.kernels.axis import Axis
from openwafer.fabric.kernels.matrices import GemmConfig, product_error, random_matrices, to_tiles, tolerance
from openwafer.fabric.kernels.outcome import Outcome, Setting
from openwafer.fabric.kernels.reduce import route_line, step_cycles
from openwafer.fabric.layout import Layout
from openwafer.fabric.program import ProgramBuilder, parse_dtype
from openwafer.systems import Wafer

# First colours of the rings: A onwards, A backwards (to align), B onwards. Each uses four.
A_RING, A_BACK, B_RING = 0, 4, 8


def ring_position(index: int, length: int) -> int:
    """Place of the PE at `index` of the line in the ring."""
    return index // 2 if index % 2 == 0 else length - 1 - index // 2


def next_on_ring(index: int, length: int) -> int:
    if index % 2 == 0:
        return index + 2 if index + 2 < length else index + 1
    return max(index - 2, 0)


def _colour(first: int, index: int) -> int:
    """Of the stream that `index` sends: neighbours that send the same way must differ, and so must both ways."""
    return first + index % 2 * 2 + index // 2 % 2


def route_ring(axis: Axis, first: int, backwards: bool) -> None:
    for index in range(axis.length):
        other = next_on_ring(index, axis.length)
        sender, receiver = (other, index) if backwards else (index, other)
        route_line(axis, _colour(first, index), sender, receiver)


def ring_colours(first: int, index: int, length: int, backwards: bool) -> tuple[int, int]:
    """Colours that the PE at `index` sends and receives."""
    before = next(i for i in range(max(0, index - 2), min(length, index + 3)) if next_on_ring(i, length) == index)
    onward, back = _colour(first, index), _colour(first, before)
    return (back, onward) if backwards else (onward, back)


def exchange(pe: ProgramBuilder, colours: tuple[int, int], send: Mem, receive: Mem, threads: tuple[int, int]) -> None:
    pe.mov(pe.send(colours[0]), send, thread=threads[0])
    pe.mov(receive, pe.receive(colours[1]), thread=threads[1])


def align(pe: ProgramBuilder, colours: tuple[int, int], count: Reg, a: list[Mem]) -> None:
    """`count` shifts of A; it stays in a[0]."""
    with pe.loop(count, overhead=pe.wafer.costs.scalar):
        exchange(pe, colours, a[0], a[1], (0, 1))
        pe.wait(0)
        pe.wait(1)
        pe.mov(a[0], a[1])


def program(pe: ProgramBuilder, *, tile: int, dtype: str, grid: int, x: int, y: int) -> None:
    """x and y stand for all indices with the same neighbours: see `representative`."""
    size = tile * tile
    a = [pe.array(f"a{i}", size, dtype) for i in range(2)]
    b = [pe.array(f"b{i}", size, dtype) for i in range(2)]
    c = pe.array("c", size, dtype)
    forward, backward, zero = pe.param("shifts_forward"), pe.param("shifts_backward"), pe.register()
    with pe.task("main", start=True):
        pe.mov(c, zero)
        align(pe, ring_colours(A_RING, x, grid, False), forward, a)
        align(pe, ring_colours(A_BACK, x, grid, True), backward, a)
        with pe.loop(grid // 2, overhead=pe.wafer.costs.scalar):
            for now, then in ((0, 1), (1, 0)):
                exchange(pe, ring_colours(A_RING, x, grid, False), a[now], a[then], (0, 1))
                exchange(pe, ring_colours(B_RING, y, grid, False), b[now], b[then], (2, 3))
                pe.tile(c, a[now], b[now], m=tile, n=tile, k=tile)
                for thread in range(4):
                    pe.wait(thread)


def representative(index: int, length: int) -> int:
    """The smallest index whose PE sends and receives the same colours over the same kind of neighbours."""
    if index >= length - 2 or index < 2:
        return index
    return 2 + (index - 2) % 4


def formula(config: GemmConfig, wafer: Wafer) -> float:
    """Clear C; P/2 alignment shifts; P steps of four sends and receives, one tile product, four waits."""
    costs, dtype, tile = wafer.costs, parse_dtype(config.dtype), config.tile
    size = tile * tile
    move = vector_cycles(wafer, Op.MOV, dtype, size, [(0, 1)], (0, 1))
    clear = vector_cycles(wafer, Op.MOV, dtype, size, [], (0, 1))
    shift = costs.fabric_startup + size + step_cycles(wafer, 2) + costs.task_start + move + costs.scalar
    compute = tile_cycles(wafer, dtype, tile, tile, tile)
    transfer = size + step_cycles(wafer, 2)
    step = 4 * costs.fabric_startup + max(compute, transfer) + 4 * costs.task_start
    return costs.task_start + clear + config.grid / 2 * shift + config.grid * step + config.grid / 2 * costs.scalar


def run(config: GemmConfig, wafer: Wafer, setting: Setting) -> Outcome:
    grid = config.grid
    layout = Layout(wafer, grid, grid)
    horizontal, vertical = Axis(layout, "x"), Axis(layout, "y")
    route_ring(horizontal, A_RING, backwards=False)
    route_ring(horizontal, A_BACK, backwards=True)
    route_ring(vertical, B_RING, backwards=False)
    place(layout, config)
    ring = np.array([ring_position(index, grid) for index in range(grid)])
    shifts = ring[:, None]
    layout.param("shifts_forward", np.where(shifts > grid // 2, grid - shifts, 0))
    layout.param("shifts_backward", np.where(shifts > grid // 2, 0, shifts))
    simulation = setting.start(layout)
    a, b = random_matrices(config, setting.seed)
    a_tiles, b_tiles = to_tiles(a, grid), to_tiles(b, grid)
    rows, columns = np.meshgrid(ring, ring, indexing="ij")
    simulation.write("a0", a_tiles[rows, columns])
    simulation.write("b0", b_tiles[(rows + columns) % grid, columns])
    report = setting.run(simulation)
    error = product_error(simulation, config, a, b, np.argsort(ring))
    return Outcome(
        report=report, simulation=simulation, formula_cycles=formula(config, wafer), max_error=error,
        tolerance=tolerance(config),
    )  # fmt: skip


def place(layout: Layout, config: GemmConfig) -> None:
    """One program for each pair of roles along x and y."""
    grid = config.grid
    role = np.array([representative(index, grid) for index in range(grid)])
    for x in sorted(set(role.tolist())):
        for y in sorted(set(role.tolist())):
            where = (role[:, None] == y) & (role[None, :] == x)
            layout.place(program, where, tile=config.tile, dtype=config.dtype, grid=grid, x=x, y=y)
