"""The numbers of a batch: packed on the host, read again on the device."""

import numpy as np
import torch

from openwafer.serve.gpu.places import ALIGNMENT, Run, most_numbers, packed, runs_of, slots_of, unpacked
from openwafer.serve.runner import Batch

BATCH = Batch(
    tokens=np.array([5, 6, 7, 8], np.int32),
    positions=np.array([17, 18, 3, 40], np.int32),
    sequences=np.array([0, 0, 1, 2], np.int32),
    tables=np.array([[4, 9, 0], [2, 0, 0], [1, 3, 6]], np.int32),
    logit_rows=np.array([1, 2, 3], np.int32),
)


def test_runs_and_slots() -> None:
    assert runs_of(BATCH) == [
        Run(first=0, count=2, start=17, sequence=0),
        Run(first=2, count=1, start=3, sequence=1),
        Run(first=3, count=1, start=40, sequence=2),
    ]
    assert slots_of(BATCH, 16).tolist() == [9 * 16 + 1, 9 * 16 + 2, 2 * 16 + 3, 6 * 16 + 8]


def test_what_is_packed_is_found_again_and_aligned() -> None:
    out = np.full(most_numbers(6, 9), -7, np.int32)
    singles = np.array([2, 3], np.int32)
    num_singles, count = packed(BATCH, 16, 6, 999, singles, out)
    assert count <= len(out)
    places = unpacked(torch.from_numpy(out[:count]), 6, num_singles)
    assert places.tokens.tolist() == [5, 6, 7, 8, 0, 0]
    assert places.positions.tolist() == [17, 18, 3, 40, 0, 0]
    assert places.slots.tolist() == [*slots_of(BATCH, 16).tolist(), 999, 999]  # rows that fill up disturb nobody
    assert places.singles.tolist() == [2, 3]
    assert places.table().tolist() == BATCH.tables.tolist()
    for view in (places.tokens, places.positions, places.slots, places.singles, places.width, places.tables):
        assert view.storage_offset() % ALIGNMENT == 0
