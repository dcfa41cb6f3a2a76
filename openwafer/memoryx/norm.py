"""The global gradient norm, the same to the bit however the gradients are striped or threaded."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from openwafer.memoryx.fetch import fetched

# Squares are summed in fp32 within blocks of this many elements of one weight. Small enough that torch never
# splits a block over threads; large enough that the list of block sums stays short.
BLOCK_ELEMENTS = 16384


def block_sums(gradient: Tensor) -> Tensor:
    """Sum of squares of each block of a weight's gradient, in order: fp32 [blocks], where the gradient is."""
    flat = gradient.reshape(-1)
    whole = flat.numel() // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    sums = _sums(flat[:whole].view(-1, BLOCK_ELEMENTS))
    if whole == flat.numel():
        return sums
    return torch.cat([sums, _sums(flat[whole:].view(1, -1))])


def _sums(blocks: Tensor) -> Tensor:
    if blocks.is_cuda:  # one pass over bf16 and nothing in between: a fifth of the bytes of the line below
        return torch.linalg.vector_norm(blocks, dim=1, dtype=torch.float32).square()
    return blocks.float().square().sum(dim=1)


def global_norm(sums: Iterable[Tensor]) -> float:
    """The norm from all block sums; `fsum` rounds once, so their order does not matter. NaN if one is not finite."""
    values = fetched(torch.cat(list(sums))).tolist()
    if not all(math.isfinite(value) for value in values):
        return math.nan
    return math.sqrt(math.fsum(values))


def clip_factor(norm: float, max_norm: float | None) -> float | None:
    """What gradients are multiplied by, or None when they stay as they are."""
    if max_norm is None or norm <= max_norm:
        return None
    return float(torch.tensor(max_norm / (norm + 1e-6), dtype=torch.float32))


def clipped(gradient: Tensor, norm: float, max_norm: float | None, max_value: float | None) -> Tensor:
    """A gradient cut down by the global norm or by element, or itself; `max_value` works in place."""
    if max_value is not None:
        return gradient.clamp_(-max_value, max_value)
    factor = clip_factor(norm, max_norm)
    return gradient if factor is None else gradient * factor
