"""Kernels under which a row has the same bits alone and in any batch: every sum has one order, whatever else is there.

All rows go through one tile size of one product kernel, and each row attends by itself, to parts of one size. So a
token is the same however its prompt was cut, found in the cache or computed again. It costs time where the faster
kernels would take more rows at once: prompts first of all. `bench/decode_gpu.py --invariant` measures it.
"""

from dataclasses import replace

import numpy as np
import torch

from openwafer.serve.gpu.fast import TritonKernels, power_of_two
from openwafer.serve.gpu.packed_weight import PackedWeight
from openwafer.serve.gpu.places import Places
from openwafer.serve.gpu.plan import Attention, Project
from openwafer.serve.gpu.sending import sent
from openwafer.serve.gpu.tuning import Tile, Tuning

_MOST_PARTS = 16
_LEAST_PART = 256  # keys
_ROWS_AT_ONCE = 256  # that attend in one launch: each part leaves a sum for each head, in memory


class InvariantKernels(TritonKernels):
    def __init__(
        self, max_positions: int, tuning: Tuning | None = None, tile: Tile | None = None, num_rows: int = 64
    ) -> None:
        """`tile` and `num_rows` are what a program of a product takes. The longest sequence decides on the parts."""
        super().__init__(tuning)
        self._one_tile = tile or Tile(num_outputs=64, num_inputs=64, num_warps=4, num_stages=4)
        self._num_rows = num_rows
        self._counted: list[torch.Tensor] = []
        keys = self.tuning.decode_tokens
        self._part_size = max(_LEAST_PART, -(-max_positions // (_MOST_PARTS * keys)) * keys)
        self._num_parts = power_of_two(-(-max_positions // self._part_size))

    def project(self, step: Project, src: torch.Tensor, wide: bool) -> torch.Tensor:
        dtype = torch.float32 if wide else step.weight.dtype
        out = torch.empty(src.shape[0], step.num_outputs, dtype=dtype, device=src.device)
        self._small(step, src, out, adds=False)
        return out

    def project_into(self, step: Project, src: torch.Tensor, dst: torch.Tensor) -> None:
        self._small(step, src, dst, adds=True)

    def attend(
        self, step: Attention, qkv: torch.Tensor, places: Places, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty(qkv.shape[0], step.attend.q.width, dtype=qkv.dtype, device=qkv.device)
        for some in self._numbers(qkv.shape[0], qkv.device).split(_ROWS_AT_ONCE):
            self.attend_singles(step, qkv, replace(places, singles=some), keys, values, out)
        return out

    def _numbers(self, count: int, device: torch.device) -> torch.Tensor:
        """0 to `count`. Copied, not computed: kernels read them before the one that would compute them has ended."""
        held = next((numbers for numbers in self._counted if numbers.device == device and len(numbers) >= count), None)
        if held is None:
            held = sent(np.arange(max(count, 4096), dtype=np.int32), device)
            self._counted.append(held)  # for good: graphs remember where they are
        return held[:count]

    def _parts(self, num_programs: int) -> tuple[int, int]:
        return self._num_parts, self._part_size

    def _small(self, step: Project, src: torch.Tensor, out: torch.Tensor, adds: bool) -> None:
        weight, tile = step.weight, self._one_tile
        rows = src.to(weight.dtype) if step.norm is None else self.norm(step.norm, src, weight.dtype)
        if isinstance(weight, PackedWeight):
            overlap = self._overlap(src)
            self.packed.few_rows(step, weight, rows, out, adds, tile, self._num_rows, overlap, is_invariant=True)
            return
        bias = weight if step.bias is None else step.bias
        num_rows, num_inputs = rows.shape
        num_tiles = -(-step.num_outputs // tile.num_outputs)
        # Not by the number of rows, so that each row's order of sums stays the same.
        splits = self.splitting.count(num_tiles, -(-num_inputs // tile.num_inputs), tile.num_stages)
        target = out
        if splits > 1:
            target = torch.empty(splits, num_rows, weight.shape[0], dtype=torch.float32, device=out.device)
        self._skinny[(num_tiles, -(-num_rows // self._num_rows), splits)](
            rows,
            weight,
            bias,
            target,
            num_rows,
            step.num_outputs,
            rows.stride(0),
            out.stride(0),
            NUM_INPUTS=num_inputs,
            HAS_BIAS=step.bias is not None,
            ADDS=adds,
            GATED=step.gated,
            KIND=step.activation or "none",
            BLOCK_M=self._num_rows,
            BLOCK_N=tile.num_outputs,
            BLOCK_K=tile.num_inputs,
            SPLITS=splits,
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
            **self._overlap(src),
        )
        if splits > 1:
            self.splitting.add(step, target, out, adds, self._overlap(src))
