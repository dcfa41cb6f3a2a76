"""As much of Triton as our kernels use, in PyTorch on the CPU, one program after another.

It shows that a kernel's indices and sums are right and that it stays inside its memory. It shows nothing about
whether Triton's compiler takes it, or how fast it is: `bench/decode_gpu.py --check` does that on a GPU.
"""

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_program: list[int] = [0, 0, 0]
_OURS = ("gemv", "rows", "attention")


class Pointer:
    """Places in the memory of a tensor; adding moves them."""

    def __init__(self, memory: torch.Tensor, offsets: torch.Tensor) -> None:
        self.memory = memory
        self.offsets = offsets
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def to(cls, tensor: torch.Tensor) -> "Pointer":
        memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        return cls(memory, torch.tensor(tensor.storage_offset()))

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.memory, self.offsets + other)


class Jit:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int = 4, **constants: Any) -> None:
            given = [Pointer.to(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
            for program in itertools.product(*map(range, grid)):
                _program[: len(program)] = program
                self._function(*given, **constants)

        return launch


def load(pointer: Pointer, mask: Any = None, other: float | None = None) -> torch.Tensor:
    if mask is None:
        return pointer.memory[_checked(pointer, torch.tensor(True))]
    assert other is not None
    offsets, mask = torch.broadcast_tensors(pointer.offsets, torch.as_tensor(mask))
    at = torch.where(mask, offsets, 0)
    found = pointer.memory[_checked(Pointer(pointer.memory, at), mask)]
    return torch.where(mask, found, torch.tensor(other, dtype=found.dtype))


def store(pointer: Pointer, value: torch.Tensor, mask: Any = None) -> None:
    mask = torch.ones_like(pointer.offsets, dtype=torch.bool) if mask is None else mask
    offsets, value, mask = torch.broadcast_tensors(pointer.offsets, value, torch.as_tensor(mask))
    _checked(Pointer(pointer.memory, torch.where(mask, offsets, 0)), mask)
    assert value.dtype == pointer.memory.dtype
    assert len(set(offsets[mask].tolist())) == int(mask.sum()), "two lanes of a program store to the same place"
    pointer.memory[offsets[mask]] = value[mask]


def _checked(pointer: Pointer, mask: torch.Tensor) -> torch.Tensor:
    inside = (pointer.offsets >= 0) & (pointer.offsets < len(pointer.memory))
    assert bool((inside | ~mask).all()), "a kernel left its memory"
    return pointer.offsets


def arange(start: int, stop: int) -> torch.Tensor:
    assert start == 0
    assert stop & (stop - 1) == 0, "Triton's ranges are powers of two"
    return torch.arange(stop, dtype=torch.int32)


def dot(a: torch.Tensor, b: torch.Tensor, input_precision: str = "tf32") -> torch.Tensor:
    assert a.dtype == b.dtype
    assert min(*a.shape, b.shape[1]) >= 16, "tl.dot takes no side under 16"
    assert input_precision == "ieee"
    return a.float() @ b.float()


def _both(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))


def _language() -> ModuleType:
    language = ModuleType("triton.language")
    language.__dict__.update(
        constexpr=object,
        float32=torch.float32,
        int64=torch.int64,
        program_id=lambda axis: torch.tensor(_program[axis], dtype=torch.int32),
        arange=arange,
        range=lambda start, stop, step, num_stages=1: range(start, stop, step),
        zeros=lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype: torch.full(shape, value, dtype=dtype),
        cdiv=lambda a, b: -(-a // b),
        load=load,
        store=store,
        dot=dot,
        trans=torch.t,
        where=lambda mask, a, b: torch.where(mask, torch.as_tensor(a), torch.as_tensor(b)),
        minimum=_both(torch.minimum),
        maximum=_both(torch.maximum),
        sum=lambda x, axis: x.sum(axis),
        max=lambda x, axis: x.amax(axis),
        exp=torch.exp,
        sqrt=torch.sqrt,
        erf=torch.erf,
    )
    return language


@contextmanager
def emulated() -> Iterator[None]:
    """Our kernels on this emulator, whether Triton is installed or not."""
    import openwafer.serve.gpu as package

    names = ["triton", "triton.language", *(f"{package.__name__}.{name}" for name in _OURS)]
    before = {name: sys.modules.pop(name, None) for name in names}
    triton = ModuleType("triton")
    language = _language()
    triton.__dict__.update(jit=Jit, language=language)
    sys.modules |= {"triton": triton, "triton.language": language}
    try:
        for name in _OURS:
            importlib.import_module(f"{package.__name__}.{name}")
        # PyTorch would take it for the real one.
        del sys.modules["triton"], sys.modules["triton.language"]
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
        for name in _OURS:
            if hasattr(package, name):
                delattr(package, name)
