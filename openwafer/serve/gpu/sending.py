"""Small arrays on their way to the device, without waiting for what is queued there."""

import numpy as np
import torch


def sent(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of `array` on the device, queued behind the work that is queued now."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    # From memory that is not pinned, PyTorch would wait for the copy, and so for the step before it.
    return tensor.pin_memory().to(device, non_blocking=True)
