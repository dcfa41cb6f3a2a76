"""The steps of a plan with Triton kernels where they pay, and with the library's matrix products elsewhere.

Everything here computes what `plain.PlainKernels` does, up to rounding.
"""

import logging
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from openwafer.errors import UserError
from openwafer.serve.gpu.interpreted import is_interpreted, mend
from openwafer.serve.gpu.packed_products import PackedProducts
from openwafer.serve.gpu.packed_weight import PackedWeight
from openwafer.serve.gpu.places import Places, Run
from openwafer.serve.gpu.plain import Kernels, PlainKernels, product
from openwafer.serve.gpu.plan import Attention, Project
from openwafer.serve.gpu.sending import sent
from openwafer.serve.gpu.splitting import Splitting
from openwafer.serve.gpu.tuning import Tile, Tuning
from openwafer.serve.program import Norm, Program

_log = logging.getLogger(__name__)


def best_kernels(program: Program, batch_invariant: bool = False) -> Kernels:
    """The fast ones where there is Triton and the heads have a size that they take."""
    size = program.config.head_size
    missing = None
    if find_spec("triton") is None:
        missing = "Triton is not installed"
    elif size < 16 or size & (size - 1):
        missing = f"heads of size {size} are no power of two"
    if missing is None and batch_invariant:
        from openwafer.serve.gpu.invariant import InvariantKernels

        return InvariantKernels(program.config.max_position_embeddings)
    if missing is None:
        return TritonKernels()
    if batch_invariant:
        raise UserError(f"batch_invariant: {missing}, and PyTorch's own products depend on the batch; use --device cpu")
    _log.warning("%s: the model runs in plain PyTorch operations, without graphs and slower", missing)
    return PlainKernels()


