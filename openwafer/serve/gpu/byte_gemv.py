"""Triton kernel for products of one row with weights of 8 bits; `packed_weight.py` has the layout.

Everything is fp32: a byte becomes a float in three instructions, and all in all there are about six for each weight.
That is few enough for weights of a byte. With 4 bits it would be too many for the bytes that are read.
"""

# pyright: reportMissingImports=false
import triton
import triton.language as tl

from openwafer.serve.gpu.gemv import inside, write_outputs
from openwafer.serve.gpu.overlap import fetch_early, wait_for_inputs


@triton.jit
def bytes_of(words):
    """[n, 32 g] to fp32 [n, g, 4, 8, 4]: each byte less 128, inputs in their order."""
    words = words.reshape([words.shape[0], words.shape[1] // 32, 1, 8, 4])
    shift = 8 * tl.arange(0, 4)[None, None, :, None, None]
    bits = ((words >> shift) & 255) | 0x4B000000  # in the fraction of 2**23, where the lowest bit is 1
    return bits.to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def byte_sums(words, gains, x):
    """Weights [n, 32 g words] with gains [n, 4 g] times x [1, g, 4, 8, 4]: fp32 [n, g, 4, 8], four inputs in each."""
    gains = gains.to(tl.float32).reshape([words.shape[0], words.shape[1] // 32, 4, 1])
    return gains * tl.sum(bytes_of(words) * x, 4)


@triton.jit
def fetch_bytes(quants, gains, rows, first_row, gain_stride, GROUPS: tl.constexpr, LINES: tl.constexpr, OVERLAPS):
    """Have these outputs' first LINES groups brought into the cache, and the gains of the first 32."""
    groups = tl.minimum(tl.arange(0, LINES), GROUPS - 1)
    fetch_early(quants + rows[:, None] * (GROUPS * 32) + groups[None, :] * 32, OVERLAPS)
    blocks = tl.minimum(tl.arange(0, 128), GROUPS * 4 - 1).to(tl.int64)
    fetch_early(gains + first_row + blocks * gain_stride, OVERLAPS)


@triton.jit
def byte_gemv_kernel(
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
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AT_ONCE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """As `gemv_kernel`; a program takes AT_ONCE groups of BLOCK_N outputs at once. IS_WHOLE if those divide all."""
    GROUPS: tl.constexpr = (NUM_INPUTS + 127) // 128
    EVEN: tl.constexpr = GROUPS % AT_ONCE == 0
    first_row = tl.program_id(0) * BLOCK_N
    outputs = first_row + tl.arange(0, BLOCK_N)
    # The compiler sees that outputs follow each other only if they are not cut off.
    rows = (outputs if IS_WHOLE else tl.minimum(outputs, num_outputs - 1)).to(tl.int64)
    up_rows = rows + num_outputs
    fetch_bytes(quants_ptr, gains_ptr, rows, first_row, gain_stride, GROUPS, 2 * AT_ONCE, OVERLAPS)
    if GATED:
        fetch_bytes(quants_ptr, gains_ptr, up_rows, first_row + num_outputs, gain_stride, GROUPS, 2 * AT_ONCE, OVERLAPS)
    wait_for_inputs(OVERLAPS)
    sums = tl.zeros([BLOCK_N, AT_ONCE, 4, 8], tl.float32)
    up_sums = tl.zeros([BLOCK_N, AT_ONCE, 4, 8], tl.float32)
    squares = tl.zeros([AT_ONCE * 128], tl.float32)
    for first in tl.range(0, GROUPS, AT_ONCE, num_stages=STAGES):
        k = first * 128 + tl.arange(0, AT_ONCE * 128)
        x = inside(x_ptr + k, k < NUM_INPUTS, NUM_INPUTS % (AT_ONCE * 128) == 0).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x = x * inside(norm_ptr + k, k < NUM_INPUTS, NUM_INPUTS % (AT_ONCE * 128) == 0)
        x = x.reshape([1, AT_ONCE, 4, 8, 4])
        word = (first * 32 + tl.arange(0, AT_ONCE * 32))[None, :]
        block = (first * 4 + tl.arange(0, AT_ONCE * 4))[None, :]
        words = inside(quants_ptr + rows[:, None] * (GROUPS * 32) + word, word < GROUPS * 32, EVEN)
        places = block.to(tl.int64) * gain_stride
        gains = inside(gains_ptr + places + rows[:, None], block < GROUPS * 4, EVEN)
        sums += byte_sums(words, gains, x)
        if GATED:
            words = inside(quants_ptr + up_rows[:, None] * (GROUPS * 32) + word, word < GROUPS * 32, EVEN)
            gains = inside(gains_ptr + places + up_rows[:, None], block < GROUPS * 4, EVEN)
            up_sums += byte_sums(words, gains, x)
    y = tl.sum(sums.reshape([BLOCK_N, AT_ONCE * 32]), 1)
    z = tl.sum(up_sums.reshape([BLOCK_N, AT_ONCE * 32]), 1)
    if HAS_NORM:
        factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / NUM_INPUTS + eps)
        y = y * factor
        z = z * factor
    write_outputs(y, z, bias_ptr, out_ptr, outputs, num_outputs, HAS_BIAS, ADDS, GATED, KIND)
