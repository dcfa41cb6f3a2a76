"""Models without weights: build a module while nothing is allocated, and make any one weight later.

Inside `deferred()` tensors are fake and every operation on them is taped. The initial value of a weight
is made by replaying just the operations that lead to it, under a seed keyed by its name: the model's own
initialisation, one weight at a time, independent of how the model is cut or where it goes.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as module_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from openwafer.errors import UserError
from openwafer.graph.randomness import seeded

_TAPE = "_openwafer_tape"
_FILLS = {
    torch.ops.aten.normal_.default,
    torch.ops.aten.uniform_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.zero_.default,
}
_build = threading.Lock()


@dataclass(frozen=True)
class _View:
    """A fake tensor as a window into a taped storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "_View":
        storage = tensor.untyped_storage()._cdata
        return cls(storage, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype)

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)  # pyright: ignore


@dataclass(frozen=True, eq=False)
class _Step:
    """One taped operation; tensors are views, and `writes` are the storages it creates or changes."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[_View | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]


@dataclass(eq=False)
class Recipe:
    """The tape of one `deferred()` block: how each of its tensors came to be."""

    steps: list[_Step] = field(default_factory=list)
    writers: dict[int, list[int]] = field(default_factory=dict)  # storage → indices of the steps that write it
    alive: list[Tensor] = field(default_factory=list)  # keeps the identity of storages

    def add(self, step: _Step, results: list[Tensor]) -> None:
        for storage in step.writes:
            self.writers.setdefault(storage, []).append(len(self.steps))
        self.steps.append(step)
        self.alive += results

    def make(self, tensor: Tensor) -> Tensor:
        """The real value of a fake tensor of this block, drawn from the current random state."""
        target = _View.of(tensor)
        storages: dict[int, torch.UntypedStorage] = {}
        for index in sorted(self._needed(target.storage)):
            _replay(self.steps[index], storages)
        if target.storage not in storages:  # made by an operation that tapes nothing: uninitialised memory
            raise UserError(f"a tensor of shape {list(target.size)} was not made inside deferred()")
        return target.on(storages[target.storage]).clone()

    def _needed(self, storage: int) -> set[int]:
        """The steps that a storage's final content depends on."""
        needed: set[int] = set()
        waiting = [(storage, len(self.steps))]
        while waiting:
            storage, before = waiting.pop()
            for index in self.writers.get(storage, []):
                if index < before and index not in needed:
                    needed.add(index)
                    waiting += [(read, index) for read in self.steps[index].reads]
        return needed


class _Taper(TorchDispatchMode):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and _is_fake(args[0]):
            # `.item()` while building, for instance on a list of rates: the value is known, so make it.
            return self.recipe.make(args[0]).item()
        # Filling changes neither shape nor type: only taped, not run (1 ms a call on fake tensors otherwise).
        result = args[0] if func in _FILLS and _is_fake(args[0]) else func(*args, **kwargs)
        self._tape(func, args, kwargs, result)
        return result

    def _tape(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        results = [leaf for leaf in pytree.tree_leaves(result) if _is_fake(leaf)]
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {t.untyped_storage()._cdata for t in given if _is_fake(t)}
        made = {t.untyped_storage()._cdata for t in results} - known
        changed = _changed_storages(func, args, kwargs)
        if made or changed:
            taped_args, taped_kwargs = pytree.tree_map(_taped, (args, kwargs))
            views = tuple(_taped(leaf) if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(result))
            step = _Step(func, taped_args, taped_kwargs, views, frozenset(known), frozenset(made | changed))
            self.recipe.add(step, results)


@contextlib.contextmanager
def deferred() -> Iterator[Recipe]:
    """Modules built inside have fake tensors that know how to be made; nothing is allocated."""
    recipe = Recipe()

    def remember(module: nn.Module, name: str, tensor: Any) -> None:
        if _is_fake(tensor):
            setattr(tensor, _TAPE, recipe)

    with _build:  # the registration hooks are global to torch
        hooks = [
            module_hooks.register_module_parameter_registration_hook(remember),
            module_hooks.register_module_buffer_registration_hook(remember),
        ]
        try:
            # Fake tensors rather than meta ones: models and torch.nn.init skip initialisation on meta.
            with FakeTensorMode(allow_non_fake_inputs=True), _Taper(recipe):
                yield recipe
        finally:
            for hook in hooks:
                hook.remove()


def initialise(module: nn.Module, names: Iterable[str], seed: int) -> Iterator[tuple[str, Tensor]]:
    """The initial values of the named weights and buffers, one at a time, on the CPU.

    A tensor that has a value (the module was built or loaded in the ordinary way) is given as it is; a deferred
    one is made by its recipe under the key (seed, name).
    """
    for name in names:
        path, _, leaf = name.rpartition(".")
        tensor = getattr(module.get_submodule(path), leaf)
        recipe = getattr(tensor, _TAPE, None)
        if recipe is None and (tensor.is_meta or _is_fake(tensor)):
            raise UserError(f"{name!r} has no value and no recipe: build the model inside openwafer.deferred()")
        if recipe is None:
            yield name, tensor.detach().cpu()
            continue
        with seeded(seed, name), torch.no_grad():
            yield name, recipe.make(tensor)


def _taped(leaf: Any) -> Any:
    return _View.of(leaf) if _is_fake(leaf) else leaf


def _is_fake(leaf: Any) -> bool:
    return isinstance(leaf, FakeTensor)


def _changed_storages(func: Any, args: Any, kwargs: Any) -> set[int]:
    """Storages of fake tensors that the operation writes in place."""
    schema = func._schema
    if not schema.is_mutable:
        return set()
    values = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    written = [values.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return {t.untyped_storage()._cdata for t in pytree.tree_leaves(written) if _is_fake(t)}


def _replay(step: _Step, storages: dict[int, torch.UntypedStorage]) -> None:
    args, kwargs = pytree.tree_map_only(_View, lambda view: view.on(storages[view.storage]), (step.args, step.kwargs))
    result = step.func(*args, **kwargs)
    for view, leaf in zip(step.results, pytree.tree_leaves(result), strict=True):
        if isinstance(view, _View) and view.storage not in storages:
            storages[view.storage] = leaf.untyped_storage()
