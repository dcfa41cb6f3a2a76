"""From a model at rest to something that runs it: which runner, how much cache, which speculation."""

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from openwafer.errors import UserError
from openwafer.kernels.compiled import NoCompiler
from openwafer.memoryx.placement import shown
from openwafer.models.config import ModelConfig
from openwafer.models.load import StoredModel, open_model
from openwafer.serve.draft_budget import beside_stages, divide_with_draft
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.host import with_less
from openwafer.serve.loading import load_program
from openwafer.serve.lowering import PAGE
from openwafer.serve.native import NativeRunner, load_library
from openwafer.serve.reference import ReferenceRunner
from openwafer.serve.runner import Runner
from openwafer.serve.speculation import DraftModel, Lookup, Speculator
from openwafer.serve.stage_plan import StagePlan, plan_stages, settled
from openwafer.serve.stream import WeightStream

if TYPE_CHECKING:
    from openwafer.serve.pipeline.cluster import Cluster

_log = logging.getLogger(__name__)


def open_with_speculator(
    stored: StoredModel, config: EngineConfig, cluster: "Cluster | None" = None
) -> tuple[Runner, Speculator]:
    """The model loaded, and who guesses ahead for it; what cannot be is refused before anything is loaded.

    `cluster`: the stages are its ranks; a draft model is in this process.
    """
    if config.speculation != "draft":
        return open_runner(stored, config, cluster), Lookup(in_text=config.speculation == "lookup")
    draft = _open_draft(stored.config, config)
    if config.device == "cuda":
        from openwafer.serve.gpu.opening import open_with_draft

        _check_heads(stored.config)
        runner, guesser = open_with_draft(stored, draft, config, cluster=cluster)
    else:
        if cluster is None:
            config, config_of_draft = divide_with_draft(stored, draft, config)
            beside = 0
        else:
            config_of_draft, beside = beside_stages(stored, draft, config)
        runner = open_runner(stored, config, cluster, beside)
        try:
            guesser = open_runner(draft, config_of_draft)
        except BaseException:
            runner.close()
            raise
    context = min(draft.config.max_position_embeddings, guesser.num_blocks * guesser.block_size)
    return runner, DraftModel(guesser, max_rows=config.num_step_tokens, max_context=context)


def open_runner(stored: StoredModel, config: EngineConfig, cluster: "Cluster | None" = None, beside: int = 0) -> Runner:
    """The model loaded, with a cache of the size that `config` gives it.

    `beside`: bytes of a draft model on the first host of `cluster`.
    """
    _check_heads(stored.config)
    if config.device == "cuda":
        from openwafer.serve.gpu.opening import open_on_gpus

        return open_on_gpus(stored, config, cluster=cluster)
    if cluster is None:
        config = settled(stored, config)
        plans = plan_stages(stored, config)
    else:
        plans = plan_stages(stored, config, with_less(cluster.members.hosts, beside))
    if len(plans) == 1:
        return open_stage(stored, config, plans[0])
    from openwafer.serve.pipeline.runner import open_pipeline

    with contextlib.suppress(NoCompiler):
        load_library()  # built once, before every stage wants it
    return open_pipeline(stored.path, config, plans, cluster)


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
    stream = None
    if plan.placement is not None:
        stream = WeightStream(plan.placement, folder or config.flash)
        _log.info(
            "%d of %d layers are read from flash in every step; it holds %s",
            len(plan.placement.layers),
            plan.region.stop - plan.region.first,
            shown(plan.placement.file_bytes),
        )
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


def _open_draft(model: ModelConfig, config: EngineConfig) -> StoredModel:
    if config.draft_model is None:
        raise UserError("speculation draft needs a draft_model: a small model with the same vocabulary")
    stored = open_model(config.draft_model)
    if stored.config.vocab_size != model.vocab_size:
        raise UserError(
            f"draft_model {config.draft_model} has {stored.config.vocab_size} token ids, the model {model.vocab_size}: "
            "they must share a vocabulary"
        )
    _check_heads(stored.config)
    return stored


def _check_heads(shape: ModelConfig) -> None:
    if shape.num_heads // shape.kv_heads > 64:
        raise UserError(
            f"{shape.num_heads // shape.kv_heads} query heads share a key/value head: at most 64 can be served"
        )
