"""From a model at rest to something that runs it: which runner, how much cache, which speculation."""

import logging

import torch

from openwafer.errors import UserError
from openwafer.kernels.compiled import NoCompiler
from openwafer.models.config import ModelConfig
from openwafer.models.load import StoredModel, open_model
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.loading import load_program
from openwafer.serve.native import PAGE, NativeRunner
from openwafer.serve.program import Linear, Program
from openwafer.serve.reference import ReferenceRunner
from openwafer.serve.runner import Runner
from openwafer.serve.speculation import DraftModel, Lookup, Speculator

_log = logging.getLogger(__name__)
_CPU_CACHE = 1 << 30


def open_runner(stored: StoredModel, config: EngineConfig) -> Runner:
    """The model loaded, with a cache of the size that `config` gives it."""
    shape = stored.config
    if shape.num_heads // shape.kv_heads > 64:
        raise UserError(
            f"{shape.num_heads // shape.kv_heads} query heads share a key/value head: at most 64 can be served"
        )
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda: PyTorch sees no GPU here; use --device cpu, or a PyTorch built for CUDA")
    program = load_program(stored, config)
    return _open_gpu(program, config) if config.device == "cuda" else _open_cpu(program, config)


def _open_cpu(program: Program, config: EngineConfig) -> Runner:
    half_cache = program.is_packed
    memory = _CPU_CACHE if config.kv_cache is None else config.kv_cache
    num_blocks = _num_blocks(program.config, config, memory, 2 if half_cache else 4)
    try:
        return NativeRunner(
            program,
            num_blocks=num_blocks,
            max_rows=config.num_step_tokens,
            half_cache=half_cache,
            num_threads=config.num_threads,
        )
    except NoCompiler as error:
        _log.warning("%s: the model runs in PyTorch, row by row and much slower", error)
        return ReferenceRunner(program, num_blocks=num_blocks, block_size=PAGE)


def _open_gpu(program: Program, config: EngineConfig) -> Runner:
    """16-bit weights on the first GPU; packed ones are unpacked."""
    from openwafer.serve.gpu.fast import best_kernels
    from openwafer.serve.gpu.runner import GpuRunner

    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(config.dtype, torch.bfloat16)
    memory = config.kv_cache
    if memory is None:
        weights = sum(op.matrix.num_rows * op.matrix.num_columns for op in program.body if isinstance(op, Linear))
        # A tenth and 4 GiB are for the embedding, graphs, activations and whatever else uses the GPU.
        memory = int(0.9 * torch.cuda.mem_get_info()[0]) - weights * dtype.itemsize - (4 << 30)
        if memory <= 0:
            raise UserError(
                f"the weights alone take {weights * dtype.itemsize >> 30} GiB and the GPU has "
                f"{torch.cuda.mem_get_info()[0] >> 30} GiB free: use a smaller model, or --device cpu"
            )
    return GpuRunner(
        program,
        num_blocks=_num_blocks(program.config, config, memory, dtype.itemsize),
        max_rows=config.num_step_tokens,
        max_sequences=config.num_running,
        device=torch.device("cuda"),
        dtype=dtype,
        kernels=best_kernels(program, config.batch_invariant),
    )


def _num_blocks(shape: ModelConfig, config: EngineConfig, memory: int, number_bytes: int) -> int:
    """Blocks of the cache that fit into `memory` bytes."""
    token_bytes = shape.num_hidden_layers * 2 * shape.kv_heads * shape.head_size * number_bytes
    # More blocks than all requests together can fill would only cost memory.
    most = config.num_running * -(-shape.max_position_embeddings // PAGE)
    num_blocks = min(memory // (token_bytes * PAGE), most)
    if num_blocks < 1:
        raise UserError(f"kv_cache {memory} is too small: {PAGE} tokens of this model need {token_bytes * PAGE} bytes")
    return num_blocks


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
    runner = open_runner(stored, config)
    context = min(stored.config.max_position_embeddings, runner.num_blocks * runner.block_size)
    return DraftModel(runner, max_rows=config.num_step_tokens, max_context=context)
