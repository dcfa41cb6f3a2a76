"""A model and its tokenizer from whatever holds one: a file, a folder, or the name of a pulled model."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import nn

from openwafer.checkpoint import Checkpoint, latest
from openwafer.config import parse, unknown
from openwafer.errors import UserError
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.models.pull import MODELS, is_hub_name, pulled_path
from openwafer.models.tokenizer import Tokenizer
from openwafer.models.weights import Wanted, assign, everything

if TYPE_CHECKING:
    from openwafer.models.gguf import RawTensor

Loaded = tuple[nn.Module, Tokenizer | None]
T = TypeVar("T", covariant=True)
_KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}


class Reader(Protocol[T]):
    """Reads the weights that are `wanted` (by their names in our module), one at a time."""

    def __call__(self, wanted: Wanted = everything) -> Iterator[tuple[str, T]]: ...


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model at rest: described, but with no weight read."""

    path: Path
    config: ModelConfig
    tensors: Reader[torch.Tensor]  # (name in our module, tensor)
    tokenizer: Callable[[], Tokenizer | None]
    kinds: Callable[[], Mapping[str, str]]  # how each weight is stored (F32, BF16, Q4_1, ...); reads none
    # The same with matrices as they are stored, where the file may hold packed ones.
    raw: "Reader[RawTensor | torch.Tensor] | None" = None
    dtype: torch.dtype | None = None  # of the loaded weights unless asked otherwise; None: as they are stored


@dataclass(frozen=True, kw_only=True)
class Source:
    """One kind of thing that holds a model; `matches` looks, `open` reads the description."""

    kind: str
    matches: Callable[[Path], bool]
    open: Callable[[Path], StoredModel]


def load(path_or_name: str | Path, dtype: torch.dtype | None = None) -> Loaded:
    """The model and its tokenizer (None where there is none); weights in `dtype`, by default as stored.

    GGUF weights that are stored quantised become fp32.
    """
    stored = open_model(path_or_name)
    with torch.device("meta"):
        module = build(stored.config)
    return assign(module, stored.tensors(), str(stored.path), dtype or stored.dtype), stored.tokenizer()


def open_model(path_or_name: str | Path) -> StoredModel:
    """The model in a file or folder, or of the name of a pulled model."""
    path = _found(path_or_name)
    for source in SOURCES:
        if source.matches(path):
            return source.open(path)
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


def _open_gguf(path: Path) -> StoredModel:
    from openwafer.models.gguf import config_of, iter_raw, iter_tensors, kinds_of
    from openwafer.models.gguf_file import GgufFile
    from openwafer.models.gguf_tokenizer import tokenizer_from_gguf

    file = GgufFile(path)
    has_tokenizer = "tokenizer.ggml.model" in file.metadata
    return StoredModel(
        path=path,
        config=config_of(file),
        tensors=lambda wanted=everything: iter_tensors(file, wanted),
        raw=lambda wanted=everything: iter_raw(file, wanted),
        kinds=lambda: kinds_of(file),
        tokenizer=lambda: tokenizer_from_gguf(path) if has_tokenizer else None,
    )


def _open_gguf_folder(path: Path) -> StoredModel:
    (file,) = path.glob("*.gguf")
    return _open_gguf(file)


def _open_huggingface(path: Path) -> StoredModel:
    from openwafer.models.huggingface import config_from_folder, dtype_of_folder, iter_tensors, kinds_of_folder

    has_tokenizer = (path / "tokenizer.json").is_file()
    return StoredModel(
        path=path,
        config=config_from_folder(path),
        tensors=lambda wanted=everything: iter_tensors(path, wanted),
        kinds=lambda: kinds_of_folder(path),
        tokenizer=lambda: Tokenizer.from_folder(path) if has_tokenizer else None,
        dtype=dtype_of_folder(path),
    )


def _open_checkpoint(path: Path) -> StoredModel:
    """One of our checkpoints: the params it was trained with say which model it is."""
    stored = Checkpoint.open(path)
    try:
        mapping = stored.meta["params"]["model"]
    except (KeyError, TypeError):
        raise UserError(f"{path} does not say which model it holds (meta.params.model is missing)") from None
    prefix = "weights/"

    def tokenizer() -> Tokenizer | None:
        if stored.tokenizer is None:
            return None
        return Tokenizer.from_json(stored.tokenizer, stored.meta.get("tokenizer"))

    names = {name.removeprefix(prefix): name for name in stored.names(prefix)}
    return StoredModel(
        path=path,
        config=parse(ModelConfig, mapping, "model"),
        tensors=lambda wanted=everything: ((n, stored.read(name)) for n, name in names.items() if wanted(n)),
        kinds=lambda: {ours: _KINDS.get(stored.dtype_name(name), "F32") for ours, name in names.items()},
        tokenizer=tokenizer,
    )


def _open_model_dir(path: Path) -> StoredModel:
    newest = latest(path)
    if newest is None:
        raise UserError(f"{path} has no whole checkpoint: train longer, or name another folder")
    return _open_checkpoint(newest)


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
    Source(kind="a GGUF file", matches=_is_gguf, open=_open_gguf),
    Source(
        kind="a checkpoint (manifest.json)",
        matches=lambda path: (path / "manifest.json").is_file(),
        open=_open_checkpoint,
    ),
    Source(
        kind="a model_dir of openwafer train",
        matches=lambda path: (path / "checkpoints").is_dir(),
        open=_open_model_dir,
    ),
    Source(
        kind="a Hugging Face folder (config.json)",
        matches=lambda path: (path / "config.json").is_file(),
        open=_open_huggingface,
    ),
    Source(
        kind="a folder with one GGUF file",
        matches=lambda path: len(list(path.glob("*.gguf"))) == 1,
        open=_open_gguf_folder,
    ),
]
