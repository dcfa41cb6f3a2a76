"""From a model at rest to something that runs it: which runner, how much cache, which speculation."""

import contextlib
import dataclasses
import logging
from pathlib import Path

import torch

from openwafer.errors import UserError
from openwafer.kernels.compiled import NoCompiler
from openwafer.models.config import ModelConfig
from openwafer.models.load import StoredModel, open_model
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.loading import load_program
from openwafer.serve.lowering import PAGE
from openwafer.serve.native import NativeRunner, load_library
from openwafer.serve.program import Linear, Program
from openwafer.serve.reference import ReferenceRunner
from openwafer.serve.runner import Runner
from openwafer.serve.speculation import DraftModel, Lookup, Speculator
from openwafer.serve.stage_plan import StagePlan, num_cache_blocks, plan_stages, settled
from openwafer.serve.stream import WeightStream

_log = logging.getLogger(__name__)


def open_runner(stored: StoredModel, config: EngineConfig) -> Runner:
    """The model loaded, with a cache of the size that `config` gives it."""
    shape = stored.config
    if shape.num_heads // shape.kv_heads > 64:
        raise UserError(
            f"{shape.num_heads // shape.kv_heads} query heads share a key/value head: at most 64 can be served"
        )
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda: PyTorch sees no GPU here; use --device cpu, or a PyTorch built for CUDA")
    if config.device == "cuda":
        for name in ("num_csx", "dram", "flash"):
            if getattr(config, name) != getattr(EngineConfig, name):
                raise UserError(f"{name} is for --device cpu only: a model on a GPU is held by that one GPU, whole")
        return _open_gpu(load_program(stored, config), config)
    config = settled(stored, config)
    plans = plan_stages(stored, config)
    if len(plans) == 1:
        return open_stage(stored, config, plans[0])
    from openwafer.serve.pipeline.runner import open_pipeline

    with contextlib.suppress(NoCompiler):
        load_library()  # built once, before every stage wants it
    return open_pipeline(stored.path, config, plans)


def open_stage(
    stored: StoredModel, config: EngineConfig, plan: StagePlan, folder: Path | None = None
) -> NativeRunner | ReferenceRunner:
    """One region on the CPU. `folder` is where its streamed weights go (default: that of `config`)."""
    try:
        load_library()
    except NoCompiler as error:
        if plan.placement is not None:
            raise UserError(f"{error}, and without one weights cannot be streamed: raise --dram") from None
        _log.warning("%s: the model runs in PyTorch, row by row and much slower", error)
        program = load_program(stored, config, plan.region)
        return ReferenceRunner(program, num_blocks=plan.num_blocks, block_size=PAGE)
    stream = None if plan.placement is None else WeightStream(plan.placement, folder or config.flash)
    try:
        return NativeRunner(
            load_program(stored, config, plan.region, stream),
            num_blocks=plan.num_blocks,
            max_rows=config.num_step_tokens,
            half_cache=plan.half_cache,
            num_threads=plan.num_threads,
            stream=stream,
        )
    except BaseException:
        if stream is not None:
            stream.close()
        raise


def _open_gpu(program: Program, config: EngineConfig) -> Runner:
    """16-bit weights, or packed ones, on the first GPU."""
    from openwafer.serve.gpu.fast import best_kernels
    from openwafer.serve.gpu.packed_weight import device_bytes
    from openwafer.serve.gpu.runner import GpuRunner

    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(config.dtype, torch.bfloat16)
    memory = config.kv_cache
    if memory is None:
        weights = sum(device_bytes(op.matrix, dtype) for op in program.body if isinstance(op, Linear))
        # A tenth and 4 GiB are for the embedding, graphs, activations and whatever else uses the GPU.
        memory = int(0.9 * torch.cuda.mem_get_info()[0]) - weights - (4 << 30)
        if memory <= 0:
            raise UserError(
                f"the weights alone take {weights >> 30} GiB and the GPU has "
                f"{torch.cuda.mem_get_info()[0] >> 30} GiB free: use a smaller model, or --device cpu"
            )
    return GpuRunner(
        program,
        num_blocks=num_cache_blocks(program.config, config, memory, dtype.itemsize),
        max_rows=config.num_step_tokens,
        max_sequences=config.num_running,
        device=torch.device("cuda"),
        dtype=dtype,
        kernels=best_kernels(program, config.batch_invariant),
    )


def open_speculator(model: ModelConfig, config: EngineConfig) -> Speculator:
    if config.speculation != "draft":
        return Lookup(in_text=config.speculation == "lookup")
    if config.draft_model is None:
        raise UserError("speculation draft needs a draft_model: a small model with the same vocabulary")
    stored = open_model(config.draft_model)
    if stored.config.vocab_size != model.vocab_size:
        raise UserError(
            f"draft_model {config.draft_model} has {stored.config.vocab_size} token ids, the model {model.vocab_size}: "
            "they must share a vocabulary"
        )
    # It is small: all of it stays with the engine.
    runner = open_runner(stored, dataclasses.replace(config, num_csx=1, dram=None, flash=None))
    context = min(stored.config.max_position_embeddings, runner.num_blocks * runner.block_size)
    return DraftModel(runner, max_rows=config.num_step_tokens, max_context=context)
