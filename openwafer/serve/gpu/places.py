"""Where the rows of a batch stand: their positions, their slots of the cache, and how attention takes them."""

from dataclasses import dataclass

import numpy as np
import torch

from openwafer.serve.runner import Batch

# Every array starts at a multiple of this many numbers: Triton compiles a kernel anew for each way its pointers are
# aligned, which would stop a server for a second each time.
ALIGNMENT = 16
SHORT = 8  # rows of a sequence up to which each is attended by itself: decoded tokens and guesses


@dataclass(frozen=True, kw_only=True)
class Run:
    """Rows `first` to `first + count` are positions `start` to `start + count` of a sequence."""

    first: int
    count: int
    start: int
    sequence: int


@dataclass(frozen=True, kw_only=True)
class Places:
    """int32 tensors on the device; r rows, s sequences, `width` blocks in each row of the table."""

    tokens: torch.Tensor  # [r]
    positions: torch.Tensor  # [r]
    slots: torch.Tensor  # [r], block * block_size + place in the block
    sequences: torch.Tensor  # [r]
    follows: torch.Tensor  # [r], as in `Batch`
    singles: torch.Tensor  # [n], rows that are attended one by one
    width: torch.Tensor  # [1], on the device because a recorded graph meets another one each time
    tables: torch.Tensor  # [s * width] or longer
    runs: tuple[Run, ...] = ()  # all other rows

    def table(self) -> torch.Tensor:
        """[s, width]; asks the device, so for the plain path only."""
        width = int(self.width.item())
        return self.tables[: len(self.tables) // width * width].view(-1, width)


def runs_of(batch: Batch) -> list[Run]:
    """The rows of each sequence, which lie together."""
    starts = np.flatnonzero(np.diff(batch.sequences, prepend=batch.sequences[0] - 1))
    stops = [*starts[1:].tolist(), len(batch.sequences)]
    return [
        Run(
            first=first,
            count=stop - first,
            start=int(batch.positions[first]),
            sequence=int(batch.sequences[first]),
        )
        for first, stop in zip(starts.tolist(), stops, strict=True)
    ]


def slots_of(batch: Batch, block_size: int) -> np.ndarray:
    """Where the keys and values of each row are stored, int32 [r]."""
    blocks = batch.tables[batch.sequences, batch.positions // block_size]
    return blocks * np.int32(block_size) + batch.positions % np.int32(block_size)


def packed(
    batch: Batch, block_size: int, num_rows: int, spare_slot: int, singles: np.ndarray, out: np.ndarray
) -> tuple[int, int]:
    """Lay a batch out in `out` (int32), filled up to `num_rows` rows that nobody looks at.

    Returns the number of singles and of all numbers used. `unpacked` reads it on the device.
    """
    count, pitch = len(batch.tokens), _padded(num_rows)
    heads = out[: 5 * pitch].reshape(5, pitch)
    heads[:] = 0
    heads[2] = spare_slot
    heads[0, :count] = batch.tokens
    heads[1, :count] = batch.positions
    heads[2, :count] = slots_of(batch, block_size)
    heads[3, :count] = batch.sequences
    heads[4] = -1
    if batch.follows is not None:
        heads[4, :count] = batch.follows
    at = 5 * pitch
    out[at : at + len(singles)] = singles
    at += _padded(len(singles))
    out[at] = batch.tables.shape[1]
    tables = batch.tables.reshape(-1)
    at += ALIGNMENT
    out[at : at + len(tables)] = tables
    return len(singles), at + len(tables)


def unpacked(staged: torch.Tensor, num_rows: int, num_singles: int, runs: tuple[Run, ...] = ()) -> Places:
    """Views into what `packed` wrote, on the device."""
    pitch = _padded(num_rows)
    tokens, positions, slots, sequences, follows = staged[: 5 * pitch].view(5, pitch)[:, :num_rows]
    at = 5 * pitch + _padded(num_singles)
    return Places(
        tokens=tokens,
        positions=positions,
        slots=slots,
        sequences=sequences,
        follows=follows,
        singles=staged[5 * pitch : 5 * pitch + num_singles],
        width=staged[at : at + 1],
        tables=staged[at + ALIGNMENT :],
        runs=runs,
    )


def most_numbers(num_rows: int, num_table_entries: int) -> int:
    """The longest that `packed` gets."""
    return 6 * _padded(num_rows) + ALIGNMENT + num_table_entries


def _padded(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
