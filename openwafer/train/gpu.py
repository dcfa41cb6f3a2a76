"""A GPU as the worker of a run: its memory limit, the micro-batch that fits, and the link to the store."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from openwafer.csx.cuda import NUM_SLOTS, CudaLink
from openwafer.csx.footprint import Footprint, measure
from openwafer.errors import UserError
from openwafer.graph import Graph
from openwafer.memoryx.config import MemoryConfig, OptimizerConfig
from openwafer.memoryx.pinned import PinnedTier, pinned
from openwafer.memoryx.placement import Placement, open_tiers, shown
from openwafer.memoryx.speculation import spare_bytes
from openwafer.memoryx.store import Store
from openwafer.memoryx.tier import Key, Tier
from openwafer.train.guard import Guard

_FREE_SHARE = 0.92  # of the free memory, when no limit is given


class GpuWorker:
    """One GPU of this machine, in this process."""

    def __init__(self, device_memory: int | None, optimizer: OptimizerConfig, *, recompute: bool = True) -> None:
        if not torch.cuda.is_available():
            raise UserError("device cuda: PyTorch sees no GPU here; install its CUDA build, or use --device cpu")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.optimizer = optimizer
        self.recompute = recompute
        self.footprint: Footprint | None = None
        self._link: CudaLink | None = None
        self._memory = MemoryConfig()
        torch.zeros(1, device=self.device)  # CUDA itself takes some memory, which counts
        free, self._total = torch.cuda.mem_get_info(self.device)
        free += torch.cuda.memory_reserved(self.device)
        self._context = self._total - free
        self.limit = int(_FREE_SHARE * free) if device_memory is None else device_memory - self._context
        if device_memory is not None and self.limit > free:
            raise UserError(
                f"device_memory {shown(device_memory)}: the GPU has {shown(self._total)}, and {shown(free)} are free; "
                f"give at most {shown(free + self._context)}"
            )

    def fit(self, make_graph: Callable[[int], Graph], batch_size: int, micro_batch_size: int | None) -> int:
        """The micro-batch to use: the given one if it fits, else an error; or the largest that fits."""
        sizes = [size for size in range(1, batch_size + 1) if batch_size % size == 0]
        if micro_batch_size is not None:
            sizes = [micro_batch_size]
        least = self._measure(make_graph(sizes[0]), batch_size // sizes[0])
        tried = [least]
        for size in reversed(sizes[1:]):
            if _guess(least, size) > self.limit:
                continue
            tried.append(self._measure(make_graph(size), batch_size // size))
            if tried[-1].total_bytes <= self.limit:
                self.footprint = tried[-1]
                return size
        # The smallest micro-batches need least inside a Unit, but most for sums of gradients.
        self._allow(min(tried, key=lambda footprint: footprint.total_bytes))
        self.footprint = least
        return sizes[0]

    def check(self, graph: Graph, num_micro_batches: int) -> None:
        """An error if a step takes more than is allowed."""
        self.footprint = self._measure(graph, num_micro_batches)
        self._allow(self.footprint)

    def _allow(self, footprint: Footprint) -> None:
        if footprint.total_bytes > self.limit:
            raise UserError(
                f"a step needs {shown(footprint.total_bytes + self._context)} of device memory, "
                f"{shown(self.limit + self._context)} are allowed ({footprint}; CUDA itself {shown(self._context)}): "
                "give a larger --device_memory, a smaller --micro_batch_size or --batch_size, or a shorter context"
            )

    def _measure(self, graph: Graph, num_micro_batches: int) -> Footprint:
        return measure(graph, num_micro_batches, NUM_SLOTS, self.device, recompute=self.recompute)

    def open_tiers(self, placement: Placement, config: MemoryConfig) -> dict[Key, Tier]:
        """Tiers that the GPU copies from and to at full speed."""
        self._memory = config
        return open_tiers(
            placement,
            config,
            make_dram=PinnedTier,
            allocate=lambda num_bytes: pinned(num_bytes, torch.uint8),
        )

    def attach(self, graph: Graph, store: Store, seed: int, options: Mapping[str, Any]) -> tuple[CudaLink, None]:
        """The link; this process computes."""
        # From here on an allocation beyond the limit fails, whoever makes it.
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, self.limit / self._total), self.device)
        can_veto = Guard(self.optimizer).can_veto
        self._link = CudaLink(store, self.device, can_veto=can_veto, speculates=can_veto and self._speculates(store))
        return self._link, None

    def _speculates(self, store: Store) -> bool:
        way, needed = self._memory.clipping, spare_bytes(store)
        if way != "auto":
            return way == "speculative"
        return self._memory.dram is None and _available_bytes() > needed + store.graph.num_parameters * 4

    def close(self) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0, self.device)
        if self._link is not None:
            self._link.close()
            self._link = None


def _guess(least: Footprint, size: int) -> int:
    """What micro-batches of `size` would need, from what those of one sample do: a little less than they will."""
    return least.weight_bytes + least.activation_bytes + int(0.5 * size * least.working_bytes)


def _available_bytes() -> int:
    """Host memory that can still be had."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
