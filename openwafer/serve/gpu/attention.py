"""Triton kernels for attention over the paged cache: rows one by one (decoding), and pieces of prompts.

`plain.PlainKernels.attend` is what they compute. A decoded row reads its whole sequence; so that one row alone keeps
the GPU busy, its sequence is cut into parts, each with a sum of its own, and `merge_kernel` joins them. All query
heads that share a key/value head are one tile (of at least 16 rows, as the tensor cores want).
"""

# pyright: reportMissingImports=false
import triton
import triton.language as tl

from openwafer.serve.gpu.overlap import wait_for_inputs


# How a row's keys and values are found is written out in both kernels: as a function of its own it is compiled to other
# code (`bench/decode_gpu.py --parts compile`: 198 instead of 196 registers for prompts). `attended` is not.
@triton.jit
def attended(scores, v, total, sums, top):
    """Some more scores [m, n] and values [n, d] taken into the sum of weights, that of values and the largest score."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    factor = tl.exp(top - new_top)
    weights = tl.exp(scores - new_top[:, None])
    total = total * factor + tl.sum(weights, 1)
    sums = sums * factor[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return total, sums, new_top


@triton.jit
def decode_kernel(
    qkv_ptr,
    keys_ptr,
    values_ptr,
    singles_ptr,
    positions_ptr,
    sequences_ptr,
    tables_ptr,
    width_ptr,
    out_ptr,
    parts_ptr,
    tops_ptr,
    totals_ptr,
    scale,
    qkv_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    PARTS: tl.constexpr,
    PART_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Grid (singles, kv heads, PARTS). WINDOW 0: all is seen. PART_SIZE 0: parts are alike, else of so many keys."""
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    row = tl.load(singles_ptr + index).to(tl.int64)
    stop = tl.load(positions_ptr + row) + 1
    table = tables_ptr + tl.load(sequences_ptr + row).to(tl.int64) * tl.load(width_ptr)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(stop - WINDOW, 0)
    size = PART_SIZE
    if PART_SIZE == 0:
        size = tl.cdiv(tl.cdiv(stop - first, PARTS), BLOCK_N) * BLOCK_N
    begin = first + part * size
    end = tl.minimum(begin + size, stop)

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, HEAD_SIZE)
    heads = kv_head * GROUP + g
    is_head = (g < GROUP)[:, None]
    wait_for_inputs(OVERLAPS)
    q = tl.load(qkv_ptr + row * qkv_stride + heads[:, None] * HEAD_SIZE + d[None, :], mask=is_head, other=0.0)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    sums = tl.zeros([BLOCK_G, HEAD_SIZE], tl.float32)
    for start in range(begin, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        is_in = at < end
        block = tl.load(table + at // BLOCK_SIZE, mask=is_in, other=0).to(tl.int64)
        places = ((block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + at % BLOCK_SIZE) * HEAD_SIZE
        k = tl.load(keys_ptr + places[:, None] + d[None, :], mask=is_in[:, None], other=0.0)
        v = tl.load(values_ptr + places[:, None] + d[None, :], mask=is_in[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(is_in[None, :], scores, float("-inf"))
        total, sums, top = attended(scores, v, total, sums, top)

    if PARTS == 1:
        places = row * (NUM_KV_HEADS * GROUP * HEAD_SIZE) + heads[:, None] * HEAD_SIZE + d[None, :]
        tl.store(out_ptr + places, (sums / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_head)
    else:
        # An empty part leaves zeros and a top of minus infinity, which weighs nothing.
        slot = (index * (NUM_KV_HEADS * GROUP) + heads) * PARTS + part
        tl.store(parts_ptr + slot[:, None] * HEAD_SIZE + d[None, :], sums, mask=is_head)
        tl.store(tops_ptr + slot, top, mask=g < GROUP)
        tl.store(totals_ptr + slot, total, mask=g < GROUP)


@triton.jit
def merge_kernel(
    parts_ptr,
    tops_ptr,
    totals_ptr,
    singles_ptr,
    out_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Grid (singles, heads): the parts of a row's head, each weighed by its own total."""
    index = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(singles_ptr + index).to(tl.int64)
    d = tl.arange(0, HEAD_SIZE)
    slots = (index * NUM_HEADS + head) * PARTS + tl.arange(0, PARTS)
    wait_for_inputs(OVERLAPS)
    tops = tl.load(tops_ptr + slots)
    factors = tl.exp(tops - tl.max(tops, 0))
    total = tl.sum(factors * tl.load(totals_ptr + slots), 0)
    parts = tl.load(parts_ptr + slots[:, None] * HEAD_SIZE + d[None, :])
    y = tl.sum(parts * factors[:, None], 0) / total
    tl.store(out_ptr + (row * NUM_HEADS + head) * HEAD_SIZE + d, y.to(out_ptr.dtype.element_ty))


@triton.jit
def prompt_kernel(
    qkv_ptr,
    keys_ptr,
    values_ptr,
    tiles_ptr,
    tables_ptr,
    width_ptr,
    out_ptr,
    scale,
    qkv_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Grid (tiles, heads). A tile is 4 numbers: its first row, number of rows, first position, and sequence."""
    tile = tiles_ptr + tl.program_id(0) * 4
    head = tl.program_id(1)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    first_row = tl.load(tile).to(tl.int64)
    num_rows = tl.load(tile + 1)
    start_position = tl.load(tile + 2)
    table = tables_ptr + tl.load(tile + 3).to(tl.int64) * tl.load(width_ptr)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD_SIZE)
    positions = start_position + m
    is_row = (m < num_rows)[:, None]
    q_at = qkv_ptr + (first_row + m)[:, None] * qkv_stride + head * HEAD_SIZE + d[None, :]
    wait_for_inputs(OVERLAPS)
    q = tl.load(q_at, mask=is_row, other=0.0)
    stop = start_position + num_rows
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(start_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    # A finite floor: a row may see nothing of its first tiles when there is a window.
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, HEAD_SIZE], tl.float32)
    for start in range(begin, stop, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        is_in = at < stop
        block = tl.load(table + at // BLOCK_SIZE, mask=is_in, other=0).to(tl.int64)
        places = ((block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + at % BLOCK_SIZE) * HEAD_SIZE
        k = tl.load(keys_ptr + places[:, None] + d[None, :], mask=is_in[:, None], other=0.0)
        v = tl.load(values_ptr + places[:, None] + d[None, :], mask=is_in[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        is_seen = at[None, :] <= positions[:, None]
        if WINDOW > 0:
            is_seen = is_seen & (at[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))
        total, sums, top = attended(scores, v, total, sums, top)
    out_at = out_ptr + (first_row + m)[:, None] * (NUM_HEADS * HEAD_SIZE) + head * HEAD_SIZE + d[None, :]
    tl.store(out_at, (sums / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_row)
