"""Who holds what: a model's layers, its key/value cache, memory and cores divided over the stages of a pipeline."""

import dataclasses
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from openwafer.errors import UserError
from openwafer.models.config import ModelConfig
from openwafer.models.load import StoredModel
from openwafer.serve.budget import available_bytes, cache_bytes, place, share
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.host import Host, by_host, num_cores
from openwafer.serve.inventory import Inventory, take_inventory
from openwafer.serve.lowering import PAGE
from openwafer.serve.region import Region, split
from openwafer.serve.stream import Placement

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """What one stage holds. `placement` is None where all of its weights stay in memory."""

    region: Region
    num_blocks: int  # of the key/value cache, in its own layers
    half_cache: bool
    num_threads: int
    placement: Placement | None


def settled(stored: StoredModel, config: EngineConfig, beside: int = 0) -> EngineConfig:
    """`config` with a budget where the model needs one: None while everything fits, else most of the free memory.

    `beside`: bytes of a draft model, which count.
    """
    if config.dram is not None or (free := available_bytes()) is None:
        return config
    total = take_inventory(stored, config).total(Region.whole(stored.config))
    needed = total + cache_bytes(config.kv_cache, None) + beside
    if needed <= free:
        return config
    return dataclasses.replace(config, dram=_streamed(needed, free, "this host"))


def _streamed(needed: int, free: int, where: str) -> int:
    """The budget where not everything fits."""
    dram = free * 4 // 5
    _log.warning(
        "the model and its cache need %d MiB, %d MiB of memory are free on %s: weights are streamed from flash (as "
        "with --dram %d), and each step waits for the disk",
        needed >> 20,
        free >> 20,
        where,
        dram,
    )
    return dram


def divided(inventory: Inventory, num_csx: int) -> list[Region]:
    """By what their products cost."""
    costs = [float(size.products) for size in inventory.layers]
    return split(costs, float(inventory.head.products), num_csx)


def plan_stages(stored: StoredModel, config: EngineConfig, hosts: Sequence[Host] | None = None) -> list[StagePlan]:
    """One plan for each of `num_csx` stages, by what their products cost; nothing is read yet.

    `dram` and `num_threads` are of each host. All stages have the same number of blocks: what every host has room for.
    """
    inventory = take_inventory(stored, config)
    regions = divided(inventory, config.num_csx)
    hosts = hosts or [Host(num_stages=len(regions), num_cores=num_cores())]
    rooms = [
        _Room(stored.config, config, inventory, host, held)
        for host, held in zip(hosts, by_host(hosts, regions), strict=True)
    ]
    blocks = [room.num_blocks(room.dram) for room in rooms]
    return [
        plan
        for index, room in enumerate(rooms)
        for plan in room.plans(blocks[index], min([*blocks[:index], *blocks[index + 1 :]], default=None))
    ]


class _Room:
    """The memory of a host for its regions; `dram` is None where everything stays in memory."""

    def __init__(
        self, shape: ModelConfig, config: EngineConfig, inventory: Inventory, host: Host, regions: Sequence[Region]
    ) -> None:
        self._shape = shape
        self._config = config
        self._inventory = inventory
        self._host = host
        self._regions = regions
        self._num_layers = sum(len(region.layers) for region in regions)
        self._number_bytes = cache_number_bytes(inventory)
        self.dram = self._budget()

    def _budget(self) -> int | None:
        host = self._host
        if self._config.dram is not None or host.free_dram is None:
            return self._config.dram
        cache = cache_bytes(self._config.kv_cache, None) * self._num_layers // self._shape.num_hidden_layers
        needed = sum(self._inventory.total(region) for region in self._regions) + cache
        return None if needed <= host.free_dram else _streamed(needed, host.free_dram, host.name)

    def num_blocks(self, dram: int | None) -> int:
        """Of keys and values, as if all hosts had as much memory for each layer as this one has with `dram`."""
        if dram is not None:
            dram = dram * self._shape.num_hidden_layers // self._num_layers
        return num_cache_blocks(self._shape, self._config, cache_bytes(self._config.kv_cache, dram), self._number_bytes)

    def plans(self, num_blocks: int, most_blocks: int | None) -> list[StagePlan]:
        """`most_blocks`: what other hosts have room for."""
        placements: list[Placement | None] = [None] * len(self._regions)
        if self.dram is not None:
            block_bytes = PAGE * token_bytes(self._shape, self._num_layers, self._number_bytes)
            rows = self._config.num_step_tokens

            def cache_with(dram: int) -> int:
                return min(self.num_blocks(dram), most_blocks or sys.maxsize) * block_bytes

            budgets = share(self.dram, self._inventory, self._regions, cache_with, rows)
            placements = [
                place(budget, self._inventory, region, rows)
                for budget, region in zip(budgets, self._regions, strict=True)
            ]
        threads = threads_of_stages(self._config.num_threads, len(self._regions), self._host.num_cores)
        return [
            StagePlan(
                region=region,
                num_blocks=min(num_blocks, most_blocks or num_blocks),
                half_cache=self._inventory.is_packed,
                num_threads=count,
                placement=placement,
            )
            for region, count, placement in zip(self._regions, threads, placements, strict=True)
        ]


def cache_number_bytes(inventory: Inventory) -> int:
    return 2 if inventory.is_packed else 4


def num_cache_blocks(shape: ModelConfig, config: EngineConfig, memory: int, number_bytes: int) -> int:
    """Blocks of the cache that fit into `memory` bytes."""
    block_bytes = PAGE * token_bytes(shape, shape.num_hidden_layers, number_bytes)
    # More blocks than all requests together can fill would only cost memory.
    most = config.num_running * -(-shape.max_position_embeddings // PAGE)
    num_blocks = min(memory // block_bytes, most)
    if num_blocks < 1:
        if config.kv_cache is None and config.dram is not None:
            raise UserError(
                f"dram {config.dram} is too small: keys and values get {memory} bytes of it, and {PAGE} tokens of this "
                f"model need {block_bytes}"
            )
        raise UserError(f"kv_cache {memory} is too small: {PAGE} tokens of this model need {block_bytes} bytes")
    return num_blocks


def token_bytes(shape: ModelConfig, num_layers: int, number_bytes: int) -> int:
    """Keys and values of a token in so many layers."""
    return num_layers * 2 * shape.kv_heads * shape.head_size * number_bytes


def threads_of_stages(num_threads: int | None, num_stages: int, cores: int | None = None) -> list[int]:
    """A host's cores divided; the last stage, which draws the tokens too, is the first to have one more."""
    total = num_threads or cores or num_cores()
    return [max(1, (total + stage) // num_stages) for stage in range(num_stages)]