class TritonKernels(PlainKernels):
    records = True

    def __init__(self, tuning: Tuning | None = None) -> None:
        from openwafer.serve.gpu import attention, gemv, rows

        if is_interpreted():
            mend()
        # Untyped: the kernels are there only where Triton is.
        self._gemv: Any = gemv.gemv_kernel
        self._skinny: Any = gemv.skinny_kernel
        self._norm: Any = rows.norm_kernel
        self._gate: Any = rows.gate_kernel
        self._rotate: Any = rows.rotate_and_store_kernel
        self._decode: Any = attention.decode_kernel
        self._merge: Any = attention.merge_kernel
        self._prompt: Any = attention.prompt_kernel
        self.tuning = tuning or Tuning()
        self.splitting = Splitting(self.tuning)
        self.packed = PackedProducts(self.tuning, self.splitting)
        self._overlaps: dict[torch.device, dict[str, Any]] = {}
        self._adds_wide = self.tuning.library_adds  # until the library's product says that it cannot add to fp32
        self._tiles: tuple[tuple[Run, ...], torch.Tensor] | None = None  # those of the last batch: all layers share

    def norm(self, step: Norm, src: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        num_rows, width = src.shape
        run = step.weight.shape[0]
        out = torch.empty(num_rows, width, dtype=dtype, device=src.device)
        self._norm[(num_rows, width // run)](
            src,
            step.weight,
            step.weight if step.bias is None else step.bias,
            out,
            step.eps,
            src.stride(0),
            out.stride(0),
            WIDTH=run,
            CENTRED=step.centred,
            BLOCK=power_of_two(run),
            num_warps=8 if run > 2048 else 4,
            **self._overlap(src),
        )
        return out

    def project(self, step: Project, src: torch.Tensor, wide: bool) -> torch.Tensor:
        dtype = torch.float32 if wide else step.weight.dtype
        if self._is_small(step, src):
            out = torch.empty(src.shape[0], step.num_outputs, dtype=dtype, device=src.device)
            self._small(step, src, out, adds=False)
            return out
        rows = src.to(step.weight.dtype) if step.norm is None else self.norm(step.norm, src, step.weight.dtype)
        if isinstance(step.weight, PackedWeight):
            out = self.packed.product(rows, step.weight, wide, self._overlap(src))
        else:
            out = product(rows, step.weight, wide)
        if step.bias is not None:
            out = (out + step.bias).to(out.dtype)
        return self._activated(step, out)

    def project_into(self, step: Project, src: torch.Tensor, dst: torch.Tensor) -> None:
        if self._is_small(step, src):
            self._small(step, src, dst, adds=True)
        elif not self._add_product(step, src, dst):
            dst += self.project(step, src, wide=False)

    def _add_product(self, step: Project, src: torch.Tensor, dst: torch.Tensor) -> bool:
        """The library's product added to fp32 in one kernel, if there is nothing in between and it can do that."""
        if not (self._adds_wide and src.is_cuda and step.bias is None and step.activation is None):
            return False
        if dst.dtype == step.weight.dtype or not dst.is_contiguous():
            return False
        rows = src.to(step.weight.dtype) if step.norm is None else self.norm(step.norm, src, step.weight.dtype)
        weight = step.weight
        if isinstance(weight, PackedWeight):
            if not self.packed.fits(weight):
                return False
            weight = self.packed.unpacked(weight, self._overlap(src))
        try:
            torch.ops.aten.addmm.dtype_out(dst, rows, weight.t(), torch.float32, out=dst)
        except RuntimeError as error:
            _log.info("this PyTorch adds no 16-bit products to fp32: %s", error)
            self._adds_wide = False
        return self._adds_wide

    def rotate_and_store(
        self, step: Attention, qkv: torch.Tensor, places: Places, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        attend, num_kv_heads = step.attend, keys.shape[1]
        num_heads = attend.q.width // attend.head_size
        self._rotate[(qkv.shape[0], num_heads + 2 * num_kv_heads)](
            qkv,
            qkv if step.turns is None else step.turns,
            places.positions,
            places.slots,
            keys,
            values,
            qkv.stride(0),
            TURNS=step.turns is not None,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF=attend.head_size // 2,
            BLOCK_SIZE=keys.shape[2],
            num_warps=1,
            **self._overlap(qkv),
        )

    def attend(
        self, step: Attention, qkv: torch.Tensor, places: Places, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty(qkv.shape[0], step.attend.q.width, dtype=qkv.dtype, device=qkv.device)
        if len(places.singles):
            self.attend_singles(step, qkv, places, keys, values, out)
        whole = [run for run in places.runs if self._is_whole(step, run)]
        for run in whole:
            _attend_whole(step, qkv, run, out)
        if len(whole) < len(places.runs):
            self._attend_pieces(step, qkv, places, keys, values, out)
        return out

    def attend_singles(
        self,
        step: Attention,
        qkv: torch.Tensor,
        places: Places,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        attend, num_kv_heads, size = step.attend, keys.shape[1], step.attend.head_size
        num_heads, count = attend.q.width // size, len(places.singles)
        group = num_heads // num_kv_heads
        num_parts, part_size = self._parts(count * num_kv_heads)
        num_slots = count * num_heads * num_parts if num_parts > 1 else 1
        parts = torch.empty(num_slots, size, device=qkv.device)
        tops, totals = torch.empty(num_slots, device=qkv.device), torch.empty(num_slots, device=qkv.device)
        self._decode[(count, num_kv_heads, num_parts)](
            qkv,
            keys,
            values,
            places.singles,
            places.positions,
            places.sequences,
            places.tables,
            places.width,
            out,
            parts,
            tops,
            totals,
            attend.scale,
            qkv.stride(0),
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group,
            BLOCK_G=max(16, power_of_two(group)),
            HEAD_SIZE=size,
            BLOCK_SIZE=keys.shape[2],
            WINDOW=attend.window or 0,
            PARTS=num_parts,
            PART_SIZE=part_size,
            BLOCK_N=self.tuning.decode_tokens,
            num_warps=4,
            **self._overlap(qkv),
        )
        if num_parts > 1:
            self._merge[(count, num_heads)](
                parts,
                tops,
                totals,
                places.singles,
                out,
                NUM_HEADS=num_heads,
                HEAD_SIZE=size,
                PARTS=num_parts,
                num_warps=2,
                **self._overlap(qkv),
            )

    def _parts(self, num_programs: int) -> tuple[int, int]:
        """Into how many parts each of so many sequences is cut, and their size (0: all alike)."""
        return min(32, power_of_two(-(-self.tuning.num_programs // num_programs))), 0

    def _attend_pieces(
        self,
        step: Attention,
        qkv: torch.Tensor,
        places: Places,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Runs of rows that the library's attention does not take, all in one launch."""
        attend, num_heads = step.attend, step.attend.q.width // step.attend.head_size
        runs = tuple(run for run in places.runs if not self._is_whole(step, run))
        if self._tiles is None or self._tiles[0] != runs:
            self._tiles = runs, sent(tiles_of(runs, self.tuning.prompt_rows), qkv.device)
        tiles = self._tiles[1]
        self._prompt[(len(tiles), num_heads)](
            qkv,
            keys,
            values,
            tiles,
            places.tables,
            places.width,
            out,
            attend.scale,
            qkv.stride(0),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=keys.shape[1],
            HEAD_SIZE=attend.head_size,
            BLOCK_SIZE=keys.shape[2],
            WINDOW=attend.window or 0,
            BLOCK_M=self.tuning.prompt_rows,
            BLOCK_N=self.tuning.prompt_tokens,
            num_warps=4,
            **self._overlap(qkv),
        )

    def _is_whole(self, step: Attention, run: Run) -> bool:
        """A prompt from its beginning, long enough for the library's attention to be worth a launch of its own."""
        return run.start == 0 and step.attend.window is None and run.count >= self.tuning.library_attention_rows

    def _is_small(self, step: Project, src: torch.Tensor) -> bool:
        if isinstance(step.weight, PackedWeight):
            return src.shape[0] <= self.tuning.packed_rows
        is_rms = step.norm is None or not step.norm.centred
        return src.shape[0] <= self.tuning.skinny_rows and (is_rms or src.shape[0] > 1)

    def _small(self, step: Project, src: torch.Tensor, out: torch.Tensor, adds: bool) -> None:
        """One row, or few: `out` is written or added to."""
        num_rows, num_inputs = src.shape
        weight = step.weight
        if isinstance(weight, PackedWeight):
            self._small_packed(step, weight, src, out, adds)
            return
        bias = weight if step.bias is None else step.bias
        flags = {
            "NUM_INPUTS": num_inputs,
            "HAS_BIAS": step.bias is not None,
            "ADDS": adds,
            "GATED": step.gated,
            "KIND": step.activation or "none",
        }
        tile = self.tuning.gemv if num_rows == 1 else self.tuning.skinny
        num_outputs, block_k = self._tile(tile, step, num_rows)
        flags |= {"BLOCK_N": num_outputs, "BLOCK_K": block_k, "STAGES": tile.num_stages, "num_warps": tile.num_warps}
        flags |= self._overlap(src)
        grid = (-(-step.num_outputs // num_outputs),)
        if num_rows == 1:
            norm = step.norm
            eps, gain = (0.0, weight) if norm is None else (norm.eps, norm.weight)
            self._gemv[grid](src, gain, weight, bias, out, eps, step.num_outputs, HAS_NORM=norm is not None, **flags)
            return
        rows = src.to(weight.dtype) if step.norm is None else self.norm(step.norm, src, weight.dtype)
        strides = rows.stride(0), out.stride(0)
        flags |= {"BLOCK_M": max(16, power_of_two(num_rows)), "SPLITS": 1}
        self._skinny[grid](rows, weight, bias, out, num_rows, step.num_outputs, *strides, **flags)

    def _small_packed(
        self, step: Project, weight: PackedWeight, src: torch.Tensor, out: torch.Tensor, adds: bool
    ) -> None:
        num_rows, overlap = src.shape[0], self._overlap(src)
        # What is not yet divided by its norm may be too large for fp16.
        is_rms = step.norm is None or (not step.norm.centred and weight.dtype != torch.float16)
        norms_on_the_way = num_rows == 1 and is_rms
        if not norms_on_the_way:
            src = src.to(weight.dtype) if step.norm is None else self.norm(step.norm, src, weight.dtype)
            step = replace(step, norm=None)
        if num_rows == 1:
            self.packed.one_row(step, weight, src, out, adds, self._packed_tile(step, weight), overlap)
            return
        tile_rows = min(self.tuning.packed_tile_rows, max(16, power_of_two(num_rows)))
        tile = self.tuning.byte_skinny if weight.num_bits == 8 else self.tuning.packed_skinny
        self.packed.few_rows(step, weight, src, out, adds, tile, tile_rows, overlap)

    def _packed_tile(self, step: Project, weight: PackedWeight) -> Tile:
        """For one row."""
        tuning = self.tuning
        if weight.num_bits == 8:
            num_outputs, num_inputs = self._tile(tuning.byte_gemv, step, 1)
            return replace(tuning.byte_gemv, num_outputs=num_outputs, num_inputs=num_inputs)
        tile = tuning.packed_gemv
        is_long = weight.num_groups >= 2 * tile.num_warps
        if is_long and weight.shape[0] < tile.num_outputs * tuning.num_multiprocessors:
            # Not fewer outputs: each program reads the whole input, which is much beside 4-bit weights.
            tile = replace(tile, num_warps=2 * tile.num_warps, num_stages=max(1, tile.num_stages - 1))
        return replace(tile, num_outputs=max(16, tile.num_outputs // 2)) if step.gated else tile

    def _tile(self, tile: Tile, step: Project, num_rows: int) -> tuple[int, int]:
        """Outputs and inputs that a program takes at once; a gated output takes two rows of the weight."""
        num_outputs, num_inputs = tile.num_outputs, tile.num_inputs
        is_packed = isinstance(step.weight, PackedWeight)
        if num_rows == 1:
            # As many as leave work for everybody: each program reads the whole input besides its own weights.
            least = 16 if is_packed else 2
            while num_outputs > least and step.weight.shape[0] < num_outputs * self.tuning.num_programs:
                num_outputs, num_inputs = num_outputs // 2, min(1024, num_inputs * 2)
        if step.gated:
            num_outputs //= 2
        if num_rows > 1 or is_packed:
            num_outputs = max(16, num_outputs)  # as the tensor cores want
        return num_outputs, min(num_inputs, max(16, power_of_two(step.weight.shape[1])))

    def _overlap(self, like: torch.Tensor) -> dict[str, Any]:
        """How kernels on this device are started; `overlap.py` says what that means."""
        if like.device not in self._overlaps:
            is_able = like.is_meta or (
                like.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(like.device) >= (9, 0)
            )
            overlaps = self.tuning.overlaps and is_able
            self._overlaps[like.device] = {"OVERLAPS": overlaps} | ({"launch_pdl": True} if overlaps else {})
        return self._overlaps[like.device]

    def _activated(self, step: Project, out: torch.Tensor) -> torch.Tensor:
        if not step.gated:
            return self.activate(step, out)
        num_rows, width = out.shape[0], step.num_outputs
        gated = torch.empty(num_rows, width, dtype=out.dtype, device=out.device)
        block = min(1024, power_of_two(width))
        self._gate[(num_rows, -(-width // block))](
            out, gated, width, KIND=step.activation or "none", BLOCK=block, **self._overlap(out)
        )
        return gated


def tiles_of(runs: tuple[Run, ...], num_rows: int) -> np.ndarray:
    """Runs cut into tiles of at most `num_rows` rows: int32 [tiles, 4], as `prompt_kernel` reads them."""
    tiles = [
        (run.first + at, min(num_rows, run.count - at), run.start + at, run.sequence)
        for run in runs
        for at in range(0, run.count, num_rows)
    ]
    # The last tiles of a prompt see the most: they begin first, so that no long one is left over at the end.
    return np.array(sorted(tiles, key=lambda tile: -tile[2]), np.int32)


def _attend_whole(step: Attention, qkv: torch.Tensor, run: Run, out: torch.Tensor) -> None:
    """A whole prompt, from its own rows rather than from the cache."""
    attend = step.attend
    rows = slice(run.first, run.first + run.count)
    q, k, v = (
        qkv[rows, span.start : span.start + span.width].unflatten(1, (-1, attend.head_size)).transpose(0, 1)[None]
        for span in (attend.q, attend.k, attend.v)
    )
    found = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=attend.scale, enable_gqa=True)
    out[rows] = found[0].transpose(0, 1).flatten(1)


def power_of_two(number: int) -> int:
    """The smallest one that is not less."""
    return 1 << max(0, number - 1).bit_length()
