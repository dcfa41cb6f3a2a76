"""Packed matrices: what goes in comes out, and quantisation keeps its bound."""

import pytest
import torch

from openwafer.serve.matrix import Matrix

VALUES = torch.randn(37, 72, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("format", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_floats_are_kept(format, dtype: torch.dtype) -> None:
    matrix = Matrix.from_floats(VALUES, format)
    assert torch.equal(matrix.dense(), VALUES.to(dtype).float())


@pytest.mark.parametrize("wide", [False, True])
def test_quants_are_kept(wide: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    scales = torch.rand(37, 3, generator=generator).half()
    offsets = torch.randn(37, 3, generator=generator).half()
    eight = torch.randint(-127, 128, (37, 3, 32), generator=generator)
    four = torch.randint(0, 16, (37, 3, 32), generator=generator)
    for quants, given in ((eight, None), (four, offsets)):
        found = Matrix.from_quants(quants, scales, given, columns=90, wide=wide).quants()
        assert torch.equal(found[0], quants.to(torch.int8))
        assert torch.equal(found[1], scales.float())
        assert (found[2] is None) == (given is None)
        if found[2] is not None:
            assert torch.equal(found[2], offsets.float())


@pytest.mark.parametrize(("num_bits", "steps"), [(8, 254), (4, 15)])
def test_quantising_moves_a_weight_by_half_a_step(num_bits, steps: int) -> None:
    matrix = Matrix.quantized(VALUES, num_bits)
    assert matrix.dense().shape == VALUES.shape
    padded = torch.nn.functional.pad(VALUES, (0, 24)).unflatten(1, (-1, 32))
    width = 2 * padded.abs().amax(2) if num_bits == 8 else padded.amax(2) - padded.amin(2)
    bound = (width / steps * 0.5 * 1.02 + 0.002).repeat_interleave(32, 1)[:, :72]
    assert ((matrix.dense() - VALUES).abs() <= bound).all()


def test_a_matrix_of_zeros_stays_one() -> None:
    for num_bits in (4, 8):
        assert not Matrix.quantized(torch.zeros(3, 32), num_bits).dense().any()


def test_stacking() -> None:
    parts = [Matrix.from_floats(VALUES[:16], "fp32"), Matrix.from_floats(VALUES[:32], "fp32")]
    joined = Matrix.stack(parts)
    assert joined is not None
    assert torch.equal(joined.dense(), torch.cat([VALUES[:16], VALUES[:32]]))
    assert Matrix.stack([parts[0], Matrix.from_floats(VALUES[:16], "fp16")]) is None
    assert Matrix.stack([Matrix.from_floats(VALUES, "fp32"), parts[0]]) is None
