"""Weight matrices as the kernels read them: 16 output rows side by side, one after another in memory.

A kernel then holds 16 sums in registers and runs along the input in one fixed order, whatever the number of rows
of the batch. Layouts (g groups of 16 outputs, k inputs, n blocks of 32 inputs):

    fp32, bf16, fp16    [g, k, 16]
    q8                  [g, n] records: 16 scales, then 8 x 16 x 4 int8 (inputs 4j..4j+3 of each output)
    q4                  [g, n] records: 16 scales, 16 offsets, then 4 x 16 x 4 bytes (low half: inputs 4j..4j+3,
                        high half: inputs 16+4j..16+4j+3)

A q8 weight is scale * q, a q4 weight is scale * q + offset with q from 0 to 15. Scales and offsets are fp16, or fp32
where the file's do not fit (`wide`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

Format = Literal["fp32", "bf16", "fp16", "q8", "q4"]

GROUP = 16  # outputs side by side
BLOCK = 32  # inputs that share a scale
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, eq=False)
class Matrix:
    """A packed matrix of `num_rows` outputs and `num_columns` inputs; rows and blocks are filled up with zeros."""

    format: Format
    num_rows: int
    num_columns: int
    data: torch.Tensor  # as above; the records are bytes
    wide: bool = False

    @classmethod
    def from_floats(cls, values: torch.Tensor, format: Literal["fp32", "bf16", "fp16"]) -> "Matrix":
        """values [rows, columns]"""
        rows, columns = values.shape
        padded = F.pad(values.to(_DTYPES[format]), (0, 0, 0, -rows % GROUP))
        data = padded.unflatten(0, (-1, GROUP)).transpose(1, 2).contiguous()
        return cls(format, rows, columns, data)

    @classmethod
    def from_quants(
        cls,
        quants: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor | None,
        *,
        columns: int,
        wide: bool = False,
    ) -> "Matrix":
        """quants [rows, n, 32] (int8; with offsets 0..15), scales and offsets [rows, n]."""
        bytes_ = quants.to(torch.int8).view(torch.uint8)
        if offsets is not None:
            bytes_ = bytes_[..., :16] | (bytes_[..., 16:] << 4)
        return cls.from_bytes(bytes_, scales, offsets, columns=columns, wide=wide)

    @classmethod
    def from_bytes(
        cls,
        bytes_: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor | None,
        *,
        columns: int,
        wide: bool = False,
    ) -> "Matrix":
        """bytes_ uint8 [rows, n, 32]; or [rows, n, 16], input i in the low and i + 16 in the high half of byte i."""
        rows = scales.shape[0]
        fill = -rows % GROUP
        words = F.pad(bytes_, (0, 0, 0, 0, 0, fill)).contiguous().view(torch.int32)  # four inputs are one word
        words = words.unflatten(0, (-1, GROUP)).permute(0, 2, 3, 1)  # [g, n, word, 16]
        kind = torch.float32 if wide else torch.float16
        parts = [scales] if offsets is None else [scales, offsets]
        heads = [
            F.pad(part.to(kind), (0, 0, 0, fill)).unflatten(0, (-1, GROUP)).transpose(1, 2).contiguous()
            for part in parts
        ]
        # Flat on the way: a dim of size 1 may have a stride that no other dtype can be seen through.
        heads = [head.flatten().view(torch.int32).view(*head.shape[:2], -1) for head in heads]
        data = torch.cat([*heads, words.flatten(2)], dim=2)
        return cls("q8" if offsets is None else "q4", rows, columns, data.view(torch.uint8), wide)

    @classmethod
    def quantized(cls, values: torch.Tensor, num_bits: Literal[4, 8]) -> "Matrix":
        """Round values [rows, columns] to 8 bits around zero, or to 4 bits between each block's least and largest."""
        columns = values.shape[1]
        blocks = F.pad(values.float(), (0, -columns % BLOCK)).unflatten(1, (-1, BLOCK))
        if num_bits == 8:
            scales = (blocks.abs().amax(2) / 127).half()
            quants = (blocks / _divisor(scales)).round().clamp(-127, 127)
            return cls.from_quants(quants, scales, None, columns=columns)
        low = blocks.amin(2).half()
        scales = ((blocks.amax(2) - low.float()) / 15).half()
        quants = ((blocks - low.float()[..., None]) / _divisor(scales)).round().clamp(0, 15)
        return cls.from_quants(quants, scales, low, columns=columns)

    @staticmethod
    def stack(matrices: "Sequence[Matrix]") -> "Matrix | None":
        """One matrix of the outputs of all, or None where their formats or filled-up rows forbid it."""
        first = matrices[0]
        alike = all(m.format == first.format and m.wide == first.wide for m in matrices)
        if not alike or any(m.num_rows % GROUP for m in matrices):
            return None
        data = torch.cat([m.data for m in matrices])
        return Matrix(first.format, sum(m.num_rows for m in matrices), first.num_columns, data, first.wide)

    def pieces(self, most_bytes: int) -> "list[Matrix]":
        """The same outputs in several matrices of at most so many bytes (of 16 outputs at the least), not copied."""
        groups = self.data.shape[0]
        step = max(1, most_bytes // (self.data.nbytes // groups))
        return [
            Matrix(
                self.format,
                min(self.num_rows - first * GROUP, step * GROUP),
                self.num_columns,
                self.data[first : first + step],
                self.wide,
            )
            for first in range(0, groups, step)
        ]

    @property
    def is_elsewhere(self) -> bool:
        """Whether only its shape is here: the data is streamed."""
        return self.data.is_meta

    @property
    def is_packed(self) -> bool:
        return self.format in ("q8", "q4")

    def quants(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What `from_quants` was given: int8 [rows, n, 32], fp32 scales and offsets [rows, n]."""
        assert self.is_packed
        kind, size = (torch.float32, 4) if self.wide else (torch.float16, 2)
        num_heads = 2 if self.format == "q4" else 1
        *heads, body = self.data.split([GROUP * size] * num_heads + [self.data.shape[2] - num_heads * GROUP * size], 2)
        vectors = [
            part.contiguous().view(kind).float().transpose(1, 2).flatten(0, 1)[: self.num_rows] for part in heads
        ]
        quants = body.contiguous()
        if self.format == "q4":
            quants = torch.cat([quants & 15, quants >> 4], dim=2)
        quants = quants.view(torch.int8).unflatten(2, (BLOCK // 4, GROUP, 4)).transpose(3, 4).flatten(2, 3)
        quants = quants.permute(0, 3, 1, 2).flatten(0, 1)[: self.num_rows]
        return quants, vectors[0], vectors[1] if num_heads == 2 else None

    def dense(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weights, [rows, columns]."""
        if not self.is_packed:
            return self.data.to(dtype).transpose(1, 2).flatten(0, 1)[: self.num_rows]
        quants, scales, offsets = self.quants()
        values = quants * scales[..., None]
        if offsets is not None:
            values = values + offsets[..., None]
        return values.flatten(1)[:, : self.num_columns].to(dtype)


def packed_bytes(format: Format, num_rows: int, num_columns: int, wide: bool = False) -> int:
    """Bytes of a packed matrix."""
    groups, blocks = -(-num_rows // GROUP), -(-num_columns // BLOCK)
    if format in _DTYPES:
        return groups * num_columns * GROUP * _DTYPES[format].itemsize
    scales = GROUP * (4 if wide else 2)
    return groups * blocks * (2 * scales + GROUP * BLOCK // 2 if format == "q4" else scales + GROUP * BLOCK)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """A block of zeros has scale 0 and stays zeros."""
    return torch.where(scales == 0, 1, scales).float()[..., None]
