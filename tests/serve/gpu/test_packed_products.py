"""Products with packed weights in Triton's interpreter against the plain ones, which unpack the weights first."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from openwafer.serve.gguf_blocks import matrix_from_raw
from openwafer.serve.gpu.fast import TritonKernels
from openwafer.serve.gpu.invariant import InvariantKernels
from openwafer.serve.gpu.packed_weight import PackedWeight
from openwafer.serve.gpu.plain import PlainKernels
from openwafer.serve.gpu.plan import Project
from openwafer.serve.gpu.tuning import Tile
from openwafer.serve.matrix import Matrix
from openwafer.serve.program import Norm, Span
from tests.serve.gpu.test_fast import TUNING, fenced, is_fence_whole
from tests.serve.gpu.test_packed_weight import random_raw

pytest.importorskip("triton", reason="there is no Triton for this platform")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

# Tiles of two blocks and of one, so that tiny matrices have several and some stick out.
PACKED = replace(
    TUNING,
    packed_gemv=Tile(num_outputs=16, num_inputs=64, num_warps=4, num_stages=1),
    byte_gemv=Tile(num_outputs=16, num_inputs=256, num_warps=4, num_stages=1),
    packed_skinny=Tile(num_outputs=16, num_inputs=32, num_warps=4, num_stages=2),
    byte_skinny=Tile(num_outputs=16, num_inputs=32, num_warps=4, num_stages=2),
    num_multiprocessors=1,
    packed_tile_rows=16,
    packed_rows=20,
    num_programs=1,
)
SPAN = Span("x", 0, 100)


def packed(num_bits, num_outputs: int, num_inputs: int, dtype: torch.dtype = torch.float32) -> PackedWeight:
    values = torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(0))
    weight = PackedWeight.of(Matrix.quantized(values, num_bits), dtype)
    return replace(weight, gains=fenced(weight.gains))


@pytest.mark.parametrize(
    ("num_rows", "num_bits", "gated"),
    [(1, 4, True), (1, 8, False), (1, 8, True), (3, 4, False), (18, 8, True), (25, 4, True)],
)
def test_every_kind_of_product(num_rows: int, num_bits: int, gated: bool) -> None:
    """One row, a tile, two tiles, too many for tiles; inputs that fill no block; norms, biases; written and added."""
    generator = torch.Generator().manual_seed(1)
    weight = packed(num_bits, 2 * 21 if gated else 21, 100)
    gain, bias = (fenced(torch.rand(n, generator=generator)) for n in (100, weight.shape[0]))
    src = fenced(torch.randn(num_rows, 100, generator=generator))
    kind = "silu" if gated else None
    kernels = TritonKernels(PACKED)
    norm = Norm(dst=SPAN, src=SPAN, weight=gain, bias=None, eps=1e-5, centred=False)
    step = Project(dst=SPAN, src=SPAN, weight=weight, norm=norm, bias=bias, activation=kind, gated=gated)
    expected = PlainKernels().project(step, src, wide=True)
    torch.testing.assert_close(kernels.project(step, src, wide=True), expected, atol=1e-4, rtol=1e-4)
    for other in (None, replace(norm, bias=gain, centred=True)):
        step = Project(dst=SPAN, src=SPAN, weight=weight, norm=other, activation=kind, gated=gated)
        expected = PlainKernels().project(step, src, wide=True)
        dst = fenced(torch.ones(num_rows, 21))
        kernels.project_into(step, src, dst)
        torch.testing.assert_close(dst, expected + 1, atol=1e-4, rtol=1e-4)
        assert is_fence_whole(dst)


@pytest.mark.parametrize(("num_bits", "num_inputs", "num_multiprocessors"), [(4, 1400, 1), (4, 2300, 3), (8, 600, 1)])
def test_one_row_of_several_groups(num_bits: int, num_inputs: int, num_multiprocessors: int) -> None:
    """Steps of a group for each of four warps, or eight, or of two groups; the last has not all; the norm of all."""
    generator = torch.Generator().manual_seed(1)
    src = fenced(torch.randn(1, num_inputs, generator=generator))
    gain = fenced(torch.rand(num_inputs, generator=generator))
    norm = Norm(dst=SPAN, src=SPAN, weight=gain, bias=None, eps=1e-5, centred=False)
    step = Project(dst=SPAN, src=SPAN, weight=packed(num_bits, 32, num_inputs), norm=norm)
    expected = PlainKernels().project(step, src, wide=True)
    kernels = TritonKernels(replace(PACKED, num_multiprocessors=num_multiprocessors))
    torch.testing.assert_close(kernels.project(step, src, wide=True), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("num_bits", "gated"), [(4, False), (8, True)])
def test_inputs_split_over_programs(num_bits: int, gated: bool) -> None:
    """Two row tiles, five groups of which the last is not full; the sums of all programs, biases, gates, additions."""
    generator = torch.Generator().manual_seed(1)
    weight = packed(num_bits, 2 * 21 if gated else 21, 1270 if num_bits == 4 else 630)
    num_inputs = weight.num_columns
    kernels = TritonKernels(replace(PACKED, num_programs=16))
    started: list[tuple[int, ...]] = []
    skinny = kernels.packed._skinny
    kernels.packed._skinny = _Noting(skinny, started)
    bias = fenced(torch.rand(weight.shape[0], generator=generator))
    step = Project(dst=SPAN, src=SPAN, weight=weight, bias=bias, activation="silu" if gated else None, gated=gated)
    src = fenced(torch.randn(18, num_inputs, generator=generator))
    dst = fenced(torch.ones(18, 21))
    kernels.project_into(step, src, dst)
    torch.testing.assert_close(dst, PlainKernels().project(step, src, wide=True) + 1, atol=2e-4, rtol=1e-4)
    assert is_fence_whole(dst)
    assert [grid[2] for grid in started] == [2]


class _Noting:
    """A kernel that notes how many programs it was started with."""

    def __init__(self, kernel: Any, grids: list[tuple[int, ...]]) -> None:
        self._kernel = kernel
        self._grids = grids

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._grids.append(grid)
        return self._kernel[grid]


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q4_K"])
def test_every_form(name: str) -> None:
    """One row, a few, and unpacked for many; 8 bits, 4 bits, and 4 bits with scales of 32 bits."""
    weight = PackedWeight.of(matrix_from_raw(random_raw(name, 17, 256)), torch.float32)
    step = Project(dst=SPAN, src=SPAN, weight=weight)
    kernels = TritonKernels(PACKED)
    for num_rows in (1, 2):
        src = torch.randn(num_rows, 256, generator=torch.Generator().manual_seed(1))
        expected = PlainKernels().project(step, src, wide=True)
        torch.testing.assert_close(kernels.project(step, src, wide=True), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(kernels.packed.unpacked(weight, {"OVERLAPS": False}), weight.dense())


@pytest.mark.parametrize("num_bits", [4, 8])
def test_unpacked_weights_are_rounded_as_defined(num_bits: int) -> None:
    """To fp16: the interpreter does not round to bf16, it cuts."""
    weight = packed(num_bits, 40, 300, torch.float16)
    found = TritonKernels(PACKED).packed.unpacked(weight, {"OVERLAPS": False})
    assert torch.equal(found, weight.dense())


def test_matrices_larger_than_the_scratch_memory() -> None:
    """In parts of 16 outputs."""
    weight = packed(4, 70, 300)
    rows = torch.randn(30, 300, generator=torch.Generator().manual_seed(1))
    kernels = TritonKernels(replace(PACKED, scratch_bytes=4 * 16 * 300 + 5))
    assert not kernels.packed.fits(weight)
    step = Project(dst=SPAN, src=SPAN, weight=weight)
    expected = PlainKernels().project(step, rows, wide=True)
    torch.testing.assert_close(kernels.project(step, rows, wide=True), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_bits", [None, 4, 8])
def test_a_row_of_a_product_has_the_same_bits_in_every_batch(num_bits: int | None) -> None:
    """Its inputs are split over programs."""
    kernels = InvariantKernels(64, replace(PACKED, num_programs=12), PACKED.packed_skinny, num_rows=16)
    num_inputs = 1030 if num_bits == 4 else 500
    weight = packed(num_bits or 8, 18, num_inputs)
    weight = weight if num_bits else weight.dense().contiguous()
    step = Project(dst=SPAN, src=SPAN, weight=weight, activation="silu", gated=True)
    src = torch.randn(20, num_inputs, generator=torch.Generator().manual_seed(1))
    together = kernels.project(step, src, wide=True)
    torch.testing.assert_close(together, PlainKernels().project(step, src, wide=True), atol=1e-3, rtol=1e-4)
    for rows in (slice(7, 8), slice(3, 20)):
        assert torch.equal(kernels.project(step, src[rows], wide=True), together[rows])
