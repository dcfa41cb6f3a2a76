"""What the two GEMM kernels share: their config, their tiles, their check against NumPy."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from openwafer.config import option
from openwafer.errors import UserError
from openwafer.fabric.kernels.outcome import relative_error
from openwafer.fabric.simulation import Simulation


@dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """`openwafer simulate gemm`: C = A @ B, square, on a P x P grid, one tile of each matrix per PE."""

    grid: int = option(60, help="PEs in each direction (even for --algorithm mesh)", minimum=2)
    size: int = option(480, help="rows and columns of the matrices; a multiple of the grid", minimum=1)
    algorithm: Literal["summa", "mesh"] = option("summa", help="multicast (summa) or cyclic shifts (mesh)")
    dtype: Literal["f16", "bf16", "f32"] = option("f16", help="element type")

    def __post_init__(self) -> None:
        if self.size % self.grid:
            raise UserError(f"--size must be a multiple of --grid, got {self.size} and {self.grid}")
        if self.algorithm == "mesh" and self.grid % 2:
            raise UserError(f"--grid must be even for --algorithm mesh, got {self.grid}")

    @property
    def tile(self) -> int:
        return self.size // self.grid


def random_matrices(config: GemmConfig, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (config.size, config.size)
    kind = np.float16 if config.dtype == "f16" else np.float32
    scale = np.float32(1 / np.sqrt(config.size))
    return rng.standard_normal(shape, np.float32).astype(kind), (scale * rng.standard_normal(shape, np.float32)).astype(
        kind
    )


def to_tiles(matrix: np.ndarray, grid: int) -> np.ndarray:
    """[row, column] -> [grid row, grid column, column, row]: column-major tiles."""
    tile = len(matrix) // grid
    return matrix.reshape(grid, tile, grid, tile).transpose(0, 2, 3, 1)


def from_tiles(tiles: np.ndarray, grid: int) -> np.ndarray:
    tile = round(tiles[0].size ** 0.5) if tiles.ndim == 2 else tiles.shape[-1]
    return tiles.reshape(grid, grid, tile, tile).transpose(0, 3, 1, 2).reshape(grid * tile, grid * tile)


def product_error(simulation: Simulation, config: GemmConfig, a: np.ndarray, b: np.ndarray, rows: np.ndarray) -> float:
    """Error of C; `rows` maps a row and column of PEs to the tile it holds."""
    tiles = simulation.read("c").reshape(config.grid, config.grid, -1)[np.ix_(rows, rows)]
    got = from_tiles(tiles.reshape(config.grid**2, -1), config.grid)
    return relative_error(got, a.astype(np.float32) @ b.astype(np.float32))


def tolerance(config: GemmConfig) -> float:
    """Sums of `size` products in the element type, one rounding each."""
    return {"f16": 1e-3, "bf16": 8e-3, "f32": 1e-7}[config.dtype] * max(4.0, config.size**0.5)
