"""The workers of a run, as the job needs them: memory for weights that reaches them, and a link to them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from openwafer.csx.device import Device
from openwafer.graph import Graph
from openwafer.memoryx.config import MemoryConfig
from openwafer.memoryx.placement import Placement, open_tiers
from openwafer.memoryx.store import Store
from openwafer.memoryx.tier import Key, Tier
from openwafer.swarmx.config import SwarmConfig
from openwafer.swarmx.shared_memory import SharedTier
from openwafer.train.local_swarm import CsxPool, LocalSwarm, PoolConfig
from openwafer.train.swarm import Swarm, SwarmLink


class LocalWorkers:
    """`num_csx` processes. They start at once and load PyTorch while the model is captured."""

    def __init__(
        self,
        num_csx: int,
        config: SwarmConfig,
        *,
        threads: int | None = None,
        device: Callable[[int], Device] | None = None,
    ) -> None:
        """`device` makes that of each worker, where they do not compute in the host's memory."""
        self.num_csx = num_csx
        self.threads = threads or config.csx_threads or torch.get_num_threads()
        pool = PoolConfig(num_csx=num_csx, threads=self.threads, timeout_s=config.lost_after, device=device)
        self.pool = CsxPool(pool)
        self._swarm: LocalSwarm | None = None
        self._link: SwarmLink | None = None

    def open_tiers(self, placement: Placement, config: MemoryConfig) -> dict[Key, Tier]:
        """Tiers whose weights every worker can read."""
        arena = self.pool.weights
        return open_tiers(
            placement, config, make_dram=lambda snapshot: SharedTier(arena, snapshot), allocate=arena.allocate_recycled
        )

    def attach(self, graph: Graph, store: Store, seed: int, options: Mapping[str, Any]) -> tuple[SwarmLink, Swarm]:
        return self._attach(graph, store, seed, options)

    def _attach(
        self, graph: Graph, store: Store, seed: int, options: Mapping[str, Any], device_bytes: int | None = None
    ) -> tuple[SwarmLink, Swarm]:
        self._link = SwarmLink(store)
        self._swarm = LocalSwarm(
            self.pool,
            graph,
            store,
            self._link.updater.wait,
            seed=seed,
            worker_options=dict(options),
            device_bytes=device_bytes,
        )
        return self._link, Swarm(graph, self._swarm.hub, self._swarm.share_eval_graph)

    def detach(self) -> None:
        """The run is over; the processes can serve another."""
        if self._swarm is not None:
            self._swarm.close()
        if self._link is not None:
            self._link.close()
        self._swarm = self._link = None

    def close(self) -> None:
        if self._swarm is not None:
            self._swarm.close()
        self.pool.close()
        if self._link is not None:
            self._link.close()
