"""From a model at rest to something that runs it: which runner, how much cache, which speculation."""

import logging

from openwafer.errors import UserError
from openwafer.kernels.compiled import NoCompiler
from openwafer.models.config import ModelConfig
from openwafer.models.load import StoredModel, open_model
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.loading import load_program
from openwafer.serve.native import PAGE, NativeRunner
from openwafer.serve.reference import ReferenceRunner
from openwafer.serve.runner import Runner
from openwafer.serve.speculation import DraftModel, Lookup, Speculator

_log = logging.getLogger(__name__)


def open_runner(stored: StoredModel, config: EngineConfig) -> Runner:
    """The model loaded, with a cache of the size that `config` gives it."""
    shape = stored.config
    if shape.num_heads // shape.kv_heads > 64:
        raise UserError(
            f"{shape.num_heads // shape.kv_heads} query heads share a key/value head: at most 64 can be served"
        )
    program = load_program(stored, config)
    half_cache = program.is_packed
    token_bytes = shape.num_hidden_layers * 2 * shape.kv_heads * shape.head_size * (2 if half_cache else 4)
    # More blocks than all requests together can fill would only cost memory.
    most = config.max_running * -(-shape.max_position_embeddings // PAGE)
    num_blocks = min(config.kv_cache // (token_bytes * PAGE), most)
    if num_blocks < 1:
        raise UserError(
            f"kv_cache {config.kv_cache} is too small: {PAGE} tokens of this model need {token_bytes * PAGE} bytes"
        )
    try:
        return NativeRunner(
            program,
            num_blocks=num_blocks,
            max_rows=config.max_step_tokens,
            half_cache=half_cache,
            num_threads=config.num_threads,
        )
    except NoCompiler as error:
        _log.warning("%s: the model runs in PyTorch, row by row and much slower", error)
        return ReferenceRunner(program, num_blocks=num_blocks, block_size=PAGE)


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
    return DraftModel(runner, max_rows=config.max_step_tokens, max_context=context)
