"""The sums of squares of a gradient on a GPU, in one pass; squares.py has the definition, with the same bits."""

# pyright: reportMissingImports=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from openwafer.kernels.squares import BLOCK_ELEMENTS, ROW

_NUM_WARPS = 8  # each thread has 8 neighbours of a row: 16 bytes of bf16


def square_sums_gpu(flat: Tensor) -> Tensor:
    blocks = triton.cdiv(flat.numel(), BLOCK_ELEMENTS)
    sums = torch.empty(blocks, dtype=torch.float32, device=flat.device)
    # Without fusion: a fused multiply-add rounds once where the definition rounds twice.
    options = {"num_warps": _NUM_WARPS, "enable_fp_fusion": False}
    with torch.cuda.device_of(flat):
        square_sums_kernel[(blocks,)](flat, sums, flat.numel(), ROW=ROW, ROW_BITS=ROW.bit_length() - 1, **options)
    return sums


@triton.jit
def square_sums_kernel(src_ptr, sums_ptr, numel, ROW: tl.constexpr, ROW_BITS: tl.constexpr):
    """One program for each block, which has eight rows."""
    block = tl.program_id(0).to(tl.int64)
    first = block * (8 * ROW)
    s0 = _squares(src_ptr, first, numel, ROW) + _squares(src_ptr, first + 4 * ROW, numel, ROW)
    s1 = _squares(src_ptr, first + ROW, numel, ROW) + _squares(src_ptr, first + 5 * ROW, numel, ROW)
    s2 = _squares(src_ptr, first + 2 * ROW, numel, ROW) + _squares(src_ptr, first + 6 * ROW, numel, ROW)
    s3 = _squares(src_ptr, first + 3 * ROW, numel, ROW) + _squares(src_ptr, first + 7 * ROW, numel, ROW)
    total = (s0 + s2) + (s1 + s3)
    for bit in tl.static_range(ROW_BITS):
        # A reduction of Triton's own would add in an order of its own.
        even, odd = tl.split(tl.reshape(total, (ROW >> (bit + 1), 2)))
        total = even + odd
    tl.store(sums_ptr + block + tl.arange(0, 1), total)


@triton.jit
def _squares(src_ptr, first, numel, ROW: tl.constexpr):
    at = first + tl.arange(0, ROW)
    x = tl.load(src_ptr + at, mask=at < numel, other=0.0).to(tl.float32)
    return x * x
