"""Sums of squares: the fast passes are the definition to the bit, for any length and any number of threads."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openwafer.kernels.compiled import library
from openwafer.kernels.squares import BLOCK_ELEMENTS, square_sums, square_sums_reference

LENGTHS = (
    1,
    2,
    3,
    5,
    768,
    8191,
    8193,
    BLOCK_ELEMENTS - 1,
    BLOCK_ELEMENTS,
    BLOCK_ELEMENTS + 1,
    40 * BLOCK_ELEMENTS + 77,
)
needs_compiler = pytest.mark.skipif(library("squares") is None, reason="no C compiler")


def gradient(length: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Numbers of very different sizes, so that another order of the sums shows."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(length, generator=generator) * torch.exp(3 * torch.randn(length, generator=generator))
    return values.to(dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_c_pass_is_the_definition(length: int, dtype: torch.dtype) -> None:
    values = gradient(length, dtype)
    assert torch.equal(square_sums(values), square_sums_reference(values))


@needs_compiler
@given(length=st.integers(1, 3 * BLOCK_ELEMENTS), seed=st.integers(0, 1 << 30), threads=st.integers(1, 4))
def test_any_length_and_any_threads(length: int, seed: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        values = gradient(length, seed=seed)
        assert torch.equal(square_sums(values), square_sums_reference(values))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [3, BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS + 4099])
def test_the_kernel_for_gpus_is_the_definition(length: int, dtype: torch.dtype) -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    from openwafer.kernels.squares_gpu import square_sums_gpu

    values = gradient(length, dtype)
    assert torch.equal(square_sums_gpu(values), square_sums_reference(values))


def test_it_is_the_sum_of_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_library in (True, False):
        if not has_library:
            monkeypatch.setattr("openwafer.kernels.squares.library", lambda name: None)
        values = gradient(2 * BLOCK_ELEMENTS + 5)
        exact = [part.double().square().sum().item() for part in values.split(BLOCK_ELEMENTS)]
        assert square_sums(values).tolist() == pytest.approx(exact, rel=1e-6)
        assert square_sums(values.view(1, -1).half()[:, ::2]).shape == (2,)
        assert square_sums(torch.empty(0)).shape == (0,)


def test_what_is_not_finite_stays_so() -> None:
    values = gradient(BLOCK_ELEMENTS + 1)
    values[7], values[-1] = math.inf, math.nan
    first, second = square_sums(values).tolist()
    assert first == math.inf
    assert math.isnan(second)
