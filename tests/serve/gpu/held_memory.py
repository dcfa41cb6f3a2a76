"""The memory of tensors made inside a `with`, as it is held and given back; for what is planned before it is used."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HeldMemory(TorchDispatchMode):
    """`peak_bytes`: the most at one time. What a kernel holds inside itself is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._held: dict[int, int] = {}
        self._before: set[int] = set()  # views of these take no more

    def ignore(self, *tensors: torch.Tensor) -> "HeldMemory":
        self._before |= {tensor.untyped_storage()._cdata for tensor in tensors}
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._held and key not in self._before:
            self._held[key] = storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, sum(self._held.values()))
            weakref.finalize(storage, self._held.pop, key, None)
