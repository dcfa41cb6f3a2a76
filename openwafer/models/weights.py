"""Weights: named tensors from any file, put into a module that was built on the meta device."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from openwafer.errors import UserError

Wanted = Callable[[str], bool]  # by the name in our module


def everything(name: str) -> bool:
    """Every weight is wanted."""
    return True


@dataclass(frozen=True)
class Matched:
    """A tensor that has its place in a module: all names of that one parameter, the first being the main one."""

    names: tuple[str, ...]
    tensor: torch.Tensor


def assign(
    module: nn.Module,
    tensors: Iterable[tuple[str, torch.Tensor]],
    source: str,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Make `tensors` the parameters of `module` and return it; `source` names the file or folder in errors.

    Tensors are taken one at a time and not copied unless `dtype` (default: each tensor's own) asks for it, so
    a lazy iterable keeps memory bounded.
    """
    for matched in match(module, tensors, source):
        old = module.get_parameter(matched.names[0])
        new = nn.Parameter(matched.tensor if dtype is None else matched.tensor.to(dtype), old.requires_grad)
        for alias in matched.names:
            owner, _, leaf = alias.rpartition(".")
            setattr(module.get_submodule(owner), leaf, new)
    _fill_buffers(module)
    return module


def match(
    module: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]], source: str, wanted: Wanted = everything
) -> Iterator[Matched]:
    """Each parameter of `module` with its tensor, checked, in the order the tensors come.

    Names that share one parameter (a tied head) need one tensor; if both are given they must be equal. At the
    end none that is wanted may be missing.
    """
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    targets = {name: parameter for parameter, names in names_of.items() for name in names}
    shared: dict[nn.Parameter, tuple[str, torch.Tensor]] = {}  # kept to be compared with their twins
    done: set[nn.Parameter] = set()
    for name, tensor in tensors:
        target = targets.get(name)
        if target is None:
            raise UserError(f"{source}: tensor {name!r} has no place in this model (wrong configuration?)")
        _check(name, tensor, target, source)
        if target in shared:
            _check_same(name, tensor, *shared[target], source)
        if target in done:
            continue
        done.add(target)
        if len(names_of[target]) > 1:
            shared[target] = name, tensor
        yield Matched(tuple(names_of[target]), tensor)
    missing = [n[0] for parameter, n in names_of.items() if parameter not in done and any(map(wanted, n))]
    if missing:
        raise UserError(
            f"{source}: {len(missing)} of {len(names_of)} tensors are missing: {', '.join(missing[:5])}"
            f"{', ...' if len(missing) > 5 else ''}"
        )


def _check(name: str, tensor: torch.Tensor, target: torch.Tensor, source: str) -> None:
    if tensor.shape != target.shape:
        raise UserError(
            f"{source}: tensor {name!r} has shape {list(tensor.shape)}, the model needs {list(target.shape)}"
        )
    if not tensor.is_floating_point():
        raise UserError(
            f"{source}: tensor {name!r} holds {str(tensor.dtype).removeprefix('torch.')}, "
            "not floating point numbers: quantised weights must be dequantised first"
        )


def _check_same(name: str, tensor: torch.Tensor, first_name: str, first: torch.Tensor, source: str) -> None:
    if not torch.equal(tensor, first):
        raise UserError(
            f"{source}: the model shares one weight between {first_name!r} and {name!r}, but the two given "
            "differ: set tie_word_embeddings to false, or give one"
        )


def _fill_buffers(module: nn.Module) -> None:
    """Give the computed buffers (rotary frequencies), which no file holds, their values."""
    for child in module.modules():
        reset = getattr(child, "reset_buffers", None)
        if callable(reset):
            reset()
