"""Packed matrices of GGUF files as ours, without unpacking them where the two agree.

Q8_0, Q4_0, Q4_1, Q4_K and Q5_0 keep every bit. Q5_1, Q5_K and Q6_K have no counterpart here: they are rounded once
more, to 8 bits in blocks of 32, which moves a weight by at most 1/254 of its block's largest.
"""

from typing import Literal

import numpy as np
import torch

from openwafer.models.gguf import RawTensor
from openwafer.serve.matrix import Format, Matrix

_FLOATS: dict[str, tuple[torch.dtype, Literal["fp32", "bf16", "fp16"]]] = {
    "F32": (torch.float32, "fp32"),
    "F16": (torch.float16, "fp16"),
    "BF16": (torch.bfloat16, "bf16"),
}


def format_of_raw(type_name: str) -> tuple[Format, bool]:
    """What `matrix_from_raw` makes of this type: the format, and whether its scales are wide."""
    if type_name in _FLOATS:
        return _FLOATS[type_name][1], False
    return ("q4" if type_name in ("Q4_0", "Q4_1", "Q4_K") else "q8"), type_name == "Q4_K"


def matrix_from_raw(raw: RawTensor) -> Matrix:
    """A stored matrix [rows, columns]."""
    rows, columns = raw.shape
    # A copy: the file is mapped read-only, which PyTorch warns about.
    data = torch.from_numpy(np.array(raw.data))
    if raw.type_name in _FLOATS:
        dtype, format = _FLOATS[raw.type_name]
        return Matrix.from_floats(data.view(dtype).reshape(rows, columns), format)
    match raw.type_name:
        case "Q8_0":
            blocks = data.view(rows, -1, 34)
            return Matrix.from_bytes(blocks[..., 2:], _halves(blocks[..., :2]), None, columns=columns)
        case "Q4_0":
            blocks = data.view(rows, -1, 18)
            scales = _halves(blocks[..., :2])
            # A weight is scale * (q - 8); eight times an fp16 number is one too.
            return Matrix.from_bytes(blocks[..., 2:], scales, scales * -8, columns=columns)
        case "Q4_1":
            blocks = data.view(rows, -1, 20)
            return Matrix.from_bytes(
                blocks[..., 4:], _halves(blocks[..., :2]), _halves(blocks[..., 2:4]), columns=columns
            )
        case "Q5_0":
            return _q5_0(data.view(rows, -1, 22), columns)
        case "Q4_K":
            return _q4_k(data.view(rows, -1, 144), columns)
    return Matrix.quantized(_dequantized(raw), 8)


def _halves(bytes_: torch.Tensor) -> torch.Tensor:
    return bytes_.contiguous().view(torch.float16).squeeze(-1)


def _q5_0(blocks: torch.Tensor, columns: int) -> Matrix:
    """The fifth bits of the 32 weights are one word; a weight is scale * (q - 16)."""
    word = blocks[..., 2:6].contiguous().view(torch.int32)  # [rows, n, 1]
    fifth = (word >> torch.arange(32, dtype=torch.int32)) & 1
    low = torch.cat([blocks[..., 6:] & 15, blocks[..., 6:] >> 4], dim=2)
    quants = low.to(torch.int32) + 16 * fifth - 16
    return Matrix.from_quants(quants, _halves(blocks[..., :2]), None, columns=columns)


def _q4_k(blocks: torch.Tensor, columns: int) -> Matrix:
    """256 weights share two fp16 numbers; each 32 of them have a 6-bit multiple of either as scale and offset."""
    rows, count, _ = blocks.shape
    unit, unit_low = _halves(blocks[..., :2]).float(), _halves(blocks[..., 2:4]).float()
    packed = blocks[..., 4:16].to(torch.int32)
    first, second, last = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scale = torch.cat([first & 63, (last & 15) | (first >> 6 << 4)], dim=2)
    low = torch.cat([second & 63, (last >> 4) | (second >> 6 << 4)], dim=2)
    bytes_ = blocks[..., 16:].reshape(rows, count, 4, 32)
    quants = torch.stack([bytes_ & 15, bytes_ >> 4], dim=3).reshape(rows, count * 8, 32)
    scales = (unit[..., None] * scale).flatten(1)
    offsets = (unit_low[..., None] * low).neg().flatten(1)
    return Matrix.from_quants(quants, scales, offsets, columns=columns, wide=True)


def _dequantized(raw: RawTensor) -> torch.Tensor:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    values = dequantize(np.ascontiguousarray(raw.data), GGMLQuantizationType[raw.type_name])
    return torch.from_numpy(values).reshape(raw.shape)
