"""Packed weight matrices as the GPU's kernels read them: quants row by row, scales in an array of their own.

A block is 32 inputs of one output, a group 8 blocks of 4 bits or 4 blocks of 8 bits. r outputs, g groups, n blocks in
them; the last group is filled up with zeros:

    quants     int32 [r, g, 32], a line of 128 bytes for each group: word i holds input i of each of its blocks, the
               first block in the lowest bits. A tile of words unpacks to a tile of weights in the same threads.
    gains      fp16 or fp32 [n, r, 2], scale and offset, for 4 bits; for 8 bits [n, r, 1], only a scale, and quants are
               128 more than they mean

A weight is scale * quant + offset, or scale * (quant - 128). All formats that `matrix.py` packs become one of the two,
with no bit lost.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from openwafer.serve.matrix import BLOCK, Matrix


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedWeight:
    """[outputs, inputs], and products with it are as with `dense()`."""

    num_columns: int
    dtype: torch.dtype  # that its weights are rounded to when they are unpacked
    quants: torch.Tensor
    gains: torch.Tensor

    @classmethod
    def of(cls, matrix: Matrix, dtype: torch.dtype) -> "PackedWeight":
        """On the device where the matrix is."""
        quants, scales, offsets = matrix.quants()
        blocks = _blocks_in_group(4 if offsets is not None else 8)
        fill = -quants.shape[1] % blocks
        bytes_ = F.pad(quants.contiguous().view(torch.uint8), (0, 0, 0, fill)).unflatten(1, (-1, blocks))
        bytes_ = bytes_ ^ 128 if offsets is None else bytes_[:, :, 0::2] | (bytes_[:, :, 1::2] << 4)
        kind = torch.float32 if matrix.wide else torch.float16
        parts = [scales] if offsets is None else [scales, offsets]
        return cls(
            num_columns=matrix.num_columns,
            dtype=dtype,
            quants=bytes_.transpose(2, 3).contiguous().view(torch.int32).squeeze(3),
            gains=torch.stack([F.pad(part.to(kind), (0, fill)).t() for part in parts], dim=2).contiguous(),
        )

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.quants.shape[0], self.num_columns))

    @property
    def num_bits(self) -> int:
        return 4 if self.gains.shape[2] == 2 else 8

    @property
    def num_groups(self) -> int:
        return self.quants.shape[1]

    @property
    def gain_stride(self) -> int:
        """From the gains of a block to those of the next, in outputs."""
        return self.gains.stride(0) // self.gains.shape[2]

    @property
    def nbytes(self) -> int:
        return self.quants.nbytes + self.gains.nbytes

    def part(self, first: int, stop: int) -> "PackedWeight":
        """Some of the outputs, not copied."""
        return replace(self, quants=self.quants[first:stop], gains=self.gains[:, first:stop])

    def dense(self) -> torch.Tensor:
        return self._unpacked(self.quants, self.gains)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Only these outputs of `dense()`, for a table of embeddings."""
        return self._unpacked(self.quants[numbers], self.gains[:, numbers])

    def _unpacked(self, words: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
        num_bits = self.num_bits
        shifts = torch.arange(0, 32, num_bits, device=words.device, dtype=torch.int32)
        quants = ((words[:, :, None, :] >> shifts[:, None]) & ((1 << num_bits) - 1)).flatten(1, 2)
        scales = gains[..., 0].t().float()[..., None]
        values = (quants - 128 if num_bits == 8 else quants) * scales
        if num_bits == 4:
            values = values + gains[..., 1].t().float()[..., None]
        return values.flatten(1)[:, : self.num_columns].to(self.dtype)


def _blocks_in_group(num_bits: int) -> int:
    return 32 // num_bits


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
    num_bits, block = (4, BLOCK // 2 + 2 * scale) if matrix.format == "q4" else (8, BLOCK + scale)
    in_group = _blocks_in_group(num_bits)
    num_groups = -(-matrix.num_columns // (BLOCK * in_group))
    return matrix.num_rows * num_groups * in_group * block
