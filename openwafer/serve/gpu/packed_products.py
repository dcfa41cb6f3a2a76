"""Products with packed weights: how their kernels are started, and the memory that weights are unpacked into."""

from typing import Any

import torch

from openwafer.serve.gpu.packed_weight import PackedWeight
from openwafer.serve.gpu.plain import product
from openwafer.serve.gpu.plan import Project
from openwafer.serve.gpu.splitting import Splitting
from openwafer.serve.gpu.tuning import Tile, Tuning

_ALIGNED = 16  # outputs
_LEAST_GROUPS = 2  # of inputs, that a program takes


class PackedProducts:
    """All compute what `plain.PlainKernels.project` does; `overlap` says how kernels are started."""

    def __init__(self, tuning: Tuning, splitting: Splitting) -> None:
        from openwafer.serve.gpu import byte_gemv, packed_gemv

        # Untyped: the kernels are there only where Triton is.
        self._gemv: Any = packed_gemv.packed_gemv_kernel
        self._byte_gemv: Any = byte_gemv.byte_gemv_kernel
        self._skinny: Any = packed_gemv.packed_skinny_kernel
        self._unpack: Any = packed_gemv.unpack_kernel
        tl: Any = packed_gemv.tl
        self._kinds = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
        self._splitting = splitting
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
        eps, gain = (0.0, weight.gains) if norm is None else (norm.eps, norm.weight)
        flags = _flags(step, weight, adds, tile)
        if flags.pop("BITS") == 4:
            kernel = self._gemv
            flags |= {"DTYPE": self._kinds[weight.dtype], "SLICES": tile.num_warps}
        else:
            kernel = self._byte_gemv
            del flags["PAIRS"]
            is_whole = step.num_outputs % tile.num_outputs == 0
            flags |= {"AT_ONCE": max(1, tile.num_inputs // 128), "IS_WHOLE": is_whole}
        kernel[(-(-step.num_outputs // tile.num_outputs),)](
            src,
            gain,
            *_arrays(step, weight),
            out,
            eps,
            step.num_outputs,
            weight.gain_stride,
            HAS_NORM=norm is not None,
            **flags,
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
        is_invariant: bool = False,
    ) -> None:
        """`rows` are of the weight's dtype and normed already. If invariant, their number changes no order of sums."""
        num_rows, num_outputs = rows.shape[0], weight.shape[0]
        num_tiles = -(-num_outputs // tile.num_outputs)
        num_row_tiles = -(-num_rows // tile_rows)
        all_tiles = num_tiles if is_invariant else num_tiles * num_row_tiles
        splits = self._splitting.count(all_tiles, weight.num_groups, _LEAST_GROUPS)
        target = out
        # A gate's two sums are of different programs too: one that had both would have too few registers.
        is_part = splits > 1 or step.gated
        if is_part:
            target = torch.empty(splits, num_rows, num_outputs, dtype=torch.float32, device=out.device)
        flags = _flags(step, weight, adds, tile)
        del flags["GATED"]
        self._skinny[(num_row_tiles, num_tiles, splits)](
            rows,
            *_arrays(step, weight),
            target,
            num_rows,
            num_outputs,
            weight.gain_stride,
            rows.stride(0),
            out.stride(0),
            BLOCK_M=tile_rows,
            SPLITS=splits,
            IS_PART=is_part,
            **flags,
            **overlap,
        )
        if is_part:
            self._splitting.add(step, target, out, adds, overlap)

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
        block_n = 32
        self._unpack[(-(-num_outputs // block_n), weight.num_groups)](
            weight.quants,
            _gains(weight),
            out,
            num_outputs,
            weight.gain_stride,
            NUM_INPUTS=num_inputs,
            BITS=weight.num_bits,
            PAIRS=_in_pairs(weight),
            BLOCK_N=block_n,
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
    """Quants, gains and bias; what is not there is not read."""
    return weight.quants, _gains(weight), weight.gains if step.bias is None else step.bias


def _gains(weight: PackedWeight) -> torch.Tensor:
    """Scale and offset are read at once, as one number of twice the bits."""
    if weight.num_bits == 8:
        return weight.gains
    return weight.gains.view(torch.int64 if weight.gains.dtype == torch.float32 else torch.int32)


def _in_pairs(weight: PackedWeight) -> bool:
    """Whether two quants become bf16 at once, in instructions that Hopper GPUs and later ones have."""
    if weight.dtype != torch.bfloat16 or torch.version.hip is not None:
        return False
    quants = weight.quants
    return quants.is_meta or (quants.is_cuda and torch.cuda.get_device_capability(quants.device) >= (9, 0))


def _flags(step: Project, weight: PackedWeight, adds: bool, tile: Tile) -> dict[str, Any]:
    return {
        "NUM_INPUTS": weight.num_columns,
        "BITS": weight.num_bits,
        "PAIRS": _in_pairs(weight),
        "HAS_BIAS": step.bias is not None,
        "ADDS": adds,
        "GATED": step.gated,
        "KIND": step.activation or "none",
        "BLOCK_N": tile.num_outputs,
        "STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
    }
