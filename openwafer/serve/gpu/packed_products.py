"""Products with packed weights: how their kernels are started, and the memory that weights are unpacked into."""

from typing import Any

import torch

from openwafer.serve.gpu.packed_weight import PackedWeight
from openwafer.serve.gpu.plain import product
from openwafer.serve.gpu.plan import Project
from openwafer.serve.gpu.tuning import Tile, Tuning
from openwafer.serve.matrix import BLOCK

_ALIGNED = 16  # outputs


class PackedProducts:
    """All compute what `plain.PlainKernels.project` does; `overlap` says how kernels are started."""

    def __init__(self, tuning: Tuning) -> None:
        from openwafer.serve.gpu import packed_gemv

        # Untyped: the kernels are there only where Triton is.
        self._gemv: Any = packed_gemv.packed_gemv_kernel
        self._skinny: Any = packed_gemv.packed_skinny_kernel
        self._unpack: Any = packed_gemv.unpack_kernel
        self._scratch_bytes = tuning.scratch_bytes
        self._scratches: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def one_row(
        self,
        step: Project,
        weight: PackedWeight,
        src: torch.Tensor,
        out: torch.Tensor,
        adds: bool,
        tile: Tile,
        overlap: dict[str, Any],
    ) -> None:
        norm = step.norm
        eps, gain = (0.0, weight.scales) if norm is None else (norm.eps, norm.weight)
        self._gemv[(-(-step.num_outputs // tile.num_outputs),)](
            src,
            gain,
            *_arrays(step, weight),
            out,
            eps,
            step.num_outputs,
            HAS_NORM=norm is not None,
            **_flags(step, weight, adds, tile),
            **overlap,
        )

    def few_rows(
        self,
        step: Project,
        weight: PackedWeight,
        rows: torch.Tensor,
        out: torch.Tensor,
        adds: bool,
        tile: Tile,
        tile_rows: int,
        overlap: dict[str, Any],
    ) -> None:
        """`rows` are of the weight's dtype and normed already."""
        self._skinny[(-(-rows.shape[0] // tile_rows), -(-step.num_outputs // tile.num_outputs))](
            rows,
            *_arrays(step, weight),
            out,
            rows.shape[0],
            step.num_outputs,
            rows.stride(0),
            out.stride(0),
            BLOCK_M=tile_rows,
            **_flags(step, weight, adds, tile),
            **overlap,
        )

    def product(self, rows: torch.Tensor, weight: PackedWeight, wide: bool, overlap: dict[str, Any]) -> torch.Tensor:
        """The library's, of many rows: [r, outputs] of the weight's dtype, or fp32 if `wide`."""
        if self.fits(weight):
            return product(rows, self.unpacked(weight, overlap), wide)
        # Parts begin where pointers are aligned alike, so that one kernel does for all.
        step = max(1, self._scratch_bytes // (weight.num_columns * weight.dtype.itemsize * _ALIGNED)) * _ALIGNED
        parts = [weight.part(first, first + step) for first in range(0, weight.shape[0], step)]
        return torch.cat([product(rows, self.unpacked(part, overlap), wide) for part in parts], dim=1)

    def fits(self, weight: PackedWeight) -> bool:
        """Whether there is room for all of it at once."""
        return weight.shape.numel() * weight.dtype.itemsize <= self._scratch_bytes

    def unpacked(self, weight: PackedWeight, overlap: dict[str, Any]) -> torch.Tensor:
        """`weight.dense()`, until the next call."""
        num_outputs, num_inputs = weight.shape
        out = self._scratch(weight, num_outputs * num_inputs).view(num_outputs, num_inputs)
        block_n, blocks = 16, 8
        self._unpack[(-(-num_outputs // block_n), -(-weight.num_blocks // blocks))](
            weight.quants,
            weight.scales,
            weight.scales if weight.offsets is None else weight.offsets,
            out,
            num_outputs,
            NUM_INPUTS=num_inputs,
            BITS=weight.num_bits,
            BLOCK_N=block_n,
            BLOCKS=blocks,
            num_warps=4,
            **overlap,
        )
        return out

    def _scratch(self, weight: PackedWeight, count: int) -> torch.Tensor:
        """As large as the largest that was asked for. It may move: graphs have too few rows to need it."""
        key = weight.quants.device, weight.dtype
        if key not in self._scratches or len(self._scratches[key]) < count:
            self._scratches.pop(key, None)
            self._scratches[key] = torch.empty(count, device=key[0], dtype=key[1])
        return self._scratches[key][:count]


def _arrays(step: Project, weight: PackedWeight) -> tuple[torch.Tensor, ...]:
    """Quants, scales, offsets and bias; what is not there is not read."""
    offsets = weight.scales if weight.offsets is None else weight.offsets
    return weight.quants, weight.scales, offsets, weight.scales if step.bias is None else step.bias


def _flags(step: Project, weight: PackedWeight, adds: bool, tile: Tile) -> dict[str, Any]:
    return {
        "NUM_INPUTS": weight.num_columns,
        "BITS": weight.num_bits,
        "HAS_BIAS": step.bias is not None,
        "ADDS": adds,
        "GATED": step.gated,
        "KIND": step.activation or "none",
        "BLOCK_N": tile.num_outputs,
        "BLOCKS": max(1, tile.num_inputs // BLOCK),
        "STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
    }
