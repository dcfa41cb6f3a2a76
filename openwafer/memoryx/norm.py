"""The global gradient norm, the same to the bit however the gradients are striped or threaded."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from openwafer.memoryx.fetch import fetched


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
