"""Host memory for large arrays: whole pages of exactly the size asked for, huge ones where the system has them.

An optimizer pass over a Unit touches a gigabyte: with 4 KiB pages, address translation costs it several percent. Direct
I/O gains too, as the disk is given one piece of memory instead of 512 (`bench/flash.py` prints both rates).
"""

import contextlib
import mmap

import numpy as np
import torch
from torch import Tensor

from openwafer.errors import UserError

_HUGE_PAGE_BYTES = 2 << 20


def zeros(num_elements: int, dtype: torch.dtype) -> Tensor:
    """A zeroed flat CPU tensor, which keeps its pages alive; they take up memory only once they are written."""
    num_bytes = num_elements * dtype.itemsize
    if not _is_large(num_bytes):
        return torch.zeros(num_elements, dtype=dtype)
    return torch.from_numpy(mapped(num_bytes)).view(dtype)


def mapped(num_bytes: int) -> np.ndarray:
    """Zeroed bytes at the start of a page, of a huge one where they are many."""
    is_large = _is_large(num_bytes)
    try:
        pages = mmap.mmap(-1, num_bytes + is_large * _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise UserError(
            f"cannot get {num_bytes / 2**30:.2f} GiB of host memory ({error.strerror}): use less of it with --dram, "
            "and a folder for the rest with --flash"
        ) from None
    whole = np.frombuffer(pages, dtype=np.uint8)
    if not is_large:
        return whole
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    start = -whole.ctypes.data % _HUGE_PAGE_BYTES
    return whole[start : start + num_bytes]


def _is_large(num_bytes: int) -> bool:
    """Whether huge pages waste little: a sixteenth at most lies behind the end."""
    return -num_bytes % _HUGE_PAGE_BYTES <= num_bytes // 16 and num_bytes > 0
