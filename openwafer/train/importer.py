"""Imported weights: a step-0 checkpoint from a model of another maker, to be trained on."""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from openwafer import checkpoint
from openwafer.errors import UserError
from openwafer.models.build import build
from openwafer.models.load import StoredModel
from openwafer.models.weights import match


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What was written."""

    checkpoint: Path
    num_parameters: int
    has_tokenizer: bool


def import_model(
    stored: StoredModel,
    model_dir: Path,
    *,
    shard_bytes: int = checkpoint.SHARD_BYTES,
    on_tensor: Callable[[str], None] = lambda name: None,
) -> Imported:
    """Write the weights, in fp32, as step 0 of a run in `model_dir`. Holds about one weight at a time."""
    existing = checkpoint.latest(model_dir)
    if existing is not None:
        raise UserError(f"{model_dir} already holds a run ({existing.name}): choose another folder")
    num_parameters = 0

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal num_parameters
        with torch.device("meta"):
            module = build(stored.config)
        for matched in match(module, stored.tensors(), str(stored.path)):
            on_tensor(matched.names[0])
            num_parameters += matched.tensor.numel()
            yield f"weights/{matched.names[0]}", matched.tensor.float()

    meta = {"params": {"model": dataclasses.asdict(stored.config)}, "source": stored.path.name}
    with tempfile.TemporaryDirectory(prefix="openwafer-") as scratch:
        tokenizer, file = stored.tokenizer(), None
        if tokenizer is not None:
            file = Path(scratch, "tokenizer.json")
            file.write_text(tokenizer.backend.to_str(), encoding="utf-8")
            meta["tokenizer"] = tokenizer.settings
        folder = checkpoint.save(model_dir, 0, tensors(), meta, tokenizer=file, shard_bytes=shard_bytes)
    return Imported(checkpoint=folder, num_parameters=num_parameters, has_tokenizer=file is not None)
