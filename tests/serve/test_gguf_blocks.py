"""Packed GGUF matrices against the values that the file format defines."""

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from openwafer.models.gguf import RawTensor
from openwafer.serve.gguf_blocks import matrix_from_raw

# A block's bytes and where its fp16 numbers lie, which must be sane numbers.
BLOCKS = {
    "Q8_0": (32, 34, (0,)),
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q5_0": (32, 22, (0,)),
    "Q5_1": (32, 24, (0, 2)),
    "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)),
    "Q6_K": (256, 210, (208,)),
}
EXACT = {"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K"}


@pytest.mark.parametrize("name", BLOCKS)
def test_values_are_those_of_the_format(name: str) -> None:
    size, num_bytes, halves = BLOCKS[name]
    rng = np.random.default_rng(0)
    rows, count = 19, 2
    data = rng.integers(0, 256, (rows, count, num_bytes), dtype=np.uint8)
    for at in halves:
        data[..., at : at + 2] = rng.standard_normal((rows, count, 1)).astype(np.float16).view(np.uint8)
    data = data.reshape(rows, -1)
    expected = torch.from_numpy(dequantize(data, gguf.GGMLQuantizationType[name]))
    found = matrix_from_raw(RawTensor(type_name=name, shape=(rows, count * size), data=data)).dense()
    if name in EXACT:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    else:
        largest = expected.unflatten(1, (-1, 32)).abs().amax(2).repeat_interleave(32, 1)
        assert ((found - expected).abs() <= largest / 250).all()


@pytest.mark.parametrize(("name", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_floats_stay_as_they_are(name: str, dtype: torch.dtype) -> None:
    values = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    data = values.view(torch.uint8).numpy()
    matrix = matrix_from_raw(RawTensor(type_name=name, shape=(5, 8), data=data))
    assert torch.equal(matrix.dense(), values.float())
    assert matrix.data.dtype == dtype
