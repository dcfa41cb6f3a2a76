"""The GPU of a worker under torchrun. Stores need none."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from openwafer.csx.cuda import NUM_SLOTS
from openwafer.csx.device import Device
from openwafer.csx.footprint import Footprint
from openwafer.csx.gpu import Gpu
from openwafer.errors import UserError
from openwafer.graph import Graph
from openwafer.swarmx.share import share_of
from openwafer.swarmx.torchrun import Launched
from openwafer.swarmx.tree import nodes_of
from openwafer.train.device_budget import DeviceBudget, share_of_device
from openwafer.train.streamed import on_device


@dataclass(frozen=True)
class Place:
    """This worker among those of its host, which share its GPUs in turn."""

    index: int
    num_workers: int

    @classmethod
    def of_this_rank(cls, num_memoryx: int, environment: Mapping[str, str]) -> "Place | None":
        """From what torchrun sets; None for a store."""
        launched = Launched.read(environment, "this rank's GPU is unknown (device cuda)")
        local, size = launched.local_rank, launched.local_size
        num_stores = max(0, min(size, num_memoryx - launched.first_of_host))  # they are the first ranks, here too
        return None if local < num_stores else cls(local - num_stores, size - num_stores)

    def gpu(self, num_gpus: int) -> int:
        return self.index % num_gpus

    def num_sharing(self, num_gpus: int) -> int:
        """Workers on the same GPU, this one too."""
        return len(range(self.gpu(num_gpus), self.num_workers, num_gpus))


class RankDevice:
    """The device and the part of its memory that this rank may use."""

    def __init__(self, device: Device, device_memory: int | None, num_sharing: int) -> None:
        self.device = device
        self.where = device.where
        self.host_memory: Callable[[int, torch.dtype], Tensor] = device.host_memory
        self._device_memory = device_memory
        self._num_sharing = num_sharing

    @classmethod
    def of_this_rank(cls, num_memoryx: int, device_memory: int | None) -> "RankDevice | None":
        """None for a store. UserError where there is no GPU."""
        place = Place.of_this_rank(num_memoryx, os.environ)
        if place is None:
            return None
        num_gpus = torch.cuda.device_count()
        if num_gpus == 0:
            raise UserError("device cuda: PyTorch sees no GPU here; install its CUDA build, or use --device cpu")
        return cls(Gpu(place.gpu(num_gpus)), device_memory, place.num_sharing(num_gpus))

    def reserve(self, graph: Graph, num_micro_batches: int, num_csx: int, *, recompute: bool) -> None:
        """From here on no more than the budget can be had; UserError if a step needs more.

        All ranks that share the GPU must have opened it before: what CUDA takes for each of them counts.
        """
        shares = [share_of(num_micro_batches, num_csx, csx) for csx in range(num_csx)]

        def measure(graph: Graph, total: int) -> Footprint:
            """Of the worker that takes most."""
            return self.device.footprint(
                on_device(graph, self.where),
                max(map(len, shares)),
                NUM_SLOTS,
                recompute=recompute,
                num_parts=max(len(nodes_of(total, share)) for share in shares),
            )

        limit, context = share_of_device(self._device_memory, *self.device.memory(), self._num_sharing)
        DeviceBudget(limit, context, measure).check(graph, num_micro_batches)
        self.device.allow(limit)
