"""Products whose inputs are split over programs, because there are too few tiles of outputs for all multiprocessors."""

from typing import Any

import torch

from openwafer.serve.gpu.plan import Project
from openwafer.serve.gpu.tuning import Tuning


def most_bytes(num_rows: int, width: int, tuning: Tuning) -> int:
    """Of the parts of one product with so many rows and at most so many inputs and outputs, see `Splitting.count`."""
    largest = max(tile.num_outputs for tile in (tuning.packed_skinny, tuning.byte_skinny))
    few_tiles, few_pieces = tuning.num_programs * largest + width + width // 2, width * max(1, width // 128)
    return 4 * num_rows * min(few_tiles, few_pieces)


class Splitting:
    def __init__(self, tuning: Tuning) -> None:
        from openwafer.serve.gpu import split_sums

        # Untyped: the kernel is there only where Triton is.
        self._sum: Any = split_sums.sum_kernel
        self._num_programs = tuning.num_programs

    def count(self, num_tiles: int, num_pieces: int, least: int) -> int:
        """Programs that share a tile whose inputs come in so many pieces; each takes `least` of them, if there are."""
        wanted = (self._num_programs + num_tiles // 2) // num_tiles
        each = -(-num_pieces // max(1, min(wanted, num_pieces // least)))
        return -(-num_pieces // each)

    def add(self, step: Project, parts: torch.Tensor, out: torch.Tensor, adds: bool, overlap: dict[str, Any]) -> None:
        """The end of a product: `out` is written or added to. Parts fp32 [splits, rows, rows of the weight]"""
        (splits, num_rows, _), num_outputs = parts.shape, step.num_outputs
        block = 512
        self._sum[(num_rows, -(-num_outputs // block))](
            parts,
            parts if step.bias is None else step.bias,
            out,
            num_rows,
            num_outputs,
            out.stride(0),
            SPLITS=splits,
            HAS_BIAS=step.bias is not None,
            ADDS=adds,
            GATED=step.gated,
            KIND=step.activation or "none",
            BLOCK=block,
            num_warps=4,
            **overlap,
        )
