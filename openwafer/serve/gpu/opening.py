"""From a model at rest to something that runs it on GPUs."""

import logging

import torch

from openwafer.errors import UserError
from openwafer.memoryx.placement import shown
from openwafer.models.load import StoredModel
from openwafer.serve.budget import available_bytes
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.gpu.device_plan import DevicePlan, device_dtype, plan_devices
from openwafer.serve.gpu.gpus import Gpus
from openwafer.serve.gpu.plan_builder import PlanBuilder
from openwafer.serve.gpu.runner import BLOCK_SIZE, GpuRunner
from openwafer.serve.loading import load_program
from openwafer.serve.runner import Runner

_log = logging.getLogger(__name__)


def open_on_gpus(stored: StoredModel, config: EngineConfig, gpus: Gpus | None = None) -> Runner:
    """The model loaded, with a cache of the size that `config` gives it or that there is room for."""
    gpus = gpus or Gpus()
    for name in ("dram", "flash"):
        if getattr(config, name) != getattr(EngineConfig, name):
            raise UserError(f"{name} is for --device cpu only: on a GPU, --device_memory bounds what is used of it")
    plans = plan_devices(stored, config, gpus)
    _announce(plans)
    if len(plans) == 1:
        return open_on_gpu(stored, config, plans[0], gpus)
    from openwafer.serve.pipeline.runner import open_pipeline

    return open_pipeline(stored.path, config, plans)


def open_on_gpu(stored: StoredModel, config: EngineConfig, plan: DevicePlan, gpus: Gpus | None = None) -> GpuRunner:
    """One region on one GPU."""
    gpus = gpus or Gpus()
    shape, dtype = stored.config, device_dtype(config)
    device = gpus.open(plan.gpu)
    if config.device_memory is not None or config.num_csx > 1:
        device.allow(plan.limit)
    max_positions = min(shape.max_position_embeddings, plan.num_blocks * BLOCK_SIZE)
    builder = PlanBuilder(device, dtype, max_positions, frozenset(plan.streamed_layers))
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
        )
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"GPU {plan.gpu} has not enough memory for what was planned ({plan}; {str(error).splitlines()[0]}): give a "
            "smaller --device_memory, --kv_cache or --max_step_tokens"
        ) from None


def _announce(plans: list[DevicePlan]) -> None:
    """What stays and what is streamed; UserError if the host has no room for that."""
    streamed, free = sum(plan.streamed_bytes for plan in plans), available_bytes()
    if free is not None and streamed > free:
        raise UserError(
            f"{shown(streamed)} of weights do not fit on the GPU, and {shown(free)} of host memory are free for them: "
            "use a smaller model, --quantization with --device cpu, or a GPU with more memory"
        )
    for plan in plans:
        _log.log(logging.WARNING if plan.streamed_layers else logging.INFO, "%s", plan)
