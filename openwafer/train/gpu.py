"""A GPU as the one worker of a run, in the process of the store. Several workers are in `gpu_workers.py`."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from openwafer.csx.cuda import NUM_SLOTS, CudaLink
from openwafer.csx.footprint import Footprint, measure
from openwafer.errors import UserError
from openwafer.graph import Graph
from openwafer.memoryx.config import MemoryConfig, OptimizerConfig
from openwafer.memoryx.pinned import PinnedTier, pinned
from openwafer.memoryx.placement import Placement, open_tiers
from openwafer.memoryx.speculation import can_speculate, spare_bytes
from openwafer.memoryx.store import Store
from openwafer.memoryx.tier import Key, Tier
from openwafer.train.device_budget import DeviceBudget, share_of_device
from openwafer.train.guard import Guard

_STATE_BYTES = 12  # of host memory per parameter
_GRADIENT_BYTES = 4  # per parameter, of gradients that wait for the norm


class GpuWorker:
    """One GPU of this machine, in this process."""

    def __init__(self, device_memory: int | None, optimizer: OptimizerConfig, *, recompute: bool = True) -> None:
        if not torch.cuda.is_available():
            raise UserError("device cuda: PyTorch sees no GPU here; install its CUDA build, or use --device cpu")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.optimizer = optimizer
        self.recompute = recompute
        self._link: CudaLink | None = None
        self._memory = MemoryConfig()
        torch.zeros(1, device=self.device)  # CUDA itself takes some memory, which counts
        free, self._total = torch.cuda.mem_get_info(self.device)
        free += torch.cuda.memory_reserved(self.device)
        self.budget = DeviceBudget(*share_of_device(device_memory, free, self._total), self._measure)

    @property
    def footprint(self) -> Footprint | None:
        return self.budget.footprint

    def fit(self, make_graph: Callable[[int], Graph], batch_size: int, micro_batch_size: int | None) -> int:
        """See `DeviceBudget.fit`."""
        return self.budget.fit(make_graph, batch_size, micro_batch_size)

    def check(self, graph: Graph, num_micro_batches: int) -> None:
        """An error if a step takes more than is allowed."""
        self.budget.check(graph, num_micro_batches)

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
        torch.cuda.set_per_process_memory_fraction(min(1.0, self.budget.limit / self._total), self.device)
        can_veto = Guard(self.optimizer).can_veto
        self._link = CudaLink(store, self.device, can_veto=can_veto, speculates=can_veto and self._speculates(store))
        return self._link, None

    def _speculates(self, store: Store) -> bool:
        way, needed = self._memory.clipping, spare_bytes(store)
        if way == "speculative" and not can_speculate(store):
            raise UserError(
                "clipping: speculative is for AdamW with fp32 state, all of it in DRAM, and without max_grad_value: "
                "use clipping: auto or deferred"
            )
        if way != "auto":
            return way == "speculative"
        # The state is not filled in yet: its pages are still to be taken.
        coming = store.graph.num_parameters * (_STATE_BYTES + _GRADIENT_BYTES)
        return self._memory.dram is None and _available_bytes() > needed + coming

    def close(self) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0, self.device)
        if self._link is not None:
            self._link.close()
            self._link = None


def _available_bytes() -> int:
    """Host memory that can still be had, with what the page cache would give up."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) << 10
