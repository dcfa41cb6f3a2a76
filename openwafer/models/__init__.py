"""Models: GPT and Llama decoders in plain PyTorch, and the files their weights come from.

Start at `config.py` (what a model is made of), then `gpt.py` or `llama.py`, a page each. `build.build` makes
a module of a configuration; `huggingface.load_folder` fills one with published weights.
"""

import importlib
from typing import Any

# Resolved on first use, so that reading a configuration never waits for torch.
_HOMES = {
    "GPT": "gpt",
    "KVCache": "cache",
    "Llama": "llama",
    "ModelConfig": "config",
    "RopeScaling": "config",
    "load_folder": "huggingface",
}
__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
