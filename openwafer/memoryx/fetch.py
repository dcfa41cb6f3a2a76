"""Small results from a GPU while other threads feed it."""

import torch
from torch import Tensor


def fetched(tensor: Tensor) -> Tensor:
    """The tensor on the host, once it is computed.

    A plain copy to pageable memory holds the CUDA driver until the GPU gets there, and every other thread that
    asks it for anything waits too: the optimizer idled 118 of 680 ms per step that way. A copy to pinned memory is
    queued, and waiting for an event leaves the driver free.
    """
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event(blocking=True)
    arrived.record()
    arrived.synchronize()
    return host
