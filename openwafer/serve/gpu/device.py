"""What streaming asks of the device that a model runs on. `csx/gpu.py` is the one that there is; tests have another.

Copies in and computation go on by themselves, each in its own order, and know nothing of each other but by moments.
"""

from typing import Protocol

import torch

from openwafer.csx.device import Moment


class Device(Protocol):
    """One device, seen from one process; a part of `csx.device.Device`."""

    where: torch.device

    def allow(self, num_bytes: int) -> None:
        """From here on this process cannot have more."""
        ...

    def host_memory(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host that copies run from at full speed."""
        ...

    def empty(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor: ...

    def now(self) -> Moment:
        """When what was computed so far is done."""
        ...

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, after: Moment) -> Moment:
        """From the host, once `after` is reached; gives when it is done."""
        ...

    def use(self, moment: Moment) -> None:
        """What is computed from here on comes after `moment`."""
        ...
