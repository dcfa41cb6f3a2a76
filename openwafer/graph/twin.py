"""A twin of a module whose tensors are fake: same code and structure, no memory, safe to rewire.

The user's module is never touched: capture hooks and replaced forwards happen on the twin.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from openwafer.errors import UserError


@dataclass(frozen=True, eq=False)
class Twin:
    """The fake module, its fake example inputs, and the names of its tensors by identity."""

    mode: FakeTensorMode
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parameters: dict[int, str]  # id of a fake parameter → its first name; tied weights share one
    buffers: dict[int, str]


def make_twin(module: nn.Module, args: tuple, kwargs: dict[str, Any], dtype: torch.dtype | None) -> Twin:
    """`dtype`, when given, replaces the floating-point type of weights, inputs and those buffers that are saved.

    Buffers that are not saved are constants which the module computes for itself, such as the frequencies of rotary
    embeddings: rounded to bf16, far positions would turn wrongly.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    constants = {
        id(part.get_buffer(name)) for part in module.modules() for name in sorted(part._non_persistent_buffers_set)
    }

    def fake(tensor: Tensor) -> Tensor:
        is_cast = dtype is not None and tensor.is_floating_point() and id(tensor) not in constants
        with mode:
            to = dtype if is_cast else tensor.dtype
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=to, device="cpu")

    # deepcopy takes what the memo already has: every tensor becomes its fake, nothing is allocated.
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        # Without gradients: the captured operations are the same, and autograd need not follow along.
        memo[id(parameter)] = nn.Parameter(fake(parameter), requires_grad=False)
    for buffer in module.buffers():
        memo[id(buffer)] = fake(buffer)
    try:
        twin = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError) as error:
        raise UserError(
            f"{type(module).__name__} cannot be copied ({error}): remove attributes that are locks, files, "
            "handles or results of a computation from the module"
        ) from None
    return Twin(
        mode=mode,
        module=twin,
        args=pytree.tree_map_only(Tensor, fake, args),
        kwargs=pytree.tree_map_only(Tensor, fake, kwargs),
        parameters={id(p): name for name, p in twin.named_parameters()},
        buffers={id(b): name for name, b in twin.named_buffers()},
    )
