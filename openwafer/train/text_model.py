"""A language model of a run, captured for its micro-batches of token runs."""

import torch
from torch import nn

from openwafer.data.config import DataConfig
from openwafer.errors import UserError
from openwafer.graph import Graph, capture
from openwafer.models.config import ModelConfig
from openwafer.train.config import Precision

DTYPES: dict[Precision, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}


def context_of(model: ModelConfig, data: DataConfig) -> int:
    """Tokens per sample."""
    context = data.context or model.max_position_embeddings
    if context > model.max_position_embeddings:
        raise UserError(
            f"context {context} is longer than the model's max_position_embeddings "
            f"{model.max_position_embeddings}: shorten the one or raise the other"
        )
    return context


def capture_text_model(
    module: nn.Module, micro_batch: int, context: int, dtype: torch.dtype | None, *, training: bool = True
) -> Graph:
    ids = torch.zeros(micro_batch, context, dtype=torch.int64, device="meta")
    return capture(module.train(training), (), {"input_ids": ids, "labels": ids.clone()}, dtype=dtype)
