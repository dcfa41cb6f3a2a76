"""Worker processes on the GPUs of this host: worker i on GPU i modulo their number, so that several may share one.

The store stays in this process, in memory that all of them map and copy from.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from openwafer.csx.device import Device
from openwafer.csx.footprint import Footprint
from openwafer.csx.gpu import GpuOfWorker
from openwafer.errors import UserError
from openwafer.graph import Graph
from openwafer.memoryx.store import Store
from openwafer.swarmx.config import SwarmConfig
from openwafer.swarmx.share import share_of
from openwafer.swarmx.tree import nodes_of
from openwafer.train.device_budget import DeviceBudget, share_of_device
from openwafer.train.local_swarm import DeviceQuestion, FootprintQuestion, GraphParcel
from openwafer.train.swarm import Swarm, SwarmLink
from openwafer.train.workers import LocalWorkers


class GpuWorkers(LocalWorkers):
    """`num_csx` processes on `num_gpus` GPUs. `device_memory` is of each GPU; its workers have equal parts of it."""

    def __init__(
        self,
        num_csx: int,
        config: SwarmConfig,
        device_memory: int | None,
        *,
        recompute: bool = True,
        num_gpus: int | None = None,
        device: Callable[[int], Device] | None = None,
    ) -> None:
        """`num_gpus` and `device` are found out if they are not given."""
        self.num_gpus = num_gpus if num_gpus is not None else torch.cuda.device_count()
        if self.num_gpus == 0:
            raise UserError("device cuda: PyTorch sees no GPU here; install its CUDA build, or use --device cpu")
        self.recompute = recompute
        # One thread unless told otherwise: they only launch kernels, and the store needs the cores for its updates.
        super().__init__(num_csx, config, threads=config.csx_threads or 1, device=device or GpuOfWorker(self.num_gpus))
        try:
            self.budget = DeviceBudget(*self._share(device_memory), self._measure)
        except BaseException:
            self.pool.close()
            raise

    @property
    def footprint(self) -> Footprint | None:
        return self.budget.footprint

    def fit(self, make_graph: Callable[[int], Graph], batch_size: int, micro_batch_size: int | None) -> int:
        """See `DeviceBudget.fit`."""
        return self.budget.fit(make_graph, batch_size, micro_batch_size, self.num_csx)

    def check(self, graph: Graph, num_micro_batches: int) -> None:
        """An error if a step takes more than is allowed."""
        self.budget.check(graph, num_micro_batches)

    def attach(self, graph: Graph, store: Store, seed: int, options: Mapping[str, Any]) -> tuple[SwarmLink, Swarm]:
        return self._attach(graph, store, seed, options, device_bytes=self.budget.limit)

    def _share(self, device_memory: int | None) -> tuple[int, int]:
        """(limit, context) of the worker that has least."""
        for csx in range(self.num_csx):  # CUDA takes memory for each process: all of them first
            self.pool.ask(csx, DeviceQuestion())
        shares = []
        for gpu, num_workers in Counter(csx % self.num_gpus for csx in range(self.num_csx)).items():
            found = self.pool.ask(gpu, DeviceQuestion())  # the first worker of GPU i is worker i
            shares.append(share_of_device(device_memory, found["free_bytes"], found["total_bytes"], num_workers))
        return min(shares)

    def _measure(self, graph: Graph, num_micro_batches: int) -> Footprint:
        """Of the worker that takes most."""
        shares = [share_of(num_micro_batches, self.num_csx, csx) for csx in range(self.num_csx)]
        question = FootprintQuestion(
            GraphParcel(graph),
            num_micro_batches=max(map(len, shares)),
            num_parts=max(len(nodes_of(num_micro_batches, share)) for share in shares),
            recompute=self.recompute,
        )
        return Footprint(**self.pool.ask(0, question))
