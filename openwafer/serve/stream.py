"""Weights that do not fit into memory: packed once into files on flash, and read ahead of their use in every step.

A unit is what is read at one time: the matrices of a layer, or a piece of the output matrix of about that size. Two
units are in memory at a time, one that is computed with and one that is being read. Of the table of embeddings only
the rows of a step's tokens are read.

The files hold what the kernels read, so nothing is unpacked or moved about between the disk and the products.
"""

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from openwafer.direct_io import aligned_bytes, rounded_up
from openwafer.errors import UserError
from openwafer.file_lock import InUse
from openwafer.memoryx.flash import FlashTier
from openwafer.registry import cache_dir
from openwafer.serve.matrix import GROUP, Matrix
from openwafer.serve.program import Embed, Linear, Operation, Span
from openwafer.serve.region import Part

_ALIGNMENT = 64  # of a matrix within its unit
_UNIT, _TABLE = "unit", "table"
_MOST_FOLDERS = 1000


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What is streamed. `unit_bytes` is the largest unit, which pieces of tables are cut to as well."""

    layers: frozenset[int]
    head: bool
    table: bool
    unit_bytes: int
    pool_bytes: int
    file_bytes: int  # on flash


@dataclass(frozen=True)
class Place:
    """Where a streamed matrix is: byte `offset` of a unit."""

    unit: int
    offset: int


class WeightStream:
    """Takes operations whose weights go to flash, and gives the weights back unit by unit while they run."""

    def __init__(self, placement: Placement, folder: Path | None = None) -> None:
        self.placement = placement
        self.places: dict[Matrix, Place] = {}
        self.wait_s = 0.0  # that computing waited for flash
        # Room for one unit: while loading, memory is needed for packing.
        self._tier = open_tier(folder, rounded_up(placement.unit_bytes), placement.file_bytes)
        self._num_units = 0
        self._table: Matrix | None = None
        self._piece_groups = 1  # groups of 16 rows in a piece of the table

    @property
    def streamed_layers(self) -> frozenset[int]:
        return self.placement.layers

    @property
    def num_bytes_read(self) -> int:
        return self._tier.num_bytes_moved[0]

    # Loading

    def taken(self, part: Part, operations: list[Operation]) -> list[Operation]:
        """The operations of a part, their matrices on flash if that is their place."""
        placement = self.placement
        if part == "embedding" and placement.table:
            return [
                dataclasses.replace(op, table=self._put_table(op.table)) if isinstance(op, Embed) else op
                for op in operations
            ]
        if part == "head" and placement.head:
            return self._put_head(operations)
        return self._put(operations) if part in placement.layers else operations

    def finish(self) -> None:
        """Everything is there: from now on two units may be in memory."""
        self._tier.freeze()
        self._tier.pool_bytes = self.placement.pool_bytes

    def _put_head(self, operations: Sequence[Operation]) -> list[Operation]:
        """The output matrix is cut into pieces, each with an operation of its own."""
        cut: list[Operation] = []
        for op in operations:
            if not isinstance(op, Linear):
                cut.append(op)
                continue
            start = op.dst.start
            for piece in op.matrix.pieces(self.placement.unit_bytes):
                dst = Span(op.dst.buffer, start, piece.num_rows)
                cut += self._put([dataclasses.replace(op, dst=dst, matrix=piece)])
                start += piece.num_rows
        return cut

    def _put(self, operations: Sequence[Operation]) -> list[Operation]:
        """One unit of the matrices of all operations."""
        unit, self._num_units = self._num_units, self._num_units + 1
        offsets: dict[Matrix, int] = {}
        num_bytes = 0
        for op in operations:
            if isinstance(op, Linear):
                offsets[op.matrix] = num_bytes
                num_bytes += -(-op.matrix.data.nbytes // _ALIGNMENT) * _ALIGNMENT
        flat = self._new((unit, _UNIT), num_bytes)
        for matrix, offset in offsets.items():
            flat[offset : offset + matrix.data.nbytes] = _bytes(matrix)
        self._tier.release((unit, _UNIT), changed=True)
        return [
            dataclasses.replace(op, matrix=self._moved(op.matrix, Place(unit, offsets[op.matrix])))
            if isinstance(op, Linear)
            else op
            for op in operations
        ]

    def _put_table(self, table: Matrix) -> Matrix:
        pieces = table.pieces(self.placement.unit_bytes)
        for number, piece in enumerate(pieces):
            self._new((number, _TABLE), piece.data.nbytes).copy_(_bytes(piece))
            self._tier.release((number, _TABLE), changed=True)
        self._piece_groups = pieces[0].data.shape[0]
        self._table = without_data(table)
        return self._table

    def _new(self, key: tuple[int, str], num_bytes: int) -> torch.Tensor:
        self._tier.create(key, num_bytes, torch.uint8)
        return self._tier.load(key)

    def _moved(self, matrix: Matrix, place: Place) -> Matrix:
        moved = without_data(matrix)
        self.places[moved] = place
        return moved

    # Running

    def ahead(self, unit: int) -> None:
        """This unit is needed soon."""
        self._tier.prefetch((unit, _UNIT))

    def bring(self, unit: int) -> torch.Tensor:
        """The bytes of a unit, until `done`."""
        began = time.perf_counter()
        flat = self._tier.load((unit, _UNIT))
        self.wait_s += time.perf_counter() - began
        return flat

    def done(self, unit: int) -> None:
        self._tier.release((unit, _UNIT), changed=False)

    def rows(self, tokens: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
        """A small table with the rows of these tokens in it, and where: (its data, int32 [tokens])."""
        assert self._table is not None
        began = time.perf_counter()
        groups, index = np.unique(tokens // GROUP, return_inverse=True)
        size = self._table.data.nbytes // self._table.data.shape[0]
        data = torch.empty(len(groups), size, dtype=torch.uint8)
        for row, group in zip(data, groups.tolist(), strict=True):
            piece, at = divmod(group, self._piece_groups)
            row.copy_(self._tier.read_frozen((piece, _TABLE), at * size, size))
        self.wait_s += time.perf_counter() - began
        return data, (index * GROUP + tokens % GROUP).astype(np.int32)

    def close(self) -> None:
        self._tier.close()


def _bytes(matrix: Matrix) -> torch.Tensor:
    return matrix.data.contiguous().flatten().view(torch.uint8)


def without_data(matrix: Matrix) -> Matrix:
    """Its shape alone."""
    return dataclasses.replace(matrix, data=torch.empty_like(matrix.data, device="meta"))


def open_tier(
    folder: Path | None,
    pool_bytes: int,
    file_bytes: int,
    *,
    allocate: Callable[[int], torch.Tensor] = aligned_bytes,
) -> FlashTier:
    """For files of `file_bytes` together. Without a folder, one in the cache is found."""
    if folder is not None:
        return _opened(folder, pool_bytes, file_bytes, allocate)
    # Scratch: a folder that a killed server left behind is taken over, one that is in use is left alone.
    for number in range(_MOST_FOLDERS):
        with contextlib.suppress(InUse):
            return _opened(cache_dir() / "flash" / f"serve-{number}", pool_bytes, file_bytes, allocate)
    raise UserError(f"{_MOST_FOLDERS} servers use {cache_dir() / 'flash'}: give this one a folder with --flash")


def _opened(folder: Path, pool_bytes: int, file_bytes: int, allocate: Callable[[int], torch.Tensor]) -> FlashTier:
    tier = FlashTier(folder, pool_bytes, allocate=allocate, comfort="Start the server again")
    free = shutil.disk_usage(folder).free
    if free < file_bytes:
        tier.close()
        raise UserError(
            f"flash folder {folder} has {free:,} bytes free, {file_bytes:,} are needed for the weights that "
            "do not fit into dram: free some space, choose another --flash folder, or raise --dram"
        )
    return tier
