"""A tier of memory: named flat arrays that are brought near, used, and put back.

`load` gives an array to work on, `release` says that the work is done and whether it changed anything,
`prefetch` says that it will be needed soon. In DRAM all of that is trivial.

While frozen, a tier keeps what every array held at that moment, for a checkpoint, although training goes on:
`preserve` comes before a change, `read_frozen` reads the old content, `drop_frozen` says it is not needed any more.
"""

import threading
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from openwafer.memoryx.ready_pages import ReadyPages
from openwafer.pages import zeros

Key = tuple[int, str]  # (index of the Unit, field such as "wire" or "m")


class Tier(Protocol):
    """Where flat arrays live. Keys are created once, then loaded and released any number of times."""

    @property
    def reads_in_place(self) -> bool:
        """Whether `read_frozen` needs no memory, however much is asked for."""
        ...

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

    def freeze(self) -> None:
        """Keep the present content of all arrays readable until `thaw`."""
        ...

    def preserve(self, key: Key) -> None:
        """Comes before a change of a loaded array; may wait until memory for the old content is free."""
        ...

    def pick(self, keys: Sequence[Key]) -> Key | None:
        """Which of these arrays is best read next, of those that are frozen and not read yet; None: any."""
        ...

    def read_frozen(self, key: Key, start: int, num_elements: int) -> Tensor:
        """Part of an array as it was when frozen; valid until the next call. For one other thread."""
        ...

    def drop_frozen(self, key: Key) -> None:
        """The frozen content of this array has been read."""
        ...

    def thaw(self) -> None:
        """Forget all frozen content."""
        ...

    def close(self) -> None:
        """Finish what is under way and give back what the tier holds."""
        ...


class DramTier:
    """Arrays that stay in memory. At most `snapshot_bytes` of copies are made while frozen (None: no limit)."""

    reads_in_place = True

    def __init__(self, snapshot_bytes: int | None = None) -> None:
        self._arrays: dict[Key, Tensor] = {}
        self._snapshot_bytes = snapshot_bytes
        self._changed = threading.Condition()
        self._frozen: set[Key] = set()  # content not yet read
        self._copies: dict[Key, Tensor] = {}  # old content of frozen arrays that have changed since
        self._reading: set[Key] = set()  # frozen arrays that are being read where they are
        self._wanted: Key | None = None  # what `preserve` was last called for since `freeze`
        self._is_waiting = False  # whether that call waits
        self._pages = ReadyPages()  # for copies
        self._waits_for_training = False  # since `freeze`: nothing was loaded, so there may be nothing to copy

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())

    def create(self, key: Key, num_elements: int, dtype: torch.dtype) -> None:
        self._arrays[key] = zeros(num_elements, dtype)

    def like(self, key: Key) -> Tensor:
        """Memory of the same kind and length as an array."""
        array = self._arrays[key]
        return zeros(array.numel(), array.dtype)

    def swap(self, key: Key, array: Tensor) -> Tensor:
        """Another array in the place of this one, which is given out."""
        with self._changed:
            old, self._arrays[key] = self._arrays[key], array
        return old

    def prefetch(self, key: Key) -> None:
        pass

    def load(self, key: Key) -> Tensor:
        if self._waits_for_training:
            self._make_pages()
        return self._arrays[key]

    def release(self, key: Key, *, changed: bool) -> None:
        pass

    def freeze(self) -> None:
        with self._changed:
            self._frozen = set(self._arrays)
            self._wanted = None
            self._pages.close()
            # With a limit memory is scarce: only what is copied is taken.
            self._waits_for_training = self._snapshot_bytes is None

    def _make_pages(self) -> None:
        """Training goes on. A checkpoint at its end would need no copies, and must not take their memory."""
        with self._changed:
            if self._waits_for_training:
                self._waits_for_training = False
                # The last Unit's arrays are changed first.
                keys = sorted(self._frozen - self._copies.keys(), key=lambda key: -key[0])
                self._pages = ReadyPages((key, self._arrays[key].numel(), self._arrays[key].dtype) for key in keys)

    def preserve(self, key: Key) -> None:
        with self._changed:
            self._wanted, self._is_waiting = key, True
            self._changed.wait_for(lambda: not self._must_wait(key))
            self._is_waiting = False
            if key in self._frozen and key not in self._copies:
                array, copy = self._arrays[key], self._pages.take(key)
                copy = zeros(array.numel(), array.dtype) if copy is None else copy
                self._copies[key] = copy.copy_(array)

    def _must_wait(self, key: Key) -> bool:
        """While the old content is being read in place, or there is no room for a copy and others will go."""
        if key not in self._frozen or key in self._copies:
            return False
        if key in self._reading:
            return True
        used = sum(copy.nbytes for copy in self._copies.values())
        fits = self._snapshot_bytes is None or used + self._arrays[key].nbytes <= self._snapshot_bytes
        return not fits

    def pick(self, keys: Sequence[Key]) -> Key | None:
        """What training waits for. Else what is farthest from where it is now and not copied yet: next to it, each of
        its changes would wait until the array has been read."""
        with self._changed:
            wanted = self._wanted
            if wanted is None:
                return None
            if self._is_waiting:
                return min(keys, key=lambda key: (key != wanted, abs(key[0] - wanted[0])))
            return max(keys, key=lambda key: (key not in self._copies, abs(key[0] - wanted[0])))

    def read_frozen(self, key: Key, start: int, num_elements: int) -> Tensor:
        with self._changed:
            assert key in self._frozen, key
            if key not in self._copies:
                self._reading.add(key)
            return self._copies.get(key, self._arrays[key])[start : start + num_elements]

    def drop_frozen(self, key: Key) -> None:
        with self._changed:
            self._frozen.discard(key)
            self._pages.drop(key)
            self._copies.pop(key, None)
            self._reading.discard(key)
            self._changed.notify_all()

    def thaw(self) -> None:
        with self._changed:
            self._frozen.clear()
            self._waits_for_training = False
            self._pages.close()
            self._copies.clear()
            self._reading.clear()
            self._changed.notify_all()

    def close(self) -> None:
        self.thaw()
        self._arrays.clear()
