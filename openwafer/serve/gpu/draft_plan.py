"""A model and its draft model on the same GPUs: their memory is divided before a weight of either is read.

The draft is small, so all of it stays on the first GPU, in the engine's own process. It has a block of keys and values
for each block of the model: then it can guess for every request that the model has room for.
"""

from collections.abc import Sequence

from openwafer.models.load import StoredModel
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.gpu.device_plan import Beside, DevicePlan, device_dtype, needs_of, plan_devices, with_reserve
from openwafer.serve.gpu.gpus import Gpus
from openwafer.serve.host import Host
from openwafer.serve.inventory import take_inventory
from openwafer.serve.lowering import PAGE
from openwafer.serve.region import Region
from openwafer.serve.stage_plan import threads_of_stages


def plan_with_draft(
    stored: StoredModel,
    draft: StoredModel,
    config: EngineConfig,
    gpus: Gpus,
    free_dram: int | None = None,
    hosts: Sequence[Host] | None = None,
) -> tuple[list[DevicePlan], DevicePlan]:
    """The plans of `plan_devices`, and that of the draft model."""
    shape, region = draft.config, Region.whole(draft.config)
    needs = needs_of(shape, take_inventory(draft, config), region, config, device_dtype(config), guesses=True)
    weights = needs.ends + sum(needs.layers)
    beside = Beside(fixed=with_reserve(weights + needs.activations), block=needs.block)
    plans = plan_devices(stored, config, gpus, free_dram, beside, hosts)
    num_blocks = min(plans[0].num_blocks, config.num_running * -(-shape.max_position_embeddings // PAGE))
    own = beside.fixed + needs.cache(num_blocks)
    return plans, DevicePlan(
        region=region,
        gpu=0,
        limit=plans[0].limit if len(plans) == 1 else own,  # it is in the model's process
        num_blocks=num_blocks,
        streamed_layers=(),
        flash_layers=(),
        layer_bytes=max(needs.layers),
        resident_bytes=weights,
        streamed_bytes=0,
        num_threads=threads_of_stages(config.num_threads, 1)[0],
    )
