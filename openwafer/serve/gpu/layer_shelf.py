"""Where the weights of streamed layers lie between two copies: in host memory, or on flash if that has no room.

A layer on flash is read ahead into one of a few page-locked buffers, copied to the device from there, and the buffer
serves again when that copy has landed. The host waits for the disk; the device has what it was given before.
"""

import contextlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from openwafer.csx.device import Moment
from openwafer.direct_io import BLOCK_BYTES, rounded_up
from openwafer.memoryx.flash import FlashTier
from openwafer.serve.gpu.device import Device
from openwafer.serve.stream import open_tier

NUM_FLASH_BUFFERS = 4  # two that are copied from, one that is full, one that is read into
_NUM_LENT = 2
_FIELD = "layer"


class Piece(Protocol):
    """The bytes of one layer."""

    def lend(self) -> torch.Tensor:
        """To be copied from."""
        ...

    def give_back(self, landed: Moment) -> None:
        """The copy is under way; when it has landed, the memory is not needed any more."""
        ...


class HostPiece:
    """Stays in host memory."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    def lend(self) -> torch.Tensor:
        return self._memory

    def give_back(self, landed: Moment) -> None:
        pass


class FlashPiece:
    def __init__(self, shelf: "FlashShelf", number: int) -> None:
        self._shelf = shelf
        self._number = number

    def lend(self) -> torch.Tensor:
        return self._shelf.lend(self._number)

    def give_back(self, landed: Moment) -> None:
        self._shelf.give_back(self._number, landed)


class FlashShelf:
    """Layers in files, read in the order in which they were put."""

    def __init__(self, device: Device, folder: Path | None, layer_bytes: int, num_layers: int) -> None:
        """`layer_bytes`: of the largest. Without a folder, one in the cache."""
        size = flash_buffer_bytes(layer_bytes)
        self._tier: FlashTier = open_tier(
            folder,
            NUM_FLASH_BUFFERS * size,
            num_layers * size,
            allocate=lambda num_bytes: device.host_memory(num_bytes, torch.uint8),
        )
        self._num_layers = 0
        self._lent: deque[tuple[int, Moment]] = deque()

    @contextlib.contextmanager
    def putting(self, num_bytes: int) -> Iterator[tuple[torch.Tensor, FlashPiece]]:
        """Memory to fill with the next layer, which is then written."""
        number, self._num_layers = self._num_layers, self._num_layers + 1
        self._tier.create((number, _FIELD), num_bytes, torch.uint8)
        yield self._tier.load((number, _FIELD)), FlashPiece(self, number)
        self._tier.release((number, _FIELD), changed=True)

    def finish(self) -> None:
        """All layers were put."""
        self._tier.flush()

    def lend(self, number: int) -> torch.Tensor:
        if len(self._lent) == _NUM_LENT:
            oldest, landed = self._lent.popleft()
            landed.synchronize()
            self._tier.release((oldest, _FIELD), changed=False)
        flat = self._tier.load((number, _FIELD))
        self._tier.prefetch(((number + 1) % self._num_layers, _FIELD))
        return flat

    def give_back(self, number: int, landed: Moment) -> None:
        self._lent.append((number, landed))

    def close(self) -> None:
        self._tier.close()


def flash_buffer_bytes(layer_bytes: int) -> int:
    return max(rounded_up(layer_bytes), BLOCK_BYTES)
