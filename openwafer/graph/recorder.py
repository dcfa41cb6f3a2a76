"""One fake run of the model that writes down what every block does, to tell which blocks are the same.

Two calls of blocks that perform the same operations on the same pattern of inputs, weights and intermediates are
the same function. That is decided here from the operations themselves, so a layer index or any other Python
attribute that does not change the computation does not keep two layers apart, and one that does, does.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from openwafer.errors import UserError
from openwafer.graph.twin import Twin

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(eq=False)
class BlockCall:
    """One call of a block in the recorded run."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Any]  # flattened result; tensors are fake
    output_tree: Any
    key: str  # equal keys: the same function
    writes_inputs: tuple[int, ...]  # positions, among the distinct input tensors, changed in place
    is_random: bool

    @property
    def tensors(self) -> list[Tensor]:
        """The distinct input tensors, in order of first appearance."""
        return distinct_tensors((self.args, self.kwargs))


@dataclass(eq=False)
class Recording:
    """What the run showed beyond its block calls."""

    calls: list[BlockCall]
    written_buffers: set[str]  # names of buffers the model updates (running statistics)
    is_random_outside: bool  # operations outside every block draw random numbers


@dataclass(eq=False)
class _Scope:
    path: str
    labels: dict[int, str] = field(default_factory=dict)  # id of a live tensor → what it is inside the scope
    storages: dict[int, str] = field(default_factory=dict)  # storage → label of the block's input behind it
    alive: list[Tensor] = field(default_factory=list)  # keeps ids from being reused
    written: set[str] = field(default_factory=set)
    is_random: bool = False
    digest: Any = field(default_factory=hashlib.sha256)

    def name(self, tensor: Tensor, label: str, *, is_input: bool = False) -> None:
        self.labels[id(tensor)] = label
        self.alive.append(tensor)
        if is_input:
            self.storages.setdefault(tensor.untyped_storage()._cdata, label)


