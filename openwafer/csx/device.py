"""What a worker process needs of the device it computes on. `gpu.py` is the one that there is; tests have another.

Work on a device goes on by itself: copies in, computation and copies out, each in its own order. A `Moment` is a point
in one of the three, for which another of them, or the host, can wait.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from openwafer.csx.footprint import Footprint
from openwafer.graph import Graph


class Moment(Protocol):
    """A point in the work of a device."""

    def synchronize(self) -> None:
        """Until it is reached."""
        ...


class Device(Protocol):
    """One device, seen from one process."""

    where: torch.device

    def memory(self) -> tuple[int, int]:
        """(free, all) bytes, whoever uses the rest."""
        ...

    def allow(self, num_bytes: int) -> None:
        """From here on this process cannot have more."""
        ...

    def footprint(
        self, graph: Graph, num_micro_batches: int, num_slots: int, *, recompute: bool, num_parts: int
    ) -> Footprint:
        """What a step on these micro-batches takes; see `footprint.measure`."""
        ...

    def lock(self, memory: Tensor) -> None:
        """Copies from and to this host memory run at full speed and by themselves from now on. Once is enough."""
        ...

    def host_memory(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host that copies run from and to at full speed."""
        ...

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor: ...

    def now(self) -> Moment:
        """When what was computed so far is done."""
        ...

    def copy_in(self, target: Tensor, source: Tensor, after: Moment) -> Moment:
        """From the host, once `after` is reached; gives when it is done."""
        ...

    def use(self, moment: Moment) -> None:
        """What is computed from here on comes after `moment`."""
        ...

    def copy_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Moment:
        """To the host, (target, source), once what was computed so far is done; gives when it is done. The sources may
        be dropped at once."""
        ...
