"""Memory for copies that threads have touched before it is needed.

The first touch of a page takes as long as copying it and longer, as the system has to clear it. A checkpoint while
training goes on needs copies of nearly all arrays within one step: without this, that step waits for the pages.
"""

import ctypes
import os
from collections.abc import Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from openwafer.pages import zeros

NUM_THREADS = min(4, (os.cpu_count() or 1) // 4)  # where cores are few, training needs them itself


class ReadyPages:
    """An array for each of these keys, made ready in the given order."""

    def __init__(self, wanted: Iterable[tuple[Hashable, int, torch.dtype]] = ()) -> None:
        self._threads = ThreadPoolExecutor(max(1, NUM_THREADS), thread_name_prefix="pages")
        self._futures: dict[Hashable, Future[Tensor]] = {}
        for key, num_elements, dtype in wanted if NUM_THREADS else ():
            self._futures[key] = self._threads.submit(_touched, num_elements, dtype)

    def take(self, key: Hashable) -> Tensor | None:
        """Zeros; None if nobody has begun to make them ready."""
        future = self._futures.pop(key, None)
        return None if future is None or future.cancel() else future.result()

    def drop(self, key: Hashable) -> None:
        """They are not needed."""
        if future := self._futures.pop(key, None):
            future.cancel()

    def close(self) -> None:
        self._futures.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _touched(num_elements: int, dtype: torch.dtype) -> Tensor:
    array = zeros(num_elements, dtype)
    ctypes.memset(array.data_ptr(), 0, array.nbytes)  # other threads run meanwhile
    return array
