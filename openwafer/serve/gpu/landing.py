"""What a launched batch found, on its way to the host."""

from dataclasses import dataclass

import numpy as np
import torch

from openwafer.serve.runner import Drawn


@dataclass(frozen=True, kw_only=True)
class Landing:
    picked: torch.Tensor  # int32 [2, n] on the host: tokens, and the bits of the largest logits
    logits: torch.Tensor  # fp32 [m, vocab] on the host
    arrived: torch.cuda.Event | None  # both are there; None: they are already

    @classmethod
    def begun(cls, picked: torch.Tensor, logits: torch.Tensor) -> "Landing":
        """Copies are queued behind the work that computes these; whatever is queued later may overwrite them."""
        if not picked.is_cuda:
            return cls(picked=picked.clone(), logits=logits.clone(), arrived=None)
        there = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in (picked, logits)]
        for to, tensor in zip(there, (picked, logits), strict=True):
            to.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(picked=there[0], logits=there[1], arrived=arrived)

    def drawn(self) -> Drawn:
        """Waits for it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens, tops = self.picked.numpy()
        return Drawn(tokens=tokens, tops=tops.view(np.float32), logits=self.logits.numpy())
