"""What a stored model's weights will take in memory once they are packed, known before one of them is read."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import nn

from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.models.load import StoredModel
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.gguf_blocks import format_of_raw
from openwafer.serve.matrix import Format, packed_bytes
from openwafer.serve.region import Part, Region, is_wanted
from openwafer.serve.uninitialised import Uninitialised

_NAMES: dict[str | None, Format] = {"BF16": "bf16", "F16": "fp16"}
_DTYPES: dict[torch.dtype | None, Format] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}


@dataclass(frozen=True)
class Size:
    """Bytes of matrices, which can be streamed, and of vectors, which are small and stay."""

    matrices: int
    vectors: int
    products: int = 0  # of a row with the matrices: the work, for with several users it is what costs

    @property
    def total(self) -> int:
        return self.matrices + self.vectors


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The packed size of each part. A tied table is counted in the embedding and in the head."""

    layers: tuple[Size, ...]
    embedding: Size
    head: Size
    group_bytes: int  # of 16 rows of the table
    is_tied: bool
    is_packed: bool  # whether weights are rounded, so that keys and values in fp16 do no harm

    def total(self, region: Region) -> int:
        """Bytes of a region, with a tied table counted once where the region has both ends."""
        size = sum(self.layers[layer].total for layer in region.layers)
        if region.embeds:
            size += self.embedding.total
        if region.has_head:
            size += self.head.vectors if region.embeds and self.is_tied else self.head.total
        return size


def take_inventory(stored: StoredModel, config: EngineConfig) -> Inventory:
    """Reads how the weights are stored, and none of them."""
    shape, kinds = stored.config, stored.kinds()
    module = blueprint(shape)
    parts: dict[Part, Size] = {}
    is_packed = False
    for part in (*Region.whole(shape).body, "head"):
        matrices = vectors = products = 0
        for name, weight in module.named_parameters():
            if not is_wanted(name, part, shape):
                continue
            if is_vector(name, weight):
                vectors += 4 * weight.numel()
                continue
            form, wide = packed_format(kinds.get(name), stored, config)
            products += weight.numel()
            matrices += packed_bytes(form, weight.shape[0], weight.shape[1], wide)
            is_packed |= isinstance(part, int) and form != "fp32"
        parts[part] = Size(matrices, vectors, products)
    embedding = parts["embedding"]
    return Inventory(
        layers=tuple(parts[layer] for layer in range(shape.num_hidden_layers)),
        embedding=embedding,
        head=parts["head"],
        group_bytes=embedding.matrices // math.ceil(shape.vocab_size / 16),
        is_tied=shape.tied,
        is_packed=is_packed,
    )


@functools.lru_cache(maxsize=2)
def blueprint(config: ModelConfig) -> nn.Module:
    """The module's names and shapes, without a weight."""
    with torch.device("meta"), Uninitialised():
        return build(config)


def is_vector(name: str, weight: torch.Tensor) -> bool:
    """Learned positions are looked up and added as they are."""
    return weight.dim() != 2 or name == "transformer.wpe.weight"


def reads_raw(stored: StoredModel, config: EngineConfig) -> bool:
    """Whether packed matrices are used as they are stored."""
    return stored.raw is not None and config.dtype == "auto" and config.quantization is None


def packed_format(kind: str | None, stored: StoredModel, config: EngineConfig) -> tuple[Format, bool]:
    """How a matrix that is stored as `kind` is packed, and whether its scales are wide."""
    if reads_raw(stored, config):
        return format_of_raw(kind or "F32")
    if config.quantization is not None:
        return ("q8" if config.quantization == "int8" else "q4"), False
    if config.dtype != "auto":
        return config.dtype, False
    if stored.dtype is not None:
        return _DTYPES.get(stored.dtype, "fp32"), False
    return ("fp32" if stored.raw is not None else _NAMES.get(kind, "fp32")), False
