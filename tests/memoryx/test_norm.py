"""The global norm: torch's within 1e-6, the same bits for any threads and any order of blocks."""

import math
import random

import pytest
import torch
from torch import nn

from openwafer.kernels.squares import BLOCK_ELEMENTS, square_sums
from openwafer.memoryx.norm import clip_factor, global_norm

SHAPES = [(3,), (BLOCK_ELEMENTS,), (BLOCK_ELEMENTS + 1,), (5, BLOCK_ELEMENTS), (257, 513)]


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def test_it_agrees_with_clip_grad_norm() -> None:
    # In double precision: torch's own fp32 norm is off by 2e-6 on some processors.
    weights = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]
    for weight, gradient in zip(weights, gradients(), strict=True):
        weight.grad = gradient.double()
    expected = nn.utils.clip_grad_norm_(weights, 0.5)
    norm = global_norm(square_sums(gradient) for gradient in gradients())
    assert norm == pytest.approx(expected.item(), rel=1e-6)
    factor = clip_factor(norm, 0.5)
    assert factor is not None
    for weight, gradient in zip(weights, gradients(), strict=True):
        assert weight.grad is not None
        torch.testing.assert_close((gradient * factor).double(), weight.grad, rtol=1e-6, atol=0)


def test_order_and_threads_do_not_matter() -> None:
    sums = [total.view(1) for gradient in gradients() for total in square_sums(gradient)]
    norm = global_norm(sums)
    random.Random(0).shuffle(sums)
    assert global_norm(sums) == norm
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert global_norm(square_sums(gradient) for gradient in gradients()) == norm
    finally:
        torch.set_num_threads(before)


def test_small_norms_are_not_clipped_and_bad_ones_are_seen() -> None:
    assert clip_factor(0.5, 0.5) is None
    assert clip_factor(9.0, None) is None
    assert math.isnan(global_norm([torch.tensor([1.0, math.inf])]))
    assert math.isnan(global_norm([square_sums(torch.tensor([1.0, math.nan]))]))
