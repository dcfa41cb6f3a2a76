"""Triton kernel that ends a product whose inputs were split over programs: their sums are added in one fixed order."""

# pyright: reportMissingImports=false
import triton
import triton.language as tl

from openwafer.serve.gpu.gemv import activated
from openwafer.serve.gpu.overlap import wait_for_inputs


@triton.jit(do_not_specialize=["num_rows"])
def sum_kernel(
    parts_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    out_stride,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out [num_rows, num_outputs] of parts fp32 [SPLITS, num_rows, sums]. Grid (rows, outputs).

    If GATED there are twice as many sums as outputs: those that are activated, then what they are multiplied with.
    """
    num_sums = 2 * num_outputs if GATED else num_outputs
    row = tl.program_id(0).to(tl.int64)
    size = num_rows.to(tl.int64) * num_sums
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_mine = outputs < num_outputs
    wait_for_inputs(OVERLAPS)
    at = parts_ptr + row * num_sums + outputs
    y = tl.zeros([BLOCK], tl.float32)
    z = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        y += tl.load(at + split * size, mask=is_mine, other=0.0)
        if GATED:
            z += tl.load(at + split * size + num_outputs, mask=is_mine, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + outputs, mask=is_mine, other=0.0)
        if GATED:
            z += tl.load(bias_ptr + num_outputs + outputs, mask=is_mine, other=0.0)
    y = activated(y, KIND)
    if GATED:
        y = y * z
    places = out_ptr + row * out_stride + outputs
    if ADDS:
        y += tl.load(places, mask=is_mine, other=0.0).to(tl.float32)
    tl.store(places, y.to(out_ptr.dtype.element_ty), mask=is_mine)
