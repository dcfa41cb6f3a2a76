"""A model and its tokenizer from whatever holds one: a file, a folder, or the name of a pulled model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from openwafer.checkpoint import Checkpoint, latest
from openwafer.config import parse, unknown
from openwafer.errors import UserError
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.models.pull import MODELS, is_hub_name, pulled_path
from openwafer.models.tokenizer import Tokenizer
from openwafer.models.weights import assign

Loaded = tuple[nn.Module, Tokenizer | None]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One kind of thing that holds a model; `matches` looks, `load` reads."""

    kind: str
    matches: Callable[[Path], bool]
    load: Callable[[Path, torch.dtype | None], Loaded]


def load(path_or_name: str | Path, dtype: torch.dtype | None = None) -> Loaded:
    """The model and its tokenizer (None where there is none); weights in `dtype`, by default as stored.

    GGUF weights that are stored quantised become fp32.
    """
    path = _found(path_or_name)
    for source in SOURCES:
        if source.matches(path):
            return source.load(path, dtype)
    kinds = "; ".join(source.kind for source in SOURCES)
    raise UserError(f"{path} is none of the things that hold a model: {kinds}")


def _found(path_or_name: str | Path) -> Path:
    path, name = Path(path_or_name), str(path_or_name)
    if path.exists():
        return path
    if name in MODELS or is_hub_name(name):
        if pulled_path(name).is_dir():
            return pulled_path(name)
        raise UserError(f"no file or folder {name}, and no such model was pulled: try openwafer pull {name}")
    raise UserError(f"no file or folder {name}, and {unknown(f'model {name!r}', name, MODELS)}")


def _load_gguf(path: Path, dtype: torch.dtype | None) -> Loaded:
    from openwafer.models.gguf import load_gguf
    from openwafer.models.gguf_file import GgufFile
    from openwafer.models.gguf_tokenizer import tokenizer_from_gguf

    has_tokenizer = "tokenizer.ggml.model" in GgufFile(path).metadata
    return load_gguf(path, dtype), tokenizer_from_gguf(path) if has_tokenizer else None


def _load_gguf_folder(path: Path, dtype: torch.dtype | None) -> Loaded:
    (file,) = path.glob("*.gguf")
    return _load_gguf(file, dtype)


def _load_huggingface(path: Path, dtype: torch.dtype | None) -> Loaded:
    from openwafer.models.huggingface import load_folder

    has_tokenizer = (path / "tokenizer.json").is_file()
    return load_folder(path, dtype), Tokenizer.from_folder(path) if has_tokenizer else None


def _load_checkpoint(path: Path, dtype: torch.dtype | None) -> Loaded:
    """One of our checkpoints: the params it was trained with say which model it is."""
    stored = Checkpoint.open(path)
    try:
        mapping = stored.meta["params"]["model"]
    except (KeyError, TypeError):
        raise UserError(f"{path} does not say which model it holds (meta.params.model is missing)") from None
    with torch.device("meta"):
        module = build(parse(ModelConfig, mapping, "model"))
    prefix = "weights/"
    tensors = ((name.removeprefix(prefix), stored.read(name)) for name in stored.names(prefix))
    tokenizer = Tokenizer.from_json(stored.tokenizer) if stored.tokenizer is not None else None
    return assign(module, tensors, str(path), dtype), tokenizer


def _load_model_dir(path: Path, dtype: torch.dtype | None) -> Loaded:
    newest = latest(path)
    if newest is None:
        raise UserError(f"{path} has no whole checkpoint: train longer, or name another folder")
    return _load_checkpoint(newest, dtype)


def _is_gguf(path: Path) -> bool:
    """By name or by magic: a damaged .gguf should be told apart from a wrong path."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return path.suffix == ".gguf" or file.read(4) == b"GGUF"
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}") from None


# The first that matches is taken.
SOURCES = [
    Source(kind="a GGUF file", matches=_is_gguf, load=_load_gguf),
    Source(
        kind="a checkpoint (manifest.json)",
        matches=lambda path: (path / "manifest.json").is_file(),
        load=_load_checkpoint,
    ),
    Source(
        kind="a model_dir of openwafer train",
        matches=lambda path: (path / "checkpoints").is_dir(),
        load=_load_model_dir,
    ),
    Source(
        kind="a Hugging Face folder (config.json)",
        matches=lambda path: (path / "config.json").is_file(),
        load=_load_huggingface,
    ),
    Source(
        kind="a folder with one GGUF file",
        matches=lambda path: len(list(path.glob("*.gguf"))) == 1,
        load=_load_gguf_folder,
    ),
]
