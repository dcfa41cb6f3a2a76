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
    layer = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name in WEIGHTS:
        layer[name] /= np.sqrt(len(layer[name]))
    layer["wv"] *= 8  # or the new token would be lost among hundreds, and nobody would notice if it were left out
    angle = rng.random(head // 2).astype(np.float32)  # of the new token's position, the same in every head
    layer["cos"], layer["sin"] = np.cos(angle), np.sin(angle)
    return {name: array.astype(np.float16) for name, array in layer.items()}


def expected_values(layer: Layer, sizes: Sizes) -> np.ndarray:
    """The layer's output [width]. Every `heads / kv_heads` neighbouring heads share keys and values."""
    w = {name: array.astype(np.float64) for name, array in layer.items()}
    head = sizes.width // sizes.heads

    def norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.square(x).mean() + EPSILON) * gain

    def rotated(v: np.ndarray) -> np.ndarray:
        a, b = v[..., 0::2], v[..., 1::2]
        pairs = np.stack([a * w["cos"] - b * w["sin"], a * w["sin"] + b * w["cos"]], axis=-1)
        return pairs.reshape(v.shape)

    x = norm(w["x"], w["gain1"])
    q = rotated((x @ w["wq"]).reshape(sizes.kv_heads, -1, head))
    k, v = rotated((x @ w["wk"]).reshape(1, -1, head)), (x @ w["wv"]).reshape(1, -1, head)
    keys = np.concatenate([w["keys"].reshape(-1, sizes.kv_heads, head), k])
    values = np.concatenate([w["values"].reshape(-1, sizes.kv_heads, head), v])
    score = np.einsum("ghd,tgd->ght", q, keys) / np.sqrt(head)
    p = np.exp(score - score.max(axis=-1, keepdims=True))
    mixed = np.einsum("ght,tgd->ghd", p / p.sum(axis=-1, keepdims=True), values).reshape(-1)
    h = w["x"] + mixed @ w["wo"]
    z = norm(h, w["gain2"])
    gate, up = z @ w["gate"], z @ w["up"]
    return h + (up * gate / (1 + np.exp(-gate))) @ w["down"]


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
