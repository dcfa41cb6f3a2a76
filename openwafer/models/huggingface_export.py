"""A model as a Hugging Face folder: config.json, safetensors shards with an index, tokenizer files.

The reverse of `huggingface.py`. Weights pass through one shard at a time, and the folder appears whole or not
at all. A model that no supported architecture computes is refused by name: it must not load and then be
subtly wrong.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openwafer.errors import UserError
from openwafer.models.build import build
from openwafer.models.huggingface_settings import settings_of
from openwafer.models.load import StoredModel
from openwafer.models.tokenizer import Tokenizer
from openwafer.models.weights import match
from openwafer.registry import staged

SHARD_BYTES = 512 << 20
# GPT-2's "Conv1D" layers store [in, out]; nn.Linear is [out, in].
_TRANSPOSED = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    folder: Path
    model_type: str
    num_parameters: int
    num_bytes: int  # of the weights
    num_shards: int


def export(
    stored: StoredModel,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_tensor: Callable[[str], None] = lambda name: None,
) -> Exported:
    """Write the folder `out`; weights in `dtype` (default: as they are stored). Holds about two shards at a time."""
    settings = settings_of(stored.config)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists: choose another folder, or remove it first")
    try:
        with staged(out) as folder:
            writer = ShardWriter(folder, shard_bytes)
            for name, tensor in _tensors(stored, settings["model_type"], dtype or stored.dtype):
                on_tensor(name)
                writer.add(name, tensor)
            num_shards = writer.close()
            tokenizer = stored.tokenizer()
            settings["dtype"] = str(writer.dtype).removeprefix("torch.")
            _write_json(folder / "config.json", {**settings, **_special_ids(tokenizer)})
            if tokenizer is not None:
                _write_tokenizer(folder, tokenizer, stored.config.max_position_embeddings)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error}; nothing was kept") from None
    return Exported(
        folder=out,
        model_type=settings["model_type"],
        num_parameters=writer.num_parameters,
        num_bytes=writer.total_bytes,
        num_shards=num_shards,
    )


def _tensors(stored: StoredModel, model_type: str, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Weights under Hugging Face's names, which are ours; a tied one under its main name only."""
    with torch.device("meta"):
        module = build(stored.config)
    for matched in match(module, stored.tensors(), str(stored.path)):
        name, tensor = matched.names[0], matched.tensor
        if model_type == "gpt2" and _TRANSPOSED.search(name):
            tensor = tensor.t()
        yield name, tensor.to(dtype or tensor.dtype).contiguous()


class ShardWriter:
    """Safetensors files of at most about `shard_bytes`, and their index."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self.folder = folder
        self.shard_bytes = shard_bytes
        self.total_bytes = self.num_parameters = 0
        self.dtype: torch.dtype | None = None  # of the first tensor
        self._shard: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []  # names of the tensors in each file

    def add(self, name: str, tensor: Tensor) -> None:
        held = sum(other.nbytes for other in self._shard.values())
        if self._shard and held + tensor.nbytes > self.shard_bytes:
            self._flush()
        self._shard[name] = tensor
        self.dtype = self.dtype or tensor.dtype
        self.total_bytes += tensor.nbytes
        self.num_parameters += tensor.numel()

    def _flush(self) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            part = self._part(len(self._shards))
            save_file(self._shard, part, metadata={"format": "pt"})
            part.chmod(0o666 & ~_umask())  # safetensors writes for its owner alone
        except SafetensorError as error:
            raise OSError(str(error)) from None
        self._shards.append(list(self._shard))
        self._shard = {}

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}"

    def close(self) -> int:
        """Write what is left, and give the files their names, which say how many there are."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            self._part(0).rename(self.folder / "model.safetensors")
            return 1
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        _write_json(self.folder / "model.safetensors.index.json", index)
        return count


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, context: int) -> None:
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str(), encoding="utf-8")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    if tokenizer.bos_id is not None:
        settings["bos_token"] = tokenizer.backend.id_to_token(tokenizer.bos_id)
    if tokenizer.eos_ids:
        settings["eos_token"] = tokenizer.backend.id_to_token(tokenizer.eos_ids[0])
        _write_json(folder / "generation_config.json", _special_ids(tokenizer))
    _write_json(folder / "tokenizer_config.json", settings)
    if tokenizer.chat_template is not None:
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")


def _special_ids(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Given as null where there is none: transformers would fill in ids of its own."""
    bos, eos = (None, []) if tokenizer is None else (tokenizer.bos_id, list(tokenizer.eos_ids))
    return {"bos_token_id": bos, "eos_token_id": eos[0] if len(eos) == 1 else eos or None}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _umask() -> int:
    """What new files are not allowed; there is no way to ask without setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
