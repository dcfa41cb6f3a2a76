"""Hugging Face folders: `*.safetensors`, one file or shards with an index, into our modules.

Files are memory-mapped and taken tensor by tensor; pickled weights are never opened. Start at `load_folder`;
what `config.json` means is in `huggingface_config.py`.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from openwafer.errors import UserError
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.models.huggingface_config import config_from, read_json
from openwafer.models.weights import Wanted, assign, everything

# Tensors that old files carry and no model needs: causal masks of GPT-2, rotary frequencies of Llama, and
# the vision half of Gemma 3.
_IGNORED = re.compile(
    r"(^|\.)h\.\d+\.attn\.(bias|masked_bias)$|rotary_emb\.inv_freq$|(^|\.)(vision_tower|multi_modal_projector)\."
)
# GPT-2's "Conv1D" layers store [in, out]; nn.Linear is [out, in].
_TRANSPOSED = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def config_from_folder(path: Path | str) -> ModelConfig:
    """The model that the folder's `config.json` describes."""
    return config_from(*_raw_config(Path(path)))


def load_folder(path: Path | str, dtype: torch.dtype | None = None) -> nn.Module:
    """The model in the folder, with its weights in `dtype` (default: the one `config.json` names)."""
    with torch.device("meta"):
        module = build(config_from_folder(path))
    return assign(module, iter_tensors(path), str(path), dtype or dtype_of_folder(path))


def dtype_of_folder(path: Path | str) -> torch.dtype | None:
    """The type that `config.json` names for the weights, if it names one."""
    raw, _ = _raw_config(Path(path))
    text = raw.get("text_config") or {}
    named = [str(part.get(key)) for part in (raw, text) for key in ("dtype", "torch_dtype")]
    return next((_DTYPES[name] for name in named if name in _DTYPES), None)


def iter_tensors(path: Path | str, wanted: Wanted = everything) -> Iterator[tuple[str, torch.Tensor]]:
    """Every wanted weight of the folder as (name in our module, tensor), opened one at a time."""
    is_gpt2 = _raw_config(Path(path))[0].get("model_type") == "gpt2"
    for ours, name, handle in _stored(Path(path), wanted):
        tensor = handle.get_tensor(name)
        if is_gpt2 and _TRANSPOSED.search(name) and tensor.dim() == 2:
            tensor = tensor.t().contiguous()
        yield ours, tensor


def kinds_of_folder(path: Path | str) -> dict[str, str]:
    """How each weight is stored, such as BF16."""
    return {ours: handle.get_slice(name).get_dtype() for ours, name, handle in _stored(Path(path), everything)}


def _stored(folder: Path, wanted: Wanted) -> Iterator[tuple[str, str, Any]]:
    """(name in our module, name in the file, the open file) of each wanted weight."""
    model_type = _raw_config(folder)[0].get("model_type")
    for file, names in _files(folder).items():
        if names is not None and not any(wanted(_our_name(name, model_type)) for name in names):
            continue
        with _opened(file) as handle:
            stored = list(handle.keys())
            for name in stored if names is None else names:
                ours = _our_name(name, model_type)
                if _IGNORED.search(name) or not wanted(ours):
                    continue
                if name not in stored:
                    raise UserError(f"{file} has no tensor {name!r}, which the index says it has")
                yield ours, name, handle


def _raw_config(folder: Path) -> tuple[dict[str, Any], Path]:
    if not folder.is_dir():
        raise UserError(f"no such folder: {folder}")
    return read_json(folder / "config.json"), folder / "config.json"


def _our_name(name: str, model_type: Any) -> str:
    if model_type == "gpt2" and not name.startswith(("transformer.", "lm_head.")):
        return f"transformer.{name}"  # GPT-2's own files leave the prefix out
    if model_type == "gemma3":
        # The text half of the multimodal model; its prefix has moved over the years.
        name = re.sub(r"^(language_model\.(?=model\.|lm_head\.)|model\.language_model\.)", "", name)
        return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"
    return name


def _files(folder: Path) -> dict[Path, list[str] | None]:
    """Each weight file with the tensors to take from it (None: all)."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return _shards(folder, index)
    files = sorted(folder.glob("*.safetensors"))
    files = [file for file in files if file.name == "model.safetensors"] or files
    if len(files) == 1:
        return {files[0]: None}
    if files:
        raise UserError(
            f"{folder} has {len(files)} safetensors files but no {index.name}, which says what is in them: "
            "download the folder again"
        )
    if pickled := sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]):
        raise UserError(
            f"{folder} has only pickled weights ({pickled[0].name}), which can run code when opened: "
            "convert them to safetensors, for instance with save_pretrained of a recent transformers"
        )
    raise UserError(f"{folder} has no *.safetensors file: download the weights of the model too")


def _shards(folder: Path, index: Path) -> dict[Path, list[str] | None]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} has no weight_map of tensor names to files")
    files: dict[Path, list[str] | None] = {}
    for name, shard in sorted(weight_map.items(), key=lambda item: (str(item[1]), item[0])):
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise UserError(f"{index}: tensor {name!r} must name a file of the same folder, got {shard!r}")
        files.setdefault(folder / shard, []).append(name)  # pyright: ignore[reportOptionalMemberAccess]
    for file in files:
        if not file.is_file():
            raise UserError(f"{file} is missing: {index.name} needs it; download the folder again")
    return files


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        handle = safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is not a readable safetensors file ({error}): download it again") from None
    with handle as opened:
        yield opened
