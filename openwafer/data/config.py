"""Which tokens to train on. This module imports neither torch nor numpy."""

from dataclasses import dataclass
from pathlib import Path

from openwafer.config import option


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A folder that `openwafer data prepare` wrote, or (no path) the built-in Shakespeare corpus."""

    path: Path | None = option(None, help="folder of prepared token shards (default: Shakespeare, built in)")
    context: int | None = option(
        None, help="tokens per sample (default: the model's max_position_embeddings)", minimum=1
    )
    vocab_size: int | None = option(
        None, help="built-in corpus: its vocabulary (default: the model's, at most 4096)", minimum=257
    )
    verify: bool = option(True, help="check the shards' checksums at start (reads every shard once)")
