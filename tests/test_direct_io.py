"""Buffers take the pages they need and no more; files are read and written past the cache or through it."""

import os
import re
from pathlib import Path

import pytest
import torch

from openwafer.direct_io import BLOCK_BYTES, aligned_bytes, bytes_of, has_direct, opened, read_fully, write_fully


def mapped_bytes() -> int:
    """Private writable memory of this process, touched or not."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.parametrize("num_bytes", [(64 << 20) + 1, (100 << 20) - 5, 3 << 25])
def test_a_buffer_is_not_rounded_up_to_a_power_of_two(num_bytes: int) -> None:
    before = mapped_bytes()
    buffer = aligned_bytes(num_bytes)
    assert buffer.data_ptr() % BLOCK_BYTES == 0
    assert num_bytes <= buffer.numel() < num_bytes + BLOCK_BYTES
    assert num_bytes <= mapped_bytes() - before < num_bytes + (3 << 20)  # as much as it takes to begin at a huge page
    del buffer
    assert mapped_bytes() - before < 1 << 20


@pytest.mark.parametrize("direct", [True, False])
def test_what_is_written_is_read_back(tmp_path: Path, direct: bool) -> None:
    direct = direct and has_direct(tmp_path)
    content = torch.arange(3 * BLOCK_BYTES, dtype=torch.int64).to(torch.uint8)
    buffer = aligned_bytes(3 * BLOCK_BYTES)
    buffer.copy_(content)
    with opened(tmp_path / "file", os.O_RDWR | os.O_CREAT, direct=direct) as descriptor:
        write_fully(descriptor, bytes_of(buffer), BLOCK_BYTES)
        found = aligned_bytes(5 * BLOCK_BYTES)
        assert read_fully(descriptor, bytes_of(found), 0) == 4 * BLOCK_BYTES  # where the file ends
    assert torch.equal(found[BLOCK_BYTES : 4 * BLOCK_BYTES], content)
    assert not found[:BLOCK_BYTES].any()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
