"""Host memory that a GPU can copy from and to at full speed, of exactly the size that was asked for.

PyTorch's own pinned allocator rounds up to powers of two; here whole pages are mapped and registered.
"""

import weakref

import torch
from torch import Tensor

from openwafer.errors import UserError
from openwafer.memoryx.store import WIRE
from openwafer.memoryx.tier import DramTier, Key
from openwafer.pages import mapped


def lock(memory: Tensor) -> None:
    """Page-lock memory that begins at a page; whoever gives it back unlocks it before, or the process ends."""
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)  # pyright: ignore[reportOptionalMemberAccess]
    if int(status) != 0:
        raise UserError(
            f"cannot lock {memory.nbytes / 2**30:.2f} GiB of host memory for the GPU (CUDA error {int(status)}): "
            "raise the limit of locked memory (ulimit -l) or give a smaller DRAM budget"
        )


def pinned(num_elements: int, dtype: torch.dtype) -> Tensor:
    """A zeroed, page-locked flat CPU tensor."""
    num_bytes = max(1, num_elements * dtype.itemsize)
    # The tensor keeps the array alive and the array its pages; they are unlocked just before they go.
    array = mapped(num_bytes)
    raw = torch.from_numpy(array)
    lock(raw)
    weakref.finalize(array, torch.cuda.cudart().cudaHostUnregister, raw.data_ptr())  # pyright: ignore
    return raw[: num_elements * dtype.itemsize].view(dtype)


class PinnedTier(DramTier):
    """DRAM in which the weights to be sent are page-locked; the rest never leaves the host."""

    def create(self, key: Key, num_elements: int, dtype: torch.dtype) -> None:
        if key[1] == WIRE:
            self._arrays[key] = pinned(num_elements, dtype)
        else:
            super().create(key, num_elements, dtype)

    def like(self, key: Key) -> Tensor:
        array = self._arrays[key]
        return pinned(array.numel(), array.dtype) if key[1] == WIRE else super().like(key)
