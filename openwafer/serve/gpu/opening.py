"""From a model at rest to something that runs it on GPUs."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from openwafer.errors import UserError
from openwafer.models.load import StoredModel
from openwafer.serve.budget import available_bytes
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.gpu.device_plan import DevicePlan, device_dtype, plan_devices
from openwafer.serve.gpu.draft_plan import plan_with_draft
from openwafer.serve.gpu.gpus import Gpus
from openwafer.serve.gpu.layer_shelf import FlashShelf
from openwafer.serve.gpu.plan_builder import PlanBuilder
from openwafer.serve.gpu.runner import BLOCK_SIZE, GpuRunner
from openwafer.serve.loading import load_program
from openwafer.serve.runner import Runner

if TYPE_CHECKING:
    from openwafer.serve.pipeline.cluster import Cluster

_log = logging.getLogger(__name__)


def gpu_of(local_rank: int) -> tuple[int, tuple[int, int]]:
    """(GPUs of this host, (free, all) bytes of the one that a rank uses, of those that torchrun started here)."""
    gpus = Gpus()
    count = gpus.count()
    return count, gpus.memory(local_rank % count)


def open_on_gpus(
    stored: StoredModel, config: EngineConfig, gpus: Gpus | None = None, cluster: "Cluster | None" = None
) -> Runner:
    """The model loaded, with a cache of the size that `config` gives it or that there is room for."""
    gpus = gpus or Gpus()
    hosts = None if cluster is None else cluster.members.hosts
    return _opened(stored, config, plan_devices(stored, config, gpus, available_bytes(), hosts=hosts), gpus, cluster)


def open_with_draft(
    stored: StoredModel,
    draft: StoredModel,
    config: EngineConfig,
    gpus: Gpus | None = None,
    cluster: "Cluster | None" = None,
) -> tuple[Runner, Runner]:
    """The same with a draft model beside it; planned together, so that neither takes what the other counts on."""
    gpus = gpus or Gpus()
    hosts = None if cluster is None else cluster.members.hosts
    plans, plan_of_draft = plan_with_draft(stored, draft, config, gpus, available_bytes(), hosts)
    runner = _opened(stored, config, plans, gpus, cluster)
    _log.info("the draft model: %s", plan_of_draft)
    try:
        return runner, open_on_gpu(draft, config, plan_of_draft, gpus)
    except BaseException:
        runner.close()
        raise


def _opened(
    stored: StoredModel, config: EngineConfig, plans: list[DevicePlan], gpus: Gpus, cluster: "Cluster | None"
) -> Runner:
    for plan in plans:
        _log.log(logging.WARNING if plan.streamed_layers else logging.INFO, "%s", plan)
    if len(plans) == 1:
        return open_on_gpu(stored, config, plans[0], gpus)
    from openwafer.serve.pipeline.runner import open_pipeline

    return open_pipeline(stored.path, config, plans, cluster)


def open_on_gpu(
    stored: StoredModel,
    config: EngineConfig,
    plan: DevicePlan,
    gpus: Gpus | None = None,
    folder: Path | None = None,
) -> GpuRunner:
    """One region on one GPU. `folder` is where layers go that the host has no room for (default: that of `config`)."""
    gpus = gpus or Gpus()
    shape, dtype = stored.config, device_dtype(config)
    device = gpus.open(plan.gpu)
    # A model that this process had open before may have left its own limit.
    is_limited = config.device_memory is not None or config.num_csx > 1
    device.allow(plan.limit if is_limited else gpus.memory(plan.gpu)[1])
    max_positions = min(shape.max_position_embeddings, plan.num_blocks * BLOCK_SIZE)
    shelf = None
    if plan.flash_layers:
        shelf = FlashShelf(device, folder or config.flash, plan.layer_bytes, len(plan.flash_layers))
    streamed, on_flash = frozenset(plan.streamed_layers), frozenset(plan.flash_layers)
    builder = PlanBuilder(device, dtype, max_positions, streamed, on_flash, shelf)
    try:
        program = load_program(stored, config, plan.region, builder)
        return GpuRunner(
            program,
            num_blocks=plan.num_blocks,
            max_rows=config.num_step_tokens,
            max_sequences=config.num_running,
            device=device.where,
            dtype=dtype,
            kernels=gpus.kernels(program, config, device),
            plan=builder.plan(plan.region),
            stream=builder.stream,
        )
    except BaseException as error:
        builder.stream.close()
        if not isinstance(error, torch.OutOfMemoryError):
            raise
        raise UserError(
            f"GPU {plan.gpu} has not enough memory for what was planned ({plan}; {str(error).splitlines()[0]}): give a "
            "smaller --device_memory, --kv_cache or --max_step_tokens"
        ) from None
