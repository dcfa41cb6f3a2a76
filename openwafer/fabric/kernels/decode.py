"""One transformer decode layer on a P x P grid: one new token, its attention over a cache and itself, feed-forward.

Vectors are cut into P pieces. A vector "along y" has piece j in every PE of row j, one "along x" piece i in every PE of
column i; a product with a stationary matrix turns the one into the other. All sums use one set of ten colours in a
two-level tree: every router has a position for sums down the columns and one for sums along the rows, and the cores
turn them when the axis changes. D, F, S: elements of the width, of the feed-forward and of the context in a PE. fp16,
sums and softmax in fp32.

With several heads each has a block of P / heads columns, and scores are summed inside the blocks, on three colours of
their own. A key and value head lies in the block of every query head that uses it.
"""

import math
from dataclasses import dataclass

import numpy as np

from openwafer.config import option
from openwafer.errors import UserError
from openwafer.fabric.cost import tile_cycles, vector_cycles
from openwafer.fabric.isa import Dtype, Mem, Op
from openwafer.fabric.kernels.allreduce import Blocks, TwoLevel
from openwafer.fabric.kernels.axis import Axis
from openwafer.fabric.kernels.decode_values import expected_values, load, random_layer
from openwafer.fabric.kernels.outcome import Outcome, Setting, relative_error
from openwafer.fabric.kernels.rmsnorm import EPSILON
from openwafer.fabric.layout import Layout, Route
from openwafer.fabric.program import ProgramBuilder
from openwafer.systems import Wafer

