"""Host memory that a GPU can copy from and to at full speed, of exactly the size that was asked for.

PyTorch's own pinned allocator rounds up to powers of two; here whole pages are mapped and registered.
"""

import contextlib
import logging
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openwafer.errors import UserError
from openwafer.memoryx.store import WIRE
from openwafer.memoryx.tier import DramTier, Key
from openwafer.pages import mapped

_log = logging.getLogger(__name__)
_ALREADY_LOCKED = 712  # cudaErrorHostMemoryAlreadyRegistered
_TRIES = 16


def lock(memory: Tensor) -> None:
    """Page-lock memory that begins at a page; whoever gives it back unlocks it before, or the process ends."""
    status = _lock(memory)
    if status:
        raise _refused(memory.nbytes, status)


def pinned(num_elements: int, dtype: torch.dtype) -> Tensor:
    """A zeroed, page-locked flat CPU tensor."""
    num_bytes = max(1, num_elements * dtype.itemsize)
    # The tensor keeps the array alive and the array its pages; they are unlocked just before they go.
    array = _locked(num_bytes)
    raw = torch.from_numpy(array)
    weakref.finalize(array, _unlock, raw.data_ptr())
    return raw[: num_elements * dtype.itemsize].view(dtype)


def _locked(num_bytes: int) -> np.ndarray:
    """CUDA may not have forgotten pages yet that were unlocked a moment ago while the GPU was at work. Their addresses
    are free for new pages at once: those are kept aside until there are some at another address."""
    aside: list[np.ndarray] = []
    status = _ALREADY_LOCKED
    while status == _ALREADY_LOCKED and len(aside) < _TRIES:
        aside.append(mapped(num_bytes))
        status = _lock(torch.from_numpy(aside[-1]))
        if status == _ALREADY_LOCKED:
            _forget_error()
    if status:
        raise _refused(num_bytes, status)
    if len(aside) > 1:
        _log.debug("%d bytes of host memory were locked at address %d", num_bytes, len(aside))
    return aside[-1]


def _lock(memory: Tensor) -> int:
    return int(_cuda().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def _unlock(address: int) -> None:
    status = int(_cuda().cudaHostUnregister(address))
    if status:
        _forget_error()
        _log.warning("CUDA did not unlock host memory (error %d)", status)


def _forget_error() -> None:
    """CUDA keeps the error of a call for whoever asks next in this thread, and PyTorch asks after each kernel that it
    starts: that kernel would fail with it. So one that nobody needs is started here."""
    with contextlib.suppress(RuntimeError):
        _start_a_kernel()


def _start_a_kernel() -> None:
    torch.ones(1, device="cuda")


def _cuda() -> Any:
    return torch.cuda.cudart()


def _refused(num_bytes: int, status: int) -> UserError:
    return UserError(
        f"cannot lock {num_bytes / 2**30:.2f} GiB of host memory for the GPU (CUDA error {status}): "
        "raise the limit of locked memory (ulimit -l) or give a smaller DRAM budget"
    )


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
