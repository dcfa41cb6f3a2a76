"""Text in, batches of token ids out: documents, tokenizer, memory-mapped shards, a shuffled order of samples.

Start at `prepare.py` (the whole pipeline, `prepare.prepare`) and `batches.py` (what training reads).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openwafer.data.batches import Batches
    from openwafer.data.config import DataConfig
    from openwafer.data.corpus import pull_shakespeare
    from openwafer.data.prepare import PrepareConfig, Prepared, folder_of, prepared_shakespeare
    from openwafer.data.shards import Shards

__all__ = [
    "Batches",
    "DataConfig",
    "PrepareConfig",
    "Prepared",
    "Shards",
    "folder_of",
    "prepared_shakespeare",
    "pull_shakespeare",
]

_HOME = {
    "Batches": "batches",
    "DataConfig": "config",
    "PrepareConfig": "prepare",
    "Prepared": "prepare",
    "Shards": "shards",
    "folder_of": "prepare",
    "prepared_shakespeare": "prepare",
    "pull_shakespeare": "corpus",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