BLOCK_COLOURS = (10, 11, 12)
DRAIN_CYCLES = 40  # the last words of a broadcast leave the queues of its root before the root turns its router


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """`openwafer simulate decode`."""

    grid: int = option(30, help="PEs in each direction", minimum=4)
    width: int = option(120, help="hidden size; a multiple of the grid", minimum=1)
    feed_forward: int = option(300, help="size of the feed-forward layer; a multiple of the grid", minimum=1)
    context: int = option(120, help="tokens attended to, the new one among them; a multiple of the grid", minimum=1)
    heads: int = option(1, help="attention heads; the grid is a multiple of them", minimum=1)
    kv_heads: int = option(1, help="key and value heads; the heads are a multiple of them", minimum=1)
    group: int = option(15, help="PEs per group of the two-level sums", minimum=2)

    def __post_init__(self) -> None:
        for name in ("width", "feed_forward", "context"):
            if getattr(self, name) % self.grid:
                raise UserError(f"--{name} must be a multiple of --grid {self.grid}, got {getattr(self, name)}")
        if self.width < 2 * self.grid:
            raise UserError(f"--width must be at least twice --grid {self.grid}, got {self.width}")
        if self.grid % self.heads or self.heads == self.grid:
            raise UserError(
                f"--grid must be a multiple of --heads, two columns or more each, got {self.grid} and {self.heads}"
            )
        if self.heads % self.kv_heads:
            raise UserError(f"--heads must be a multiple of --kv_heads, got {self.heads} and {self.kv_heads}")

    @property
    def pieces(self) -> tuple[int, int, int]:
        """D, F, S."""
        return self.width // self.grid, self.feed_forward // self.grid, self.context // self.grid

    def head_sum(self) -> Blocks:
        return Blocks(self.grid, self.grid // self.heads, BLOCK_COLOURS)


def settle_cycles(config: DecodeConfig, wafer: Wafer) -> int:
    """How long a row waits between the sum of its scores and its next sum down the columns; nothing on large grids.

    Rows do not leave the sum of queries, keys and values at once: the root of a column sends it down, then up, then
    lets its queues drain, and the last row has a key and a value to store. A row that is through with its scores
    before another has turned its routers would send the other what it takes for words of its own scores.
    """
    (d, _, s), costs, tree = config.pieces, wafer.costs, TwoLevel(config.grid, config.group)
    store = sum(vector_cycles(wafer, Op.MOV, Dtype.f16, d, [(0, 1)], (0, stride)) for stride in (s, 1))
    latest = 3 * d + costs.fabric_startup + DRAIN_CYCLES + store + 2 * config.group * wafer.hop_cycles
    soonest = tree.cycles(wafer, s) - tree._spread().cycles(wafer, s)
    return math.ceil(max(0.0, latest - soonest))


class Layer:
    """Builds the program of the PE at (x, y)."""

    def __init__(self, pe: ProgramBuilder, config: DecodeConfig, x: int, y: int, colours: tuple[int, ...]) -> None:
        self.pe, self.config, self.index, self.colours = pe, config, {"x": x, "y": y}, colours
        self.tree = TwoLevel(config.grid, config.group)
        self.axis = "y"
        self.zero, self.value, self.other = pe.register(), pe.register(), pe.register()
        self.word = pe.array("word", 1)

    def sum(self, vector: Mem, op: Op = Op.ADD) -> None:
        self.tree.emit(self.pe, self.index[self.axis], vector, op)

    def sum_heads(self, vector: Mem) -> None:
        """Along x, within the columns of each head."""
        if self.config.heads > 1:
            self.config.head_sum().emit(self.pe, self.index["x"], vector)
            return
        self.turn()
        self.sum(vector)
        cycles = settle_cycles(self.config, self.pe.wafer)
        if cycles:
            with self.pe.loop(1, overhead=cycles):
                pass
        self.turn()

    def turn(self) -> None:
        """Sums go along the other axis from here on."""
        if self.tree._root() == self.index[self.axis]:
            with self.pe.loop(1, overhead=DRAIN_CYCLES):
                pass
        for colour in self.colours:
            self.pe.advance(colour)
        self.axis = "x" if self.axis == "y" else "y"

    def product(self, out: Mem, matrix: Mem, vector: Mem) -> None:
        """out += vector @ matrix, with the rows of `matrix` one after the other."""
        self.pe.tile(out, matrix, vector, m=out.length, n=1, k=vector.length, outer_n=True)

    def norm(self, x: Mem, gain: Mem, out: Mem) -> None:
        pe, value = self.pe, self.value
        pe.set(value, 0.0)
        pe.vector(Op.DOT, value, x, x)
        pe.store(self.word, value)
        self.sum(self.word)
        pe.load(value, self.word)
        pe.set(self.other, 1.0 / self.config.width)
        pe.scalar(Op.FMUL, value, value, self.other)
        pe.set(self.other, EPSILON)
        pe.scalar(Op.FADD, value, value, self.other)
        pe.scalar(Op.FRSQRT, value, value)
        pe.mul(out, x, value)
        pe.mul(out, out, gain)

    def rotate(self, v: Mem, cos: Mem, sin: Mem, spare: Mem) -> None:
        """Rotary embedding of neighbouring pairs: (a, b) -> (a cos - b sin, a sin + b cos).

        The last of an odd number of elements stays as it is, as in the measured programs.
        """
        half = v.length // 2
        pe, even, odd = self.pe, slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        first, second = spare[:half], spare[half : 2 * half]
        pe.mul(first, v[even], sin)
        pe.mul(second, v[odd], sin)
        pe.mul(v[even], v[even], cos)
        pe.vector(Op.SUB, v[even], v[even], second)
        pe.mul(v[odd], v[odd], cos)
        pe.add(v[odd], v[odd], first)

    def softmax(self, x: Mem) -> None:
        pe, value = self.pe, self.value
        pe.set(value, -3.0e38)
        pe.vector(Op.MAXOF, value, x)
        pe.store(self.word, value)
        self.sum(self.word, Op.MAX)
        pe.load(value, self.word)
        pe.vector(Op.SUB, x, x, value)
        pe.vector(Op.EXP, x, x)
        pe.set(value, 0.0)
        pe.vector(Op.SUM, value, x)
        pe.store(self.word, value)
        self.sum(self.word)
        pe.load(value, self.word)
        pe.scalar(Op.FRECIP, value, value)
        pe.mul(x, x, value)

    def silu(self, gate: Mem, up: Mem, spare: Mem) -> None:
        """up = up * gate / (1 + exp(-gate))."""
        pe = self.pe
        pe.set(self.value, -1.0)
        pe.mul(spare, gate, self.value)
        pe.vector(Op.EXP, spare, spare)
        pe.set(self.value, 1.0)
        pe.add(spare, spare, self.value)
        pe.vector(Op.RECIP, spare, spare)
        pe.mul(gate, gate, spare)
        pe.mul(up, up, gate)


def program(
    pe: ProgramBuilder, *, config: DecodeConfig, x: int, y: int, is_last: bool, colours: tuple[int, ...]
) -> None:
    """`is_last`: the row of the new token, which is the last of the context."""
    d, f, s = config.pieces
    arrays = {
        name: pe.array(name, size, "f16")
        for name, size in (
            ("x", d), ("normed", d), ("gain1", d), ("gain2", d), ("qkv", 3 * d), ("score", s), ("mixed", d), ("h", d),
            ("ffn", 2 * f), ("spare", max(d, f)), ("cos", d // 2), ("sin", d // 2), ("keys", s * d), ("values", s * d),
            ("wq", d * d), ("wk", d * d), ("wv", d * d), ("wo", d * d), ("up", d * f), ("gate", d * f), ("down", d * f),
        )
    }  # fmt: skip
    layer = Layer(pe, config, x, y, colours)
    with pe.task("main", start=True):
        attention(pe, layer, arrays, d, is_last)
        feed_forward(pe, layer, arrays, f)


def attention(pe: ProgramBuilder, layer: Layer, at: dict[str, Mem], d: int, is_last: bool) -> None:
    for name in ("qkv", "score", "mixed", "h", "ffn"):
        pe.mov(at[name], layer.zero)
    layer.norm(at["x"], at["gain1"], at["normed"])
    parts = [at["qkv"][i * d : (i + 1) * d] for i in range(3)]
    for part, name in zip(parts, ("wq", "wk", "wv"), strict=True):
        layer.product(part, at[name], at["normed"])
    layer.sum(at["qkv"])
    for part in parts[:2]:
        layer.rotate(part, at["cos"], at["sin"], at["spare"][:d])
    if is_last:
        tokens = at["score"].length
        pe.mov(at["keys"][tokens - 1 :: tokens], parts[1])
        pe.mov(at["values"][(tokens - 1) * d :], parts[2])
    pe.set(layer.value, (layer.config.width // layer.config.heads) ** -0.5)
    pe.mul(parts[0], parts[0], layer.value)
    layer.product(at["score"], at["keys"], parts[0])
    layer.sum_heads(at["score"])
    layer.softmax(at["score"])
    layer.product(at["mixed"], at["values"], at["score"])
    layer.sum(at["mixed"])
    layer.turn()
    layer.product(at["h"], at["wo"], at["mixed"])
    layer.sum(at["h"])
    pe.add(at["x"], at["x"], at["h"])
    layer.turn()


def feed_forward(pe: ProgramBuilder, layer: Layer, at: dict[str, Mem], f: int) -> None:
    layer.norm(at["x"], at["gain2"], at["normed"])
    up, gate = at["ffn"][:f], at["ffn"][f:]
    layer.product(up, at["up"], at["normed"])
    layer.product(gate, at["gate"], at["normed"])
    layer.sum(at["ffn"])
    layer.silu(gate, up, at["spare"][:f])
    layer.turn()
    pe.mov(at["h"], layer.zero)
    layer.product(at["h"], at["down"], up)
    layer.sum(at["h"])
    pe.add(at["x"], at["x"], at["h"])


def route(layout: Layout, config: DecodeConfig) -> None:
    """Both axes on the same colours: position 0 of every switch for y, position 1 for x."""
    tables = []
    for name in ("y", "x"):
        draft = Layout(layout.wafer, layout.width, layout.height)
        TwoLevel(config.grid, config.group).route(Axis(draft, "y" if name == "y" else "x"))
        tables.append(draft)
    for colour in sorted({c for draft in tables for c in draft.route_of}):
        masks = np.zeros((2, 2, layout.height, layout.width), np.uint8)
        for position, draft in enumerate(tables):
            if colour in draft.route_of:
                masks[position] = draft._any_position(draft.route_of[colour])
        table = np.full((layout.height, layout.width), -1, np.int16)
        for combination in np.unique(masks.reshape(4, -1), axis=1).T:
            in_y, out_y, in_x, out_x = (int(mask) for mask in combination)
            layout.routes.append(Route((in_y, in_x), (out_y, out_x), ring=True))
            table[(masks.reshape(4, layout.height, layout.width) == combination[:, None, None]).all(axis=0)] = (
                len(layout.routes) - 1
            )
        layout.route_of[colour] = table


def route_heads(layout: Layout, config: DecodeConfig) -> None:
    if config.heads > 1:
        config.head_sum().route(Axis(layout, "x"))


def representatives(config: DecodeConfig, wafer: Wafer) -> np.ndarray:
    """For each index of an axis, the first index whose PE has the same instructions for all sums."""
    tree, first = TwoLevel(config.grid, config.group), {}
    for index in range(config.grid):
        pe = ProgramBuilder(wafer)
        vector = pe.array("vector", 1)
        with pe.task("sum"):
            tree.emit(pe, index, vector)
            if config.heads > 1:
                config.head_sum().emit(pe, index, vector)
        first.setdefault(tuple(map(tuple, pe.rows)), []).append(index)
    role = np.zeros(config.grid, int)
    for members in first.values():
        role[members] = members[0]
    return role


def formula(config: DecodeConfig, wafer: Wafer) -> float:
    """The sums, products and turns; elementwise work by its slow functions and start-ups."""
    costs, (d, f, s) = wafer.costs, config.pieces
    tree = TwoLevel(config.grid, config.group)
    sums = sum(tree.cycles(wafer, words) for words in (1, 3 * d, 1, 1, d, d, 1, 2 * f, d))
    sums += config.head_sum().cycles(wafer, s) if config.heads > 1 else tree.cycles(wafer, s)
    products = sum(
        tile_cycles(wafer, Dtype.f16, m, 1, k, outer_n=True)
        for m, k in ((d, d), (d, d), (d, d), (s, d), (d, s), (d, d), (f, d), (f, d), (d, f))
    )
    slow = costs.divide * (3 + s + 2 * f)
    turns = (4 if config.heads > 1 else 6) * (len(tree.colours) * costs.scalar)
    turns += settle_cycles(config, wafer) if config.heads == 1 else 0
    elementwise = 40 * max(costs.vector_minimum, costs.vector_startup + 2) + 40 * costs.scalar
    return costs.task_start + sums + products + slow + turns + elementwise


def place(layout: Layout, config: DecodeConfig, colours: tuple[int, ...]) -> None:
    """One program for each pair of roles along x and y, and its own for the new token's row."""
    role, is_last = representatives(config, layout.wafer), np.arange(config.grid) == config.grid - 1
    for y, last in sorted(set(zip(role.tolist(), is_last.tolist(), strict=True))):
        for x in sorted(set(role.tolist())):
            where = ((role == y) & (is_last == last))[:, None] & (role == x)[None, :]
            layout.place(program, where, config=config, x=x, y=y, is_last=last, colours=colours)


def run(config: DecodeConfig, wafer: Wafer, setting: Setting) -> Outcome:
    layout = Layout(wafer, config.grid, config.grid)
    route(layout, config)
    place(layout, config, tuple(layout.route_of))
    route_heads(layout, config)
    simulation = setting.start(layout)
    layer = random_layer(config, setting.seed)
    load(simulation, layer, config)
    report = setting.run(simulation)
    got = simulation.read("x").reshape(config.grid, config.grid, -1)
    expected = np.repeat(expected_values(layer, config).reshape(config.grid, 1, -1), config.grid, axis=1)
    return Outcome(
        report=report, simulation=simulation, formula_cycles=formula(config, wafer),
        max_error=relative_error(got, expected), tolerance=0.005,
    )  # fmt: skip