class Recorder(TorchDispatchMode):
    """Sees every operation of the fake run, in the block that performs it."""

    def __init__(self, twin: Twin) -> None:
        super().__init__()
        self.twin = twin
        self.outside = _Scope(path="")
        self.scope = self.outside
        self.written_buffers: set[str] = set()
        self.buffer_storages = {b.untyped_storage()._cdata: name for name, b in twin.module.named_buffers()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._note_effects(func, args, kwargs)
        if self.scope is not self.outside:
            self._note_operation(func, args, kwargs, result)
        return result

    def _note_effects(self, func: Any, args: Any, kwargs: Any) -> None:
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            self.scope.is_random = True
        if func is torch.ops.aten.native_batch_norm.default and args[5]:
            # In training it updates the running statistics, though its schema does not say so.
            self._note_written([args[3], args[4]])
        if not func._schema.is_mutable:
            return
        for argument, value in zip(func._schema.arguments, args, strict=False):
            self._note_write(argument, value)
        by_name = {argument.name: argument for argument in func._schema.arguments}
        for name, value in kwargs.items():
            self._note_write(by_name[name], value)

    def _note_write(self, argument: Any, value: Any) -> None:
        if argument.alias_info is not None and argument.alias_info.is_write:
            self._note_written(value)

    def _note_written(self, value: Any) -> None:
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()._cdata
                if storage in self.scope.storages:
                    self.scope.written.add(self.scope.storages[storage])
                if storage in self.buffer_storages:
                    self.written_buffers.add(self.buffer_storages[storage])

    def _note_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        scope = self.scope
        leaves, tree = pytree.tree_flatten((args, kwargs))
        words = [str(func), str(tree), str(torch.is_grad_enabled())]
        words += [self._label(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
        scope.digest.update("\x1f".join(words).encode() + b"\x1e")
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf) not in scope.labels:
                scope.name(leaf, f"t{len(scope.alive)}")

    def _label(self, tensor: Tensor) -> str:
        label = self.scope.labels.get(id(tensor))
        if label is not None:
            return label
        if not isinstance(tensor, FakeTensor):  # a literal of the code: a plain tensor attribute, torch.tensor(3)
            content = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
            return f"literal {tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(content).hexdigest()}"
        name = self.twin.parameters.get(id(tensor)) or self.twin.buffers.get(id(tensor))
        what = f"the weight {name!r} of another module" if name else "a tensor computed outside it"
        raise UserError(
            f"block {self.scope.path!r} reads {what} that is not one of its arguments: "
            "pass it to the block's forward as an argument"
        )

    @contextlib.contextmanager
    def inside(self, path: str, module: nn.Module, inputs: list[Tensor]) -> Iterator[_Scope]:
        """Operations in this context belong to one call of the block `module`."""
        if self.scope is not self.outside:
            raise UserError(f"block {path!r} is called inside block {self.scope.path!r}: a block calls only its own")
        scope = _Scope(path=path)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            scope.name(tensor, f"w {name} {tuple(tensor.shape)} {tensor.dtype}")
        for position, tensor in enumerate(inputs):
            label = f"in {position} {tuple(tensor.shape)} {tuple(tensor.stride())} {tensor.dtype}"
            scope.name(tensor, label, is_input=True)
        self.scope = scope
        try:
            yield scope
        finally:
            self.scope = self.outside


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation that may draw random numbers does: dropout with probability 0 does not."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "p"):
            value = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return value != 0.0
    return True


def record(twin: Twin, blocks: dict[str, nn.Module]) -> Recording:
    """Run the twin once on its fake inputs, writing down each block call."""
    recorder = Recorder(twin)
    calls: list[BlockCall] = []

    def watched(path: str, module: nn.Module, forward: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            inputs = distinct_tensors((args, kwargs))
            with recorder.inside(path, module, inputs) as scope:
                result = forward(*args, **kwargs)
                calls.append(_finish(scope, path, module, args, kwargs, inputs, result))
            return result

        return call

    with replaced_forwards(blocks, watched), _looks_like_export(), twin.mode, recorder:
        twin.module(*twin.args, **twin.kwargs)
    return Recording(calls, recorder.written_buffers, recorder.outside.is_random)


def _finish(
    scope: _Scope, path: str, module: nn.Module, args: Any, kwargs: Any, inputs: list[Tensor], result: Any
) -> BlockCall:
    leaves, tree = pytree.tree_flatten((args, kwargs))
    outputs, output_tree = pytree.tree_flatten(result)
    for what, values in (("receives", leaves), ("returns", outputs)):
        for value in values:
            if not isinstance(value, (Tensor, *_PLAIN)):
                raise UserError(
                    f"block {path!r} {what} a {type(value).__name__}: blocks exchange tensors, numbers, text and "
                    "tuples, lists or dicts of them (for a cache, turn it off while capturing)"
                )
    words = [str(tree), str(output_tree), str(module.training), type(module).__qualname__]
    words += [scope.labels[id(v)] if isinstance(v, Tensor) else repr(v) for v in leaves]
    words += [scope.labels.get(id(v), "?") if isinstance(v, Tensor) else repr(v) for v in outputs]
    scope.digest.update("\x1f".join(words).encode())
    written = [k for k, tensor in enumerate(inputs) if scope.labels[id(tensor)] in scope.written]
    return BlockCall(
        path=path,
        module=module,
        args=args,
        kwargs=kwargs,
        outputs=outputs,
        output_tree=output_tree,
        key=scope.digest.hexdigest(),
        writes_inputs=tuple(written),
        is_random=scope.is_random,
    )


@contextlib.contextmanager
def _looks_like_export() -> Iterator[None]:
    """Models may ask `torch.compiler.is_exporting()` and take another path: this run must take that path too."""
    flags = [name for name in ("_is_compiling_flag", "_is_exporting_flag") if hasattr(torch.compiler, name)]
    before = {name: getattr(torch.compiler, name) for name in flags}
    for name in flags:
        setattr(torch.compiler, name, True)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(torch.compiler, name, value)


@contextlib.contextmanager
def replaced_forwards(blocks: dict[str, nn.Module], replace: Any) -> Iterator[None]:
    """Each block's forward becomes `replace(path, module, forward)` until the context ends."""
    before = {path: module.__dict__.get("forward") for path, module in blocks.items()}
    for path, module in blocks.items():
        module.forward = replace(path, module, module.forward)
    try:
        yield
    finally:
        for path, module in blocks.items():
            del module.__dict__["forward"]
            if before[path] is not None:
                module.__dict__["forward"] = before[path]


def distinct_tensors(tree: Any) -> list[Tensor]:
    """The tensors of a pytree, each object once, in order."""
    return list({id(leaf): leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)}.values())
