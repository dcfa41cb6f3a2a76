"""What a Unit's function costs, measured by running its code once on fake tensors."""

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from openwafer.graph.unit import Cost


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(gradient, query, key, value)


# The fused attention of the CPU, which torch's own table does not list.
_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def measure(code: fx.GraphModule, operands: list[Tensor], is_buffer: list[bool], mode: FakeTensorMode) -> Cost:
    """FLOPs of one forward and one backward call, and the bytes that a kept forward holds for backward.

    `operands` are weights, buffers and inputs, in the order `code` takes them; gradients are counted for every
    floating-point weight and input.
    """
    with mode, torch.enable_grad():
        copies = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in operands]
        trained = [t.is_floating_point() and not fixed for t, fixed in zip(copies, is_buffer, strict=True)]
        leaves = [t.requires_grad_() for t, train in zip(copies, trained, strict=True) if train]
        known = {t.untyped_storage()._cdata for t in copies}
        saved: dict[int, int] = {}

        def keep(tensor: Tensor) -> Any:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                saved[storage._cdata] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as forward:
                outputs = code(*copies)
            heads = [o for o in outputs if o.requires_grad]
            with FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as backward:
                if heads:
                    torch.autograd.grad(heads, leaves, [torch.ones_like(o) for o in heads], allow_unused=True)
    return Cost(
        forward_flops=forward.get_total_flops(),
        backward_flops=backward.get_total_flops(),
        saved_bytes=sum(saved.values()),
    )
