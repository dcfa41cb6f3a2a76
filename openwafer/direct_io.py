"""Files read and written past the page cache (O_DIRECT), with buffers that are aligned for it.

Where a file system has no O_DIRECT (tmpfs, some network ones) the same calls go through the page cache.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openwafer.pages import mapped

BLOCK_BYTES = 4096  # offsets, lengths and addresses of direct I/O are multiples of this
_O_DIRECT = getattr(os, "O_DIRECT", 0)


def rounded_up(num_bytes: int) -> int:
    """`num_bytes` as a whole number of blocks."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def aligned_bytes(num_bytes: int) -> Tensor:
    """A page-aligned uint8 tensor of zeros, exactly as many pages as asked for and untouched until written."""
    return torch.from_numpy(mapped(max(rounded_up(num_bytes), BLOCK_BYTES)))


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    flat = tensor.detach().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(array)


@contextlib.contextmanager
def opened(path: Path, flags: int, *, direct: bool) -> Iterator[int]:
    """A descriptor, direct if asked for and possible."""
    descriptor = open_file(path, flags, direct=direct)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_file(path: Path, flags: int, *, direct: bool) -> int:
    """A descriptor for the caller to close, direct if asked for and possible."""
    if direct and _O_DIRECT:
        try:
            return os.open(path, flags | _O_DIRECT, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:  # what a file system without O_DIRECT answers
                raise
    return os.open(path, flags, 0o644)


def has_direct(folder: Path) -> bool:
    """Whether files in this folder can be read and written directly: tried, not looked up."""
    if not _O_DIRECT:
        return False
    probe = folder / f".direct-probe.{os.getpid()}"
    block = bytes_of(aligned_bytes(BLOCK_BYTES))
    try:
        descriptor = os.open(probe, os.O_RDWR | os.O_CREAT | _O_DIRECT, 0o600)
        try:
            return os.pwritev(descriptor, [block], 0) == os.preadv(descriptor, [block], 0) == BLOCK_BYTES
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    finally:
        probe.unlink(missing_ok=True)


def read_fully(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer`; returns fewer bytes only at the end of the file."""
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def write_fully(descriptor: int, buffer: memoryview, offset: int) -> None:
    """Write all of `buffer`."""
    done = 0
    while done < len(buffer):
        done += os.pwritev(descriptor, [buffer[done:]], offset + done)
