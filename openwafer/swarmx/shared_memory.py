"""Memory that several processes map: anonymous files, which are gone when the last process is, however it ends."""

import ctypes
import mmap
import os
import threading
import warnings
import weakref

import torch
from torch import Tensor

from openwafer.errors import UserError
from openwafer.memoryx.store import WIRE
from openwafer.memoryx.tier import DramTier, Key

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate


class Arena:
    """A growing piece of shared memory. Others map it by its descriptor (`ArenaView`)."""

    def __init__(self, name: str, descriptor: int | None = None) -> None:
        # Never under a name in a file system: nothing is left behind, even after SIGKILL.
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC) if descriptor is None else descriptor
        self._view = ArenaView(self.descriptor, writable=True)
        self._used = 0
        self._free: dict[int, list[int]] = {}  # size → offsets of places that were recycled
        self._lock = threading.Lock()

    def allocate(self, num_bytes: int) -> Tensor:
        """New zeros, uint8, starting at a page."""
        size = max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        with self._lock:
            offset, self._used = self._used, self._used + size
            try:
                os.ftruncate(self.descriptor, self._used)
                os.posix_fallocate(self.descriptor, offset, size)  # now, and not as SIGBUS when it is first touched
            except OSError as error:
                raise UserError(
                    f"cannot get {size:,} bytes of shared memory ({error.strerror}): give less --dram, or fewer workers"
                ) from None
            return self._view.at(offset, num_bytes)

    def allocate_recycled(self, num_bytes: int) -> Tensor:
        """As `allocate`, but when the tensor is dropped its memory goes back, and its place serves again."""
        size = max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        places = self._free.setdefault(size, [])
        memory = self._view.at(places.pop(), num_bytes) if places else self.allocate(num_bytes)
        weakref.finalize(memory, self._recycle, self.offset_of(memory), size)
        return memory

    def _recycle(self, offset: int, size: int) -> None:
        # Python has no way to say so: give the pages back, keep the size of the file.
        libc = ctypes.CDLL(None)
        libc.fallocate(self.descriptor, _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_long(offset), ctypes.c_long(size))
        self._free[size].append(offset)

    def offset_of(self, tensor: Tensor) -> int:
        """Where a tensor of this arena lies, in bytes."""
        return self._view.offset_of(tensor)


class ArenaView:
    """The same memory, seen from any process."""

    def __init__(self, descriptor: int, *, writable: bool) -> None:
        self._descriptor = descriptor
        self._protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._maps: list[tuple[int, Tensor]] = []  # (offset in the file, bytes): each growth is mapped once
        self._end = 0

    def at(self, offset: int, num_bytes: int) -> Tensor:
        if offset + num_bytes > self._end:
            self._map_rest()
        for start, memory in self._maps:
            if start <= offset and offset + num_bytes <= start + memory.numel():
                return memory[offset - start : offset - start + num_bytes]
        # Arrays never lie across two mappings of their owner, but may across ours.
        self._maps.append((0, self._mapped(0, self._end)))
        return self._maps[-1][1][offset : offset + num_bytes]

    def offset_of(self, tensor: Tensor) -> int:
        address = tensor.data_ptr()
        for start, memory in self._maps:
            if 0 <= address - memory.data_ptr() < memory.numel():
                return start + address - memory.data_ptr()
        raise AssertionError("not in this arena")

    def _map_rest(self) -> None:
        size = os.fstat(self._descriptor).st_size
        self._maps.append((self._end, self._mapped(self._end, size - self._end)))
        self._end = size

    def _mapped(self, offset: int, size: int) -> Tensor:
        pages = mmap.mmap(self._descriptor, size, mmap.MAP_SHARED, self._protection, offset=offset)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of memory that cannot be written: that is the point
            return torch.frombuffer(pages, dtype=torch.uint8)


class SharedTier(DramTier):
    """DRAM in which the weights to be sent are mapped by every worker of the host; the rest stays with the store."""

    def __init__(self, arena: Arena, snapshot_bytes: int | None = None) -> None:
        super().__init__(snapshot_bytes)
        self.arena = arena

    def create(self, key: Key, num_elements: int, dtype: torch.dtype) -> None:
        if key[1] == WIRE:
            self._arrays[key] = self.arena.allocate(num_elements * dtype.itemsize).view(dtype)
        else:
            super().create(key, num_elements, dtype)
