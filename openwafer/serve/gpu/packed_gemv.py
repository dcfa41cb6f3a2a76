"""Triton kernels for products with packed weights, which are unpacked in registers; `packed_weight.py` has the layout.

They compute what `gemv.py` does, on the weights that `PackedWeight.dense()` gives; with one row, on weights that are
not rounded. Whole numbers become floats without an instruction for it: put into the upper bits of the fraction of 1.0,
a quant of b bits reads 1 + quant / 2**b. So a weight is gain * fraction + base, with a gain and a base for every block
of 32 inputs.
"""

# pyright: reportMissingImports=false
import triton
import triton.language as tl

from openwafer.serve.gpu.gemv import activated, inside, write_outputs
from openwafer.serve.gpu.overlap import fetch_early, wait_for_inputs


@triton.jit
def fractions_at(quants, rows, first, NUM_BLOCKS: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr):
    """1 + quant / 2**BITS of BLOCKS blocks of these outputs: fp32 [rows, BLOCKS, 8, 4], inputs in their order."""
    word = first * BITS + tl.arange(0, BLOCKS * BITS)
    at = quants + rows[:, None] * (NUM_BLOCKS * BITS) + word[None, :]
    words = inside(at, (word < NUM_BLOCKS * BITS)[None, :], NUM_BLOCKS % BLOCKS == 0)
    if BITS == 4:
        words = words.reshape([rows.shape[0], BLOCKS, 1, 4])
        shifts = (tl.arange(0, 8) * 4)[None, None, :, None]
    else:
        words = words.reshape([rows.shape[0], BLOCKS, 8, 1])
        shifts = (tl.arange(0, 4) * 8)[None, None, None, :]
    # No program has a third number, which the compiler does not know: it keeps the sum in a register, and masks and
    # joins each weight in one instruction. With a constant it takes two.
    one = 0x3F800000 + tl.program_id(2)
    bits = ((words >> shifts) & ((1 << BITS) - 1)) << (23 - BITS)
    return (bits | one).to(tl.float32, bitcast=True)


@triton.jit
def gains_at(scales, offsets, rows, first, NUM_BLOCKS: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr):
    """Gain and base of the same blocks, fp32 [rows, BLOCKS]; zero after the last block."""
    EVEN: tl.constexpr = NUM_BLOCKS % BLOCKS == 0
    block = first + tl.arange(0, BLOCKS)
    at = rows[:, None] * NUM_BLOCKS + block[None, :]
    mask = (block < NUM_BLOCKS)[None, :]
    gain = inside(scales + at, mask, EVEN).to(tl.float32) * (1 << BITS)
    if BITS == 8:  # noqa: SIM108
        base = gain * -1.5
    else:
        base = inside(offsets + at, mask, EVEN).to(tl.float32) - gain
    return gain, base


