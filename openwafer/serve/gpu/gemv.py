"""Triton kernels for products with few rows, where reading the weights is all the time there is.

`plain.PlainKernels.project` is what they compute. One row: `gemv_kernel`, which also norms its input on the way,
because the factor of an RMS norm is one number: sum(w * g * x) / rms(x), both sums in the same pass over x. A few
rows: `skinny_kernel`, on the tensor cores. Every weight is read once, by one program.
"""

# pyright: reportMissingImports=false
import triton
import triton.language as tl

from openwafer.serve.gpu.overlap import fetch_early, wait_for_inputs


@triton.jit
def activated(x, KIND: tl.constexpr):
    if KIND == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif KIND == "relu":
        y = tl.maximum(x, 0.0)
    elif KIND == "gelu_tanh":
        # (1 + tanh z) / 2 = 1 - 1 / (exp(2 z) + 1)
        z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x * (1.0 - 1.0 / (tl.exp(2.0 * z) + 1.0))
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        y = x
    return y


@triton.jit
def inside(pointers, mask, EVEN: tl.constexpr):
    """What lies there, zero where the mask is False; without a mask where nothing sticks out."""
    if EVEN:  # noqa: SIM108
        found = tl.load(pointers)
    else:
        found = tl.load(pointers, mask=mask, other=0.0)
    return found


@triton.jit
def write_outputs(
    y,
    z,
    bias_ptr,
    out_ptr,
    outputs,
    num_outputs,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
):
    """The end of a product of one row: bias, activation, gate (`z` is what it is multiplied with), residual."""
    rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows)
        if GATED:
            z += tl.load(bias_ptr + rows + num_outputs)
    y = activated(y, KIND)
    if GATED:
        y = y * z
    is_mine = outputs < num_outputs
    if ADDS:
        y += tl.load(out_ptr + outputs, mask=is_mine, other=0.0).to(tl.float32)
    tl.store(out_ptr + outputs, y.to(out_ptr.dtype.element_ty), mask=is_mine)


@triton.jit
def gemv_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    eps,
    num_outputs,
    NUM_INPUTS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out [num_outputs] (+)= activated(norm(x [NUM_INPUTS]) @ weight.T + bias); a program has BLOCK_N outputs."""
    EVEN: tl.constexpr = NUM_INPUTS % BLOCK_K == 0
    LINES: tl.constexpr = BLOCK_K // 64 if BLOCK_K >= 64 else 1
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Programs at the end read the last row again rather than masking every load.
    rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    weights = weight_ptr + rows[:, None] * NUM_INPUTS
    up_weights = weight_ptr + (rows + num_outputs)[:, None] * NUM_INPUTS
    lines = tl.arange(0, LINES)[None, :] * (BLOCK_K // LINES)
    fetch_early(weights + lines, OVERLAPS)
    if GATED:
        fetch_early(up_weights + lines, OVERLAPS)
    wait_for_inputs(OVERLAPS)
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.range(0, NUM_INPUTS, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        mask = k < NUM_INPUTS
        w = inside(weights + k[None, :], mask[None, :], EVEN)
        x = inside(x_ptr + k, mask, EVEN).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x = x * inside(norm_ptr + k, mask, EVEN)
        sums += w.to(tl.float32) * x[None, :]
        if GATED:
            up = inside(up_weights + k[None, :], mask[None, :], EVEN)
            up_sums += up.to(tl.float32) * x[None, :]
    y = tl.sum(sums, 1)
    z = tl.sum(up_sums, 1)
    if HAS_NORM:
        factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / NUM_INPUTS + eps)
        y = y * factor
        z = z * factor
    write_outputs(y, z, bias_ptr, out_ptr, outputs, num_outputs, HAS_BIAS, ADDS, GATED, KIND)


@triton.jit(do_not_specialize=["num_rows"])
def skinny_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    x_stride,
    out_stride,
    NUM_INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The same for x [num_rows, NUM_INPUTS] of the weight's dtype, normed before. Grid (outputs, rows, splits).

    With several splits each has some of the inputs, and `out` is fp32 [splits, num_rows, sums] for `sum_kernel`. The
    order of a row's sums follows from the tile and the splits: neither other rows nor their number change its bits.
    """
    EVEN: tl.constexpr = NUM_INPUTS % BLOCK_K == 0
    EACH: tl.constexpr = ((NUM_INPUTS + BLOCK_K - 1) // BLOCK_K + SPLITS - 1) // SPLITS * BLOCK_K
    LINES: tl.constexpr = BLOCK_K // 64 if BLOCK_K >= 64 else 1
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = (m < num_rows)[:, None]
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    weights = weight_ptr + rows[:, None] * NUM_INPUTS
    up_weights = weight_ptr + (rows + num_outputs)[:, None] * NUM_INPUTS
    first = tl.program_id(2) * EACH
    lines = first + tl.arange(0, LINES)[None, :] * (BLOCK_K // LINES)
    fetch_early(weights + lines, OVERLAPS)
    if GATED:
        fetch_early(up_weights + lines, OVERLAPS)
    wait_for_inputs(OVERLAPS)
    inputs = x_ptr + m[:, None] * x_stride
    y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    z = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(first, tl.minimum(first + EACH, NUM_INPUTS), BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        mask = (k < NUM_INPUTS)[None, :]
        x = tl.load(inputs + k[None, :], mask=is_row & mask, other=0.0)
        w = inside(weights + k[None, :], mask, EVEN)
        y += tl.dot(x, tl.trans(w), input_precision="ieee")
        if GATED:
            up = inside(up_weights + k[None, :], mask, EVEN)
            z += tl.dot(x, tl.trans(up), input_precision="ieee")
    is_mine = is_row & (outputs < num_outputs)[None, :]
    if SPLITS > 1:
        num_sums = 2 * num_outputs if GATED else num_outputs
        row = tl.program_id(2) * num_rows.to(tl.int64) + m[:, None]
        places = out_ptr + row * num_sums + outputs[None, :]
        tl.store(places, y, mask=is_mine)
        if GATED:
            tl.store(places + num_outputs, z, mask=is_mine)
    else:
        if HAS_BIAS:
            y += tl.load(bias_ptr + rows)[None, :]
            if GATED:
                z += tl.load(bias_ptr + rows + num_outputs)[None, :]
        y = activated(y, KIND)
        if GATED:
            y = y * z
        places = out_ptr + m[:, None] * out_stride + outputs[None, :]
        if ADDS:
            y += tl.load(places, mask=is_mine, other=0.0).to(tl.float32)
        tl.store(places, y.to(out_ptr.dtype.element_ty), mask=is_mine)
