"""A run of seconds, for tests of whole commands: a small corpus, a tiny model with dropout and clipping."""

import random
from pathlib import Path

import torch

from openwafer.checkpoint import Checkpoint, latest
from openwafer.data.prepare import PrepareConfig, prepare

_WORDS = ["wafer", "stream", "weight", "layer", "mesh", "of", "the", "a", "is", "sent"]


def write_params(
    folder: Path, *, num_steps: int, batch_size: int, checkpoint_every: int = 5, hidden_size: int = 32
) -> Path:
    """A params file in `folder`, and the tokens it names; micro-batches of two."""
    rng = random.Random(0)
    text = folder / "text.txt"
    text.write_text(" ".join(rng.choice(_WORDS) for _ in range(20_000)))
    prepare([text], folder / "tokens", PrepareConfig(vocab_size=300, val_fraction=0.1))
    file = folder / "params.yaml"
    file.write_text(
        f"""
model: {{hidden_size: {hidden_size}, num_hidden_layers: 2, num_heads: 4, vocab_size: 300, max_position_embeddings: 16,
         dropout: 0.1}}
data: {{path: {folder / "tokens"}}}
train: {{num_steps: {num_steps}, batch_size: {batch_size}, micro_batch_size: 2, checkpoint_every: {checkpoint_every},
         eval_batches: 2}}
optimizer: {{lr: 0.01, max_grad_norm: 0.5}}
"""
    )
    return file


def tensors(model_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """All that the newest checkpoint holds, which is of this step."""
    folder = latest(model_dir)
    assert folder is not None
    stored = Checkpoint.open(folder)
    assert stored.step == step
    return {name: stored.read(name) for name in stored.names()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