@triton.jit
def fetch_quants(
    quants,
    rows,
    NUM_BLOCKS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Have the first quants of these outputs brought into the cache."""
    LINES: tl.constexpr = BLOCKS * BITS // 32 if BLOCKS * BITS >= 32 else 1
    lines = tl.arange(0, LINES)[None, :] * (BLOCKS * BITS // LINES)
    fetch_early(quants + rows[:, None] * (NUM_BLOCKS * BITS) + lines, OVERLAPS)


@triton.jit
def inputs_at(x_ptr, first, NUM_INPUTS: tl.constexpr, BLOCKS: tl.constexpr):
    """fp32 [BLOCKS * 32], zero after the last input."""
    k = first * 32 + tl.arange(0, BLOCKS * 32)
    return inside(x_ptr + k, k < NUM_INPUTS, NUM_INPUTS % (32 * BLOCKS) == 0).to(tl.float32)


@triton.jit
def block_sums(terms):
    """[r, n, 8, 4] to [r, n, 1]"""
    return tl.sum(tl.sum(terms, 3), 2, keep_dims=True)


@triton.jit
def packed_gemv_kernel(
    x_ptr,
    norm_ptr,
    quants_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    out_ptr,
    eps,
    num_outputs,
    NUM_INPUTS: tl.constexpr,
    BITS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """As `gemv_kernel`; a program takes BLOCKS blocks of BLOCK_N outputs at once."""
    NUM_BLOCKS: tl.constexpr = (NUM_INPUTS + 31) // 32
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    up_rows = rows + num_outputs
    fetch_quants(quants_ptr, rows, NUM_BLOCKS, BITS, BLOCKS, OVERLAPS)
    if GATED:
        fetch_quants(quants_ptr, up_rows, NUM_BLOCKS, BITS, BLOCKS, OVERLAPS)
    wait_for_inputs(OVERLAPS)
    sums = tl.zeros([BLOCK_N, BLOCKS, 1], tl.float32)
    up_sums = tl.zeros([BLOCK_N, BLOCKS, 1], tl.float32)
    squares = tl.zeros([BLOCKS * 32], tl.float32)
    for first in tl.range(0, NUM_BLOCKS, BLOCKS, num_stages=STAGES):
        x = inputs_at(x_ptr, first, NUM_INPUTS, BLOCKS)
        if HAS_NORM:
            squares += x * x
            x = x * inputs_at(norm_ptr, first, NUM_INPUTS, BLOCKS)
        x = x.reshape([1, BLOCKS, 8, 4])
        total = block_sums(x)
        fractions = fractions_at(quants_ptr, rows, first, NUM_BLOCKS, BITS, BLOCKS)
        gain, base = gains_at(scales_ptr, offsets_ptr, rows, first, NUM_BLOCKS, BITS, BLOCKS)
        sums += gain[:, :, None] * block_sums(fractions * x) + base[:, :, None] * total
        if GATED:
            fractions = fractions_at(quants_ptr, up_rows, first, NUM_BLOCKS, BITS, BLOCKS)
            gain, base = gains_at(scales_ptr, offsets_ptr, up_rows, first, NUM_BLOCKS, BITS, BLOCKS)
            up_sums += gain[:, :, None] * block_sums(fractions * x) + base[:, :, None] * total
    y = tl.sum(tl.sum(sums, 2), 1)
    z = tl.sum(tl.sum(up_sums, 2), 1)
    if HAS_NORM:
        factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / NUM_INPUTS + eps)
        y = y * factor
        z = z * factor
    write_outputs(y, z, bias_ptr, out_ptr, outputs, num_outputs, HAS_BIAS, ADDS, GATED, KIND)


@triton.jit
def weights_at(
    quants, scales, offsets, rows, first, NUM_BLOCKS: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr
):
    """fp32 [rows, BLOCKS * 32]"""
    fractions = fractions_at(quants, rows, first, NUM_BLOCKS, BITS, BLOCKS)
    gain, base = gains_at(scales, offsets, rows, first, NUM_BLOCKS, BITS, BLOCKS)
    values = fractions * gain[:, :, None, None] + base[:, :, None, None]
    return values.reshape([rows.shape[0], BLOCKS * 32])


@triton.jit(do_not_specialize=["num_rows"])
def packed_skinny_kernel(
    x_ptr,
    quants_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    x_stride,
    out_stride,
    NUM_INPUTS: tl.constexpr,
    BITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """As `skinny_kernel`, the weights of a tile rounded to x's dtype on the way. Grid (rows, outputs).

    Programs that read the same weights are neighbours. The order of a row's sums follows from the tile alone.
    """
    NUM_BLOCKS: tl.constexpr = (NUM_INPUTS + 31) // 32
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = (m < num_rows)[:, None]
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    up_rows = rows + num_outputs
    fetch_quants(quants_ptr, rows, NUM_BLOCKS, BITS, BLOCKS, OVERLAPS)
    if GATED:
        fetch_quants(quants_ptr, up_rows, NUM_BLOCKS, BITS, BLOCKS, OVERLAPS)
    wait_for_inputs(OVERLAPS)
    inputs = x_ptr + m[:, None] * x_stride
    y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    z = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in tl.range(0, NUM_BLOCKS, BLOCKS, num_stages=STAGES):
        k = (first * 32 + tl.arange(0, BLOCKS * 32))[None, :]
        x = tl.load(inputs + k, mask=is_row & (k < NUM_INPUTS), other=0.0)
        w = weights_at(quants_ptr, scales_ptr, offsets_ptr, rows, first, NUM_BLOCKS, BITS, BLOCKS)
        y += tl.dot(x, tl.trans(w.to(x.dtype)), input_precision="ieee")
        if GATED:
            up = weights_at(quants_ptr, scales_ptr, offsets_ptr, up_rows, first, NUM_BLOCKS, BITS, BLOCKS)
            z += tl.dot(x, tl.trans(up.to(x.dtype)), input_precision="ieee")
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows)[None, :]
        if GATED:
            z += tl.load(bias_ptr + rows + num_outputs)[None, :]
    y = activated(y, KIND)
    if GATED:
        y = y * z
    is_mine = is_row & (outputs < num_outputs)[None, :]
    places = out_ptr + m[:, None] * out_stride + outputs[None, :]
    if ADDS:
        y += tl.load(places, mask=is_mine, other=0.0).to(tl.float32)
    tl.store(places, y.to(out_ptr.dtype.element_ty), mask=is_mine)


@triton.jit
def unpack_kernel(
    quants_ptr,
    scales_ptr,
    offsets_ptr,
    out_ptr,
    num_outputs,
    NUM_INPUTS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out [num_outputs, NUM_INPUTS] = `PackedWeight.dense()`. Grid (outputs, blocks)."""
    NUM_BLOCKS: tl.constexpr = (NUM_INPUTS + 31) // 32
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    first = tl.program_id(1) * BLOCKS
    k = (first * 32 + tl.arange(0, BLOCKS * 32))[None, :]
    wait_for_inputs(OVERLAPS)  # the product before may still read what is there
    w = weights_at(quants_ptr, scales_ptr, offsets_ptr, rows, first, NUM_BLOCKS, BITS, BLOCKS)
    mask = (outputs < num_outputs)[:, None] & (k < NUM_INPUTS)
    tl.store(out_ptr + rows[:, None] * NUM_INPUTS + k, w.to(out_ptr.dtype.element_ty), mask=mask)
