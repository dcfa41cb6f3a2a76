"""A tier of memory: named flat arrays that are brought near, used, and put back.

`load` gives an array to work on, `release` says that the work is done and whether it changed anything,
`prefetch` says that it will be needed soon. In DRAM all of that is trivial.
"""

from typing import Protocol

import torch
from torch import Tensor

Key = tuple[int, str]  # (index of the Unit, field such as "wire" or "m")


class Tier(Protocol):
    """Where flat arrays live. Keys are created once, then loaded and released any number of times."""

    def create(self, key: Key, num_elements: int, dtype: torch.dtype) -> None:
        """A new array of zeros."""
        ...

    def prefetch(self, key: Key) -> None:
        """A hint: `load(key)` comes soon."""
        ...

    def load(self, key: Key) -> Tensor:
        """The array, to be read and changed until `release`."""
        ...

    def release(self, key: Key, *, changed: bool) -> None:
        """Ends a `load`; a changed array is kept."""
        ...

    def close(self) -> None:
        """Finish what is under way and give back what the tier holds."""
        ...


class DramTier:
    """Arrays that stay in memory."""

    def __init__(self) -> None:
        self._arrays: dict[Key, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(array.numel() * array.itemsize for array in self._arrays.values())

    def create(self, key: Key, num_elements: int, dtype: torch.dtype) -> None:
        self._arrays[key] = torch.zeros(num_elements, dtype=dtype)

    def prefetch(self, key: Key) -> None:
        pass

    def load(self, key: Key) -> Tensor:
        return self._arrays[key]

    def release(self, key: Key, *, changed: bool) -> None:
        pass

    def close(self) -> None:
        self._arrays.clear()
