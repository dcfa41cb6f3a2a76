"""The decode layer on the host: random weights and cache, what NumPy makes of them, and how they lie on the grid."""

from typing import Protocol

import numpy as np

from openwafer.fabric.kernels.rmsnorm import EPSILON
from openwafer.fabric.simulation import Simulation

WEIGHTS = ("wq", "wk", "wv", "wo", "up", "gate", "down")
Layer = dict[str, np.ndarray]


class Sizes(Protocol):
    """What the values depend on; `DecodeConfig` has it."""

    @property
    def grid(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def feed_forward(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...


def random_layer(sizes: Sizes, seed: int) -> Layer:
    """In fp16. `keys` (already rotated) and `values` are the cache: [context - 1, kv_heads * head size]."""
    rng = np.random.default_rng(seed)
    width, ffn, head = sizes.width, sizes.feed_forward, sizes.width // sizes.heads
    kv, cached = head * sizes.kv_heads, sizes.context - 1
    shapes = {
        "x": (width,), "gain1": (width,), "gain2": (width,), "keys": (cached, kv), "values": (cached, kv),
        "wq": (width, width), "wk": (width, kv), "wv": (width, kv), "wo": (width, width), "up": (width, ffn),
        "gate": (width, ffn), "down": (ffn, width),
    }  # fmt: skip
    # Values of the new token are large: among hundreds nobody would notice if it were left out.
    scale = {name: (8 if name == "wv" else 1) / np.sqrt(shapes[name][0]) for name in WEIGHTS}
    layer = {
        name: (np.float32(scale.get(name, 1)) * rng.standard_normal(shape, np.float32)).astype(np.float16)
        for name, shape in shapes.items()
    }
    num_pairs = sizes.grid // sizes.heads * (width // sizes.grid // 2)
    angle = rng.random(num_pairs, np.float32)  # of the new token's position, the same in every head
    layer["cos"], layer["sin"] = np.cos(angle).astype(np.float16), np.sin(angle).astype(np.float16)
    return layer


def expected_values(layer: Layer, sizes: Sizes) -> np.ndarray:
    """The layer's output [width]. Every `heads / kv_heads` neighbouring heads share keys and values."""
    head, piece = sizes.width // sizes.heads, sizes.width // sizes.grid

    def get(name: str) -> np.ndarray:  # one by one: all weights in fp64 would be several times the wafer's memory
        return layer[name].astype(np.float64)

    def norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.square(x).mean() + EPSILON) * gain

    def rotated(v: np.ndarray) -> np.ndarray:
        """Pairs within a PE; the last of an odd number of elements stays as it is."""
        pieces = v.reshape(*v.shape[:-1], -1, piece).copy()
        a, b = pieces[..., 0 : piece - 1 : 2].copy(), pieces[..., 1::2].copy()
        cos, sin = (get(name).reshape(-1, piece // 2) for name in ("cos", "sin"))
        pieces[..., 0 : piece - 1 : 2], pieces[..., 1::2] = a * cos - b * sin, a * sin + b * cos
        return pieces.reshape(v.shape)

    x = norm(get("x"), get("gain1"))
    q = rotated((x @ get("wq")).reshape(sizes.kv_heads, -1, head))
    k, v = rotated((x @ get("wk")).reshape(1, -1, head)), (x @ get("wv")).reshape(1, -1, head)
    keys = np.concatenate([get("keys").reshape(-1, sizes.kv_heads, head), k])
    values = np.concatenate([get("values").reshape(-1, sizes.kv_heads, head), v])
    score = np.einsum("ghd,tgd->ght", q, keys) / np.sqrt(head)
    p = np.exp(score - score.max(axis=-1, keepdims=True))
    mixed = np.einsum("ght,tgd->ghd", p / p.sum(axis=-1, keepdims=True), values).reshape(-1)
    h = get("x") + mixed @ get("wo")
    z = norm(h, get("gain2"))
    gate, up = z @ get("gate"), z @ get("up")
    return h + (up * gate / (1 + np.exp(-gate))) @ get("down")


def _for_query_heads(matrix: np.ndarray, sizes: Sizes) -> np.ndarray:
    """Columns of key and value heads, once for each query head that uses them: [rows, width]."""
    by_head = matrix.reshape(len(matrix), sizes.kv_heads, -1)
    return np.repeat(by_head, sizes.heads // sizes.kv_heads, axis=1).reshape(len(matrix), sizes.width)


def load(simulation: Simulation, layer: Layer, sizes: Sizes) -> None:
    """Vectors along y are repeated in every column, those along x in every row; matrices are tiled."""
    grid = sizes.grid
    placed = dict(layer)
    for name in ("wk", "wv"):
        placed[name] = _for_query_heads(layer[name], sizes)
    for name in ("keys", "values"):  # the last row is the new token's; the PEs fill it in
        placed[name] = _for_query_heads(np.pad(layer[name], ((0, 1), (0, 0))), sizes)
    for name in ("x", "gain1", "gain2"):
        simulation.write(name, np.repeat(placed[name].reshape(grid, 1, -1), grid, axis=1))
    for name in ("cos", "sin"):
        whole = np.tile(placed[name], sizes.heads)
        simulation.write(name, np.repeat(whole.reshape(1, grid, -1), grid, axis=0))
    for name in ("wq", "wk", "wv", "up", "gate", "values"):  # rows along y, columns along x
        rows, columns = (size // grid for size in placed[name].shape)
        simulation.write(name, placed[name].reshape(grid, rows, grid, columns).transpose(0, 2, 1, 3))
    for name in ("wo", "down"):  # rows along x, columns along y
        rows, columns = (size // grid for size in placed[name].shape)
        simulation.write(name, placed[name].reshape(grid, rows, grid, columns).transpose(2, 0, 1, 3))
    # The keys are multiplied by q, which lies along x, into scores along y.
    context, width = (size // grid for size in placed["keys"].shape)
    simulation.write("keys", placed["keys"].reshape(grid, context, grid, width).transpose(0, 2, 3, 1))
