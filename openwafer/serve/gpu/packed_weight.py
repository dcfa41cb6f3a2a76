"""Packed weight matrices as the GPU's kernels read them: quants row by row, scales in arrays of their own.

A block is 32 inputs of one output. r outputs, n blocks:

    quants     int32 [r, n, 4 or 8], 16 or 32 bytes a block: a thread's load of 16 bytes has one scale
               4 bits: word i holds inputs i, 4 + i, 8 + i, ... 28 + i, the first in its lowest bits
               8 bits: word j holds inputs 4 j to 4 j + 3, the first in its lowest bits
    scales     fp16 or fp32 [r, n]
    offsets    the same, for 4 bits; for 8 bits there are none, and quants are 128 more than they mean

A weight is scale * quant + offset, or scale * (quant - 128). All formats that `matrix.py` packs become one of the two,
with no bit lost.
"""

from dataclasses import dataclass, replace

import torch

from openwafer.serve.matrix import BLOCK, Matrix


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedWeight:
    """[outputs, inputs], and products with it are as with `dense()`."""

    num_columns: int
    dtype: torch.dtype  # that its weights are rounded to when they are unpacked
    quants: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None

    @classmethod
    def of(cls, matrix: Matrix, dtype: torch.dtype) -> "PackedWeight":
        """On the device where the matrix is."""
        quants, scales, offsets = matrix.quants()
        kind = torch.float32 if matrix.wide else torch.float16
        if offsets is None:
            words = (quants.contiguous().view(torch.uint8) ^ 128).view(torch.int32)
        else:
            nibbles = quants.view(torch.uint8).unflatten(2, (4, 2, 4))  # inputs 8 a + 4 b + i at [a, b, i]
            pairs = nibbles[..., 0, :] | (nibbles[..., 1, :] << 4)
            words = pairs.transpose(2, 3).contiguous().view(torch.int32).squeeze(3)
        return cls(
            num_columns=matrix.num_columns,
            dtype=dtype,
            quants=words,
            scales=scales.to(kind).contiguous(),
            offsets=None if offsets is None else offsets.to(kind).contiguous(),
        )

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.quants.shape[0], self.num_columns))

    @property
    def num_bits(self) -> int:
        return 8 if self.offsets is None else 4

    @property
    def num_blocks(self) -> int:
        return self.quants.shape[1]

    @property
    def nbytes(self) -> int:
        return self.quants.nbytes + self.scales.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    def part(self, first: int, stop: int) -> "PackedWeight":
        """Some of the outputs, not copied."""
        offsets = None if self.offsets is None else self.offsets[first:stop]
        return replace(self, quants=self.quants[first:stop], scales=self.scales[first:stop], offsets=offsets)

    def dense(self) -> torch.Tensor:
        return self._unpacked(self.quants, self.scales, self.offsets)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Only these outputs of `dense()`, for a table of embeddings."""
        offsets = None if self.offsets is None else self.offsets[numbers]
        return self._unpacked(self.quants[numbers], self.scales[numbers], offsets)

    def _unpacked(self, words: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
        if offsets is None:
            values = (words.view(torch.uint8).float() - 128) * scales.float()[..., None]
        else:
            shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
            quants = ((words[:, :, None, :] >> shifts[:, None]) & 15).flatten(2)
            values = quants * scales.float()[..., None] + offsets.float()[..., None]
        return values.flatten(1)[:, : self.num_columns].to(self.dtype)


Weight = torch.Tensor | PackedWeight  # [outputs, inputs]


def dense(weight: Weight) -> torch.Tensor:
    return weight.dense() if isinstance(weight, PackedWeight) else weight


def rows_of(table: Weight, numbers: torch.Tensor) -> torch.Tensor:
    """table[numbers]"""
    return table.rows(numbers) if isinstance(table, PackedWeight) else torch.nn.functional.embedding(numbers, table)


def device_bytes(matrix: Matrix, dtype: torch.dtype) -> int:
    """What a matrix takes on a device where weights that are not packed are `dtype`."""
    if not matrix.is_packed:
        return matrix.num_rows * matrix.num_columns * dtype.itemsize
    scale = 4 if matrix.wide else 2
    block = BLOCK // 2 + 2 * scale if matrix.format == "q4" else BLOCK + scale
    return matrix.num_rows * -(-matrix.num_columns // BLOCK) * block
