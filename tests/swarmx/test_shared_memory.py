"""Shared memory: what one process writes another reads, it grows, and what is dropped goes back."""

import gc
import os
from pathlib import Path

import torch

from openwafer.swarmx.shared_memory import Arena, ArenaView


def test_a_view_sees_what_is_written_and_what_is_added_later() -> None:
    arena = Arena("test")
    view = ArenaView(arena.descriptor, writable=False)
    for size in (100, 10_000, 70_000):
        mine = arena.allocate(size)
        mine.copy_(torch.arange(size) % 251)
        assert torch.equal(view.at(arena.offset_of(mine), size), mine)
        assert mine.data_ptr() % os.sysconf("SC_PAGESIZE") == 0
    assert not [name for name in os.listdir("/dev/shm") if "test" in name]


def test_dropped_buffers_give_their_memory_back() -> None:
    arena = Arena("test")
    path = Path(f"/proc/self/fd/{arena.descriptor}")
    size = 1 << 20
    kept = arena.allocate_recycled(size)
    for _ in range(5):
        gone = arena.allocate_recycled(size)
        gone.fill_(7)
        del gone
        gc.collect()
    assert path.stat().st_size == 2 * size, "one place serves all five"
    assert path.stat().st_blocks * 512 <= size, "and holds nothing now"
    assert kept.sum() == 0
    assert arena.allocate_recycled(size).sum() == 0, "a place that serves again is empty"
