"""Rotary position embedding: frequencies, their scaling, and the rotation."""

import math
from typing import Any

import torch
from torch import nn

from openwafer.models.config import RopeScaling


def frequencies(head_size: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Radians per token of each pair of a head's dims, fp32 [head_size / 2], always on the CPU."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device="cpu") / head_size
    freqs = 1.0 / theta**exponents
    if scaling is None:
        return freqs
    if scaling.kind == "linear":
        return freqs / scaling.factor
    # llama3: turns per original context decide; few turns (slow dims) are stretched, many are left alone,
    # and between the two limits the stretched and the plain frequency are blended.
    turns = scaling.original_max_position_embeddings * freqs / (2 * math.pi)
    width = scaling.high_freq_factor - scaling.low_freq_factor
    blend = ((turns - scaling.low_freq_factor) / width).clamp(0, 1)
    return (1 - blend) * freqs / scaling.factor + blend * freqs


class Rope(nn.Module):
    """cos and sin for a run of positions, computed in fp32 whatever the dtype of the model."""

    inv_freq: torch.Tensor

    def __init__(self, head_size: int, theta: float, scaling: RopeScaling | None = None):
        super().__init__()
        self._arguments = head_size, theta, scaling
        self.register_buffer("inv_freq", torch.empty(head_size // 2, dtype=torch.float32), persistent=False)
        self.inv_freq.copy_(frequencies(*self._arguments))

    def reset_buffers(self) -> None:
        """Fill the buffer that a build on the meta device left empty."""
        self.inv_freq = frequencies(*self._arguments)

    def _apply(self, fn: Any, recurse: bool = True) -> "Rope":
        """`model.to(torch.bfloat16)` must not round the frequencies: far positions would turn wrongly."""
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32:
            self.inv_freq = frequencies(*self._arguments).to(self.inv_freq.device)
        return self

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [t] gives cos and sin, each [t, head_size] in `dtype`."""
        angles = positions.float()[:, None] * self.inv_freq.float()[None, :]
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (dim i, dim i + half) of x [b, heads, t, head_size] by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
