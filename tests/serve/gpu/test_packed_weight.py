"""Packed weights in the GPU's layout against the matrices that they were made of."""

import numpy as np
import pytest
import torch

from openwafer.models.gguf import RawTensor
from openwafer.serve.gguf_blocks import matrix_from_raw
from openwafer.serve.gpu.packed_weight import PackedWeight, device_bytes, rows_of
from openwafer.serve.matrix import Matrix
from tests.serve.test_gguf_blocks import BLOCKS


def random_raw(name: str, rows: int, columns: int) -> RawTensor:
    """A matrix of a GGUF type; its fp16 numbers are small ones, the rest is any bytes."""
    size, num_bytes, halves = BLOCKS[name]
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (rows, columns // size, num_bytes), dtype=np.uint8)
    for at in halves:
        values = 0.01 * rng.standard_normal((rows, columns // size, 1))
        data[..., at : at + 2] = values.astype(np.float16).view(np.uint8)
    return RawTensor(type_name=name, shape=(rows, columns), data=data.reshape(rows, -1))


def matrices() -> dict[str, Matrix]:
    values = torch.randn(21, 100, generator=torch.Generator().manual_seed(0))
    made = {name: matrix_from_raw(random_raw(name, 19, 512)) for name in BLOCKS}
    return made | {"int8": Matrix.quantized(values, 8), "int4": Matrix.quantized(values, 4)}


@pytest.mark.parametrize("name", [*BLOCKS, "int8", "int4"])
def test_every_weight_stays_what_it_was(name: str) -> None:
    matrix = matrices()[name]
    weight = PackedWeight.of(matrix, torch.float32)
    assert weight.shape == (matrix.num_rows, matrix.num_columns)
    assert torch.equal(weight.dense(), matrix.dense())
    assert torch.equal(weight.part(3, 9).dense(), matrix.dense()[3:9])
    numbers = torch.tensor([4, 0, 4, 18])
    assert torch.equal(rows_of(weight, numbers), matrix.dense()[numbers])


@pytest.mark.parametrize("name", [*BLOCKS, "int8", "int4"])
def test_bytes_are_known_before_it_is_made(name: str) -> None:
    matrix = matrices()[name]
    assert PackedWeight.of(matrix, torch.bfloat16).nbytes == device_bytes(matrix, torch.bfloat16)


def test_bytes_of_each_weight() -> None:
    """Of 4096 x 4096: 5 bits and 8.5 bits with their scales, 16 without packing."""
    values = torch.zeros(64, 4096)
    count = values.numel()
    assert device_bytes(Matrix.quantized(values, 4), torch.bfloat16) == count * 5 // 8
    assert device_bytes(Matrix.quantized(values, 8), torch.bfloat16) == count * 17 // 16
    assert device_bytes(Matrix.from_floats(values, "fp32"), torch.bfloat16) == 2 * count
