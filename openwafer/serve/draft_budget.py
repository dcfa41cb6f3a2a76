"""A model and its draft model on the CPU: what of the memory each of them has, decided before either is read.

All of the draft stays in memory, and it has keys and values for as many tokens as the model. `gpu/draft_plan.py` does
the same for GPUs.
"""

import dataclasses

from openwafer.errors import UserError
from openwafer.models.load import StoredModel
from openwafer.serve.budget import cache_bytes, enough, least_bytes
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.inventory import take_inventory
from openwafer.serve.lowering import PAGE
from openwafer.serve.region import Region
from openwafer.serve.stage_plan import cache_number_bytes, divided, num_cache_blocks, settled, token_bytes


def divide_with_draft(
    stored: StoredModel, draft: StoredModel, config: EngineConfig
) -> tuple[EngineConfig, EngineConfig]:
    """`config` for the model, and for the draft; with a budget, the model's is what the draft leaves."""
    own, beside = _of_draft(stored, draft, config)
    config = settled(stored, config, beside)
    if config.dram is None:
        return config, own
    inventory = take_inventory(stored, config)
    weights = sum(least_bytes(inventory, divided(inventory, config.num_csx), config.num_step_tokens))

    def shared(dram: int) -> tuple[int, EngineConfig, int]:
        """The model's keys and values, the draft's config, and its bytes. They grow with a budget, if nobody says how
        much memory keys and values may have."""
        return cache_bytes(config.kv_cache, dram), *_of_draft(stored, draft, dataclasses.replace(config, dram=dram))

    def needed(dram: int) -> int:
        cache, _, beside = shared(dram)
        return weights + cache + beside

    cache, own, beside = shared(config.dram)
    if config.dram < needed(config.dram):
        raise UserError(
            f"dram {config.dram} is too small: {weights + cache} bytes are needed for the weights being read, packed "
            f"and computed with and for keys and values ({cache}), and {beside} for the draft model with its own; give "
            f"at least --dram {enough(config.dram, needed)}, a smaller --kv_cache, or another --draft_model"
        )
    return dataclasses.replace(config, dram=config.dram - beside, kv_cache=cache), own


def beside_stages(stored: StoredModel, draft: StoredModel, config: EngineConfig) -> tuple[EngineConfig, int]:
    """The draft's config and bytes where stages are on several hosts: it is on the first, whatever those need."""
    if config.dram is not None:
        raise UserError(
            f"dram {config.dram} with a draft model is for one host: leave out --dram, or --speculation draft"
        )
    return _of_draft(stored, draft, config)


def _of_draft(stored: StoredModel, draft: StoredModel, config: EngineConfig) -> tuple[EngineConfig, int]:
    """The draft's config, and the bytes of its weights, keys and values."""
    memory = cache_bytes(config.kv_cache, config.dram)
    number_bytes = cache_number_bytes(take_inventory(stored, config))
    num_blocks = num_cache_blocks(stored.config, config, memory, number_bytes)
    shape, inventory = draft.config, take_inventory(draft, config)
    cache = num_blocks * PAGE * token_bytes(shape, shape.num_hidden_layers, cache_number_bytes(inventory))
    own = dataclasses.replace(config, num_csx=1, dram=None, flash=None, kv_cache=cache)
    return own, inventory.total(Region.whole(shape)) + cache
