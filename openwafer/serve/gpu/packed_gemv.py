"""Triton kernels for products with packed weights, which are unpacked in registers; `packed_weight.py` has the layout.

They compute what `gemv.py` does, on the weights that `PackedWeight.dense()` gives. With one row weights are not
rounded, and have 4 bits; `byte_gemv.py` is for 8. Both keep the tensor cores busy with weights on the left, straight
from the registers that they were unpacked in: bit field j of a tile of words is block j of their inputs, so that no
weight changes its thread.
"""

# pyright: reportMissingImports=false
import triton
import triton.language as tl

from openwafer.serve.gpu.gemv import activated, inside, write_outputs
from openwafer.serve.gpu.overlap import fetch_early, wait_for_inputs


@triton.jit
def quants_of(words, j: tl.constexpr, BITS: tl.constexpr, PAIRS: tl.constexpr):
    """Bit field j of each word: bf16 where PAIRS, 128 more than the quant if it has 4 bits; else fp32."""
    if PAIRS and BITS == 4:
        # The quant is put into the lowest bits of the fraction of 128: an instruction for each weight, in pairs.
        SHIFT: tl.constexpr = 4 * (j % 4)
        HALF: tl.constexpr = 0x5410 if j < 4 else 0x7632
        found = tl.inline_asm_elementwise(
            f"{{ .reg .b32 t; prmt.b32 t, $1, $2, {HALF}; shr.u32 t, t, {SHIFT}; "
            "lop3.b32 $0, t, 0x000f000f, 0x43004300, 0xea; }",
            "=r,r,r",
            [words],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    elif PAIRS:
        # Seven bits in the fraction of 128, less 256, or less 128 where the eighth bit is set.
        BYTES: tl.constexpr = 0x11 * j + 0x1100 * (4 + j)
        found = tl.inline_asm_elementwise(
            f"{{ .reg .b32 t, low, less; prmt.b32 t, $1, $2, {BYTES}; "
            "lop3.b32 low, t, 0x007f007f, 0x43004300, 0xea; lop3.b32 less, t, 0x00800080, 0x43804380, 0x6a; "
            "sub.rn.bf16x2 $0, low, less; }",
            "=r,r,r",
            [words],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        # In the fraction of 2**23, where the lowest bit is 1.
        bits = ((words >> (BITS * j)) & ((1 << BITS) - 1)) | 0x4B000000
        found = bits.to(tl.float32, bitcast=True) - (8388608.0 if BITS == 4 else 8388736.0)
    return found


@triton.jit
def gain_and_base(found, BITS: tl.constexpr, PAIRS: tl.constexpr):
    """A weight is gain * what `quants_of` gives + base, all fp32. `found` is a scale, or a scale and an offset."""
    if BITS == 8:
        gain = found.to(tl.float32)
        base = tl.zeros_like(gain)
    elif found.dtype == tl.int32:
        gain = found.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        base = (found >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        gain = found.to(tl.int32).to(tl.float32, bitcast=True)
        base = (found >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    if PAIRS and BITS == 4:
        base -= gain * 128.0
    return gain, base


@triton.jit
def fetch_weights(
    quants,
    gains,
    rows,
    first_row,
    first,
    gain_stride,
    GROUPS: tl.constexpr,
    EACH: tl.constexpr,
    BITS: tl.constexpr,
    LINES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Have these outputs' first LINES groups brought into the cache, and all gains of EACH groups (512 blocks at most).

    Gains go straight to registers, without copies that are under way long before: from the cache that is soon enough.
    """
    if OVERLAPS:
        groups = tl.minimum(first + tl.arange(0, LINES), GROUPS - 1)
        fetch_early(quants + rows[:, None] * (GROUPS * 32) + groups[None, :] * 32, OVERLAPS)
        COUNT: tl.constexpr = 512 if EACH * (32 // BITS) > 128 else 128
        blocks = first * (32 // BITS) + tl.arange(0, COUNT)
        blocks = tl.minimum(blocks, GROUPS * (32 // BITS) - 1).to(tl.int64)
        fetch_early(gains + first_row + blocks * gain_stride, OVERLAPS)
        if rows.shape[0] * (8 // BITS) >= 128:  # more than a line of 128 bytes
            fetch_early(gains + tl.max(rows, 0) + blocks * gain_stride, OVERLAPS)


@triton.jit
def block_sums(words, x, found, PAIRS: tl.constexpr):
    """4-bit weights [w, n, 32 words] times x [w, 32, 8 blocks] of x's dtype: fp32 [w, n, 8], a sum for each block.

    A product with all blocks of x at once has the sum of its own block in one column, and the others are left out.
    """
    column = tl.arange(0, 8)[None, None, :]
    sums = tl.zeros(found.shape, tl.float32)
    for j in tl.static_range(8):
        w = quants_of(words, j, 4, PAIRS).to(x.dtype)
        sums = tl.where(column == j, tl.dot(w, x, input_precision="ieee"), sums)
    gain, base = gain_and_base(found, 4, PAIRS)
    ones = tl.full(words.shape, 1.0, x.dtype)
    return sums * gain + base * tl.dot(ones, x, input_precision="ieee")


@triton.jit
def packed_gemv_kernel(
    x_ptr,
    norm_ptr,
    quants_ptr,
    gains_ptr,
    bias_ptr,
    out_ptr,
    eps,
    num_outputs,
    gain_stride,
    NUM_INPUTS: tl.constexpr,
    PAIRS: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """As `gemv_kernel`, for 4 bits; a program takes SLICES groups of BLOCK_N outputs at once, a warp one of them."""
    GROUPS: tl.constexpr = (NUM_INPUTS + 255) // 256
    STEPS: tl.constexpr = (GROUPS + SLICES - 1) // SLICES
    EVEN: tl.constexpr = GROUPS % SLICES == 0
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    up_rows = rows + num_outputs
    first_row = tl.program_id(0) * BLOCK_N
    fetch_weights(quants_ptr, gains_ptr, rows, first_row, 0, gain_stride, GROUPS, GROUPS, 4, SLICES, OVERLAPS)
    if GATED:
        first_row += num_outputs
        fetch_weights(quants_ptr, gains_ptr, up_rows, first_row, 0, gain_stride, GROUPS, GROUPS, 4, SLICES, OVERLAPS)
    wait_for_inputs(OVERLAPS)
    slices = tl.arange(0, SLICES)[:, None, None]
    block = tl.arange(0, 8)[None, None, :]
    inner = slices * 256 + block * 32 + tl.arange(0, 32)[None, :, None]
    words = quants_ptr + slices * 32 + tl.arange(0, 32)[None, None, :]
    words_at = words + rows[None, :, None] * (GROUPS * 32)
    up_words_at = words + up_rows[None, :, None] * (GROUPS * 32)
    gains = gains_ptr + (slices * 8 + block) * gain_stride
    gains_at = gains + rows[None, :, None]
    up_gains_at = gains + up_rows[None, :, None]
    found = inside(gains_at, slices < GROUPS, EVEN)
    up_found = inside(up_gains_at if GATED else gains_at, slices < GROUPS, EVEN)
    sums = tl.zeros([SLICES, BLOCK_N, 8], tl.float32)
    up_sums = tl.zeros([SLICES, BLOCK_N, 8], tl.float32)
    squares = tl.zeros([SLICES, 32, 8], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        is_mine = slices + step * SLICES < GROUPS
        k = inner + step * (SLICES * 256)
        x = inside(x_ptr + k, k < NUM_INPUTS, NUM_INPUTS % (SLICES * 256) == 0)
        if HAS_NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            x = wide * inside(norm_ptr + k, k < NUM_INPUTS, NUM_INPUTS % (SLICES * 256) == 0)
        x = x.to(DTYPE)
        # The gains of the next step are asked for now: they come straight into registers, the words through copies
        # that are under way already.
        next_step = tl.minimum(step + 1, STEPS - 1)
        is_next = slices + next_step * SLICES < GROUPS
        further = (next_step * (SLICES * 8)).to(tl.int64) * gain_stride
        next_found = inside(gains_at + further, is_next, EVEN)
        sums += block_sums(inside(words_at + step * (SLICES * 32), is_mine, EVEN), x, found, PAIRS)
        found = next_found
        if GATED:
            next_found = inside(up_gains_at + further, is_next, EVEN)
            up_words = inside(up_words_at + step * (SLICES * 32), is_mine, EVEN)
            up_sums += block_sums(up_words, x, up_found, PAIRS)
            up_found = next_found
    y = tl.sum(tl.sum(sums, 2), 0)
    z = tl.sum(tl.sum(up_sums, 2), 0)
    if HAS_NORM:
        mean = tl.sum(tl.sum(tl.sum(squares, 2), 1), 0) / NUM_INPUTS
        factor = 1.0 / tl.sqrt(mean + eps)
        y = y * factor
        z = z * factor
    write_outputs(y, z, bias_ptr, out_ptr, outputs, num_outputs, HAS_BIAS, ADDS, GATED, KIND)


@triton.jit
def weights_of(words, found, j: tl.constexpr, BITS: tl.constexpr, PAIRS: tl.constexpr):
    """Block j of a group of outputs: fp32 [n, 32], of words [n, 32] and gains [n]."""
    gain, base = gain_and_base(found, BITS, PAIRS)
    w = quants_of(words, j, BITS, PAIRS).to(tl.float32) * gain[:, None]
    if BITS == 4:
        w += base[:, None]
    return w


@triton.jit(do_not_specialize=["num_rows"])
def packed_skinny_kernel(
    x_ptr,
    quants_ptr,
    gains_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    gain_stride,
    x_stride,
    out_stride,
    NUM_INPUTS: tl.constexpr,
    BITS: tl.constexpr,
    PAIRS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_PART: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """As `skinny_kernel`, the weights of a tile rounded to x's dtype on the way. Grid (rows, outputs, splits).

    Programs that read the same weights are neighbours; with several splits each has some of the groups. If IS_PART,
    `out` is fp32 [splits, num_rows, num_outputs] for `sum_kernel`, which does the rest. The order of a row's sums
    follows from the tile and the splits alone.
    """
    BLOCKS: tl.constexpr = 32 // BITS
    GROUPS: tl.constexpr = (NUM_INPUTS + 32 * BLOCKS - 1) // (32 * BLOCKS)
    EACH: tl.constexpr = (GROUPS + SPLITS - 1) // SPLITS
    EVEN: tl.constexpr = NUM_INPUTS % (32 * BLOCKS) == 0
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[None, :]
    is_row = m < num_rows
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    first = tl.program_id(2) * EACH
    first_row = tl.program_id(1) * BLOCK_N
    fetch_weights(quants_ptr, gains_ptr, rows, first_row, first, gain_stride, GROUPS, EACH, BITS, 2, OVERLAPS)
    wait_for_inputs(OVERLAPS)
    words_at = quants_ptr + rows[:, None] * (GROUPS * 32) + tl.arange(0, 32)[None, :]
    i = tl.arange(0, 32)[:, None]
    inputs = x_ptr + m * x_stride + i
    y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for group in tl.range(first, tl.minimum(first + EACH, GROUPS), num_stages=STAGES):
        words = tl.load(words_at + group * 32)
        for j in tl.static_range(BLOCKS):
            block = group * BLOCKS + j
            mask = is_row if EVEN else is_row & (block * 32 + i < NUM_INPUTS)
            x = tl.load(inputs + block * 32, mask=mask, other=0.0)
            found = tl.load(gains_ptr + block.to(tl.int64) * gain_stride + rows)
            w = weights_of(words, found, j, BITS, PAIRS)
            y = tl.dot(w.to(x.dtype), x, y, input_precision="ieee")
    is_mine = is_row & (outputs < num_outputs)[:, None]
    if IS_PART:
        part = tl.program_id(2) * num_rows.to(tl.int64) * num_outputs
        tl.store(out_ptr + part + m * num_outputs + outputs[:, None], y, mask=is_mine)
    else:
        if HAS_BIAS:
            y += tl.load(bias_ptr + rows)[:, None]
        y = activated(y, KIND)
        places = out_ptr + m * out_stride + outputs[:, None]
        if ADDS:
            y += tl.load(places, mask=is_mine, other=0.0).to(tl.float32)
        tl.store(places, y.to(out_ptr.dtype.element_ty), mask=is_mine)


@triton.jit
def unpack_kernel(
    quants_ptr,
    gains_ptr,
    out_ptr,
    num_outputs,
    gain_stride,
    NUM_INPUTS: tl.constexpr,
    BITS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out [num_outputs, NUM_INPUTS] = `PackedWeight.dense()`. Grid (outputs, groups)."""
    BLOCKS: tl.constexpr = 32 // BITS
    GROUPS: tl.constexpr = (NUM_INPUTS + 32 * BLOCKS - 1) // (32 * BLOCKS)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    group = tl.program_id(1)
    i = tl.arange(0, 32)[None, :]
    wait_for_inputs(OVERLAPS)  # the product before may still read what is there
    words = tl.load(quants_ptr + rows[:, None] * (GROUPS * 32) + group * 32 + i)
    for j in tl.static_range(BLOCKS):
        block = group * BLOCKS + j
        k = block * 32 + i
        found = tl.load(gains_ptr + rows + block.to(tl.int64) * gain_stride)
        w = weights_of(words, found, j, BITS, PAIRS)
        mask = (outputs < num_outputs)[:, None] & (k < NUM_INPUTS)
        tl.store(out_ptr + rows[:, None] * NUM_INPUTS + k, w.to(out_ptr.dtype.element_ty), mask=mask)
