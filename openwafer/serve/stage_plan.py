"""Who holds what: a model's layers, its key/value cache, memory and cores divided over the stages of a pipeline."""

import dataclasses
import logging
import os
from dataclasses import dataclass

from openwafer.errors import UserError
from openwafer.models.config import ModelConfig
from openwafer.models.load import StoredModel
from openwafer.serve.budget import available_bytes, cache_bytes, place, share
from openwafer.serve.engine_config import EngineConfig
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
    dram = free * 4 // 5
    _log.warning(
        "the model and its cache need %d MiB, %d MiB of memory are free: weights are streamed from flash (as with "
        "--dram %d), and each step waits for the disk",
        needed >> 20,
        free >> 20,
        dram,
    )
    return dataclasses.replace(config, dram=dram)


def divided(inventory: Inventory, num_csx: int) -> list[Region]:
    """By what their products cost."""
    costs = [float(size.products) for size in inventory.layers]
    return split(costs, float(inventory.head.products), num_csx)


def plan_stages(stored: StoredModel, config: EngineConfig) -> list[StagePlan]:
    """One plan for each of `num_csx` stages, by what their products cost; nothing is read yet."""
    inventory = take_inventory(stored, config)
    regions = divided(inventory, config.num_csx)
    number_bytes = cache_number_bytes(inventory)
    memory = cache_bytes(config.kv_cache, config.dram)
    num_blocks = num_cache_blocks(stored.config, config, memory, number_bytes)
    caches = [num_blocks * PAGE * token_bytes(stored.config, len(r.layers), number_bytes) for r in regions]
    placements: list[Placement | None] = [None] * len(regions)
    if config.dram is not None:
        budgets = share(config.dram, inventory, regions, caches, config.num_step_tokens)
        placements = [
            place(budget, inventory, region, config.num_step_tokens)
            for budget, region in zip(budgets, regions, strict=True)
        ]
    return [
        StagePlan(
            region=region,
            num_blocks=num_blocks,
            half_cache=inventory.is_packed,
            num_threads=threads,
            placement=placement,
        )
        for region, threads, placement in zip(
            regions, threads_of_stages(config.num_threads, len(regions)), placements, strict=True
        )
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
        raise UserError(f"kv_cache {memory} is too small: {PAGE} tokens of this model need {block_bytes} bytes")
    return num_blocks


def token_bytes(shape: ModelConfig, num_layers: int, number_bytes: int) -> int:
    """Keys and values of a token in so many layers."""
    return num_layers * 2 * shape.kv_heads * shape.head_size * number_bytes


def threads_of_stages(num_threads: int | None, num_stages: int) -> list[int]:
    """The cores divided; the last stage, which draws the tokens too, is the first to have one more."""
    total = num_threads or len(os.sched_getaffinity(0))
    return [max(1, (total + stage) // num_stages) for stage in range(num_stages)]
