"""Triton kernels that work on each row by itself: norms, gates, rotary positions and the way into the cache."""

# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false
import triton
import triton.language as tl

from openwafer.serve.gpu.gemv import activated
from openwafer.serve.gpu.overlap import wait_for_inputs


@triton.jit
def norm_kernel(
    src_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    eps,
    src_stride,
    out_stride,
    WIDTH: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program for each row and each run of WIDTH columns; `plain.PlainKernels.norm`."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * WIDTH
    at = tl.arange(0, BLOCK)
    mask = at < WIDTH
    gain = tl.load(weight_ptr + at, mask=mask, other=0.0)
    wait_for_inputs(OVERLAPS)
    x = tl.load(src_ptr + row * src_stride + first + at, mask=mask, other=0.0).to(tl.float32)
    if CENTRED:
        x = tl.where(mask, x - tl.sum(x, 0) / WIDTH, 0.0)
    y = x / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps) * gain
    if CENTRED:
        y += tl.load(bias_ptr + at, mask=mask, other=0.0)
    tl.store(out_ptr + row * out_stride + first + at, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gate_kernel(src_ptr, out_ptr, width, KIND: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """out [r, width] = activated(src[:, :width]) * src[:, width:], src [r, 2 * width]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    wait_for_inputs(OVERLAPS)
    gate = tl.load(src_ptr + row * 2 * width + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(src_ptr + row * 2 * width + width + at, mask=mask, other=0.0).to(tl.float32)
    y = activated(gate, KIND) * up
    tl.store(out_ptr + row * width + at, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rotate_and_store_kernel(
    qkv_ptr,
    turns_ptr,
    positions_ptr,
    slots_ptr,
    keys_ptr,
    values_ptr,
    stride,
    TURNS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program for each row and each head of q, k and v; `plain.PlainKernels.rotate_and_store`."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    i = tl.arange(0, HALF)
    at = qkv_ptr + row.to(tl.int64) * stride + head * (2 * HALF)
    slot = tl.load(slots_ptr + row)
    if TURNS:
        turn = turns_ptr + tl.load(positions_ptr + row).to(tl.int64) * (2 * HALF)
        cos = tl.load(turn + i)
        sin = tl.load(turn + HALF + i)
    wait_for_inputs(OVERLAPS)
    first = tl.load(at + i)
    second = tl.load(at + HALF + i)
    if TURNS:  # noqa: SIM102
        if head < NUM_HEADS + NUM_KV_HEADS:
            x = first.to(tl.float32)
            y = second.to(tl.float32)
            first = (x * cos - y * sin).to(first.dtype)
            second = (y * cos + x * sin).to(second.dtype)
            tl.store(at + i, first)
            tl.store(at + HALF + i, second)
    if head >= NUM_HEADS:
        kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
        block = (slot // BLOCK_SIZE).to(tl.int64) * NUM_KV_HEADS + kv_head
        to = (block * BLOCK_SIZE + slot % BLOCK_SIZE) * (2 * HALF)
        if head < NUM_HEADS + NUM_KV_HEADS:
            tl.store(keys_ptr + to + i, first.to(keys_ptr.dtype.element_ty))
            tl.store(keys_ptr + to + HALF + i, second.to(keys_ptr.dtype.element_ty))
        else:
            tl.store(values_ptr + to + i, first.to(values_ptr.dtype.element_ty))
            tl.store(values_ptr + to + HALF + i, second.to(values_ptr.dtype.element_ty))
