"""From a stored model to a program, part by part: a layer is read, packed, and kept in memory or sent elsewhere."""

from collections.abc import Iterator
from typing import Protocol

import torch

from openwafer.models.gguf import RawTensor
from openwafer.models.load import StoredModel
from openwafer.models.weights import match
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.gguf_blocks import matrix_from_raw
from openwafer.serve.inventory import blueprint, is_vector, packed_format, reads_raw
from openwafer.serve.matrix import Matrix
from openwafer.serve.program import Embed, Operation, Program, ProgramBuilder, Weights
from openwafer.serve.region import Part, Region, is_wanted


class Taker(Protocol):
    """Where weights go that are not kept in this process's memory: flash (`stream.py`), or a GPU."""

    @property
    def streamed_layers(self) -> frozenset[int]:
        """Those are loaded first, in order."""
        ...

    def taken(self, part: Part, operations: list[Operation]) -> list[Operation]:
        """The operations of a part, without the data of the matrices that were taken."""
        ...

    def finish(self) -> None:
        """Everything is there."""
        ...


def load_program(
    stored: StoredModel,
    config: EngineConfig,
    region: Region | None = None,
    taker: Taker | None = None,
) -> Program:
    """A region of the model (default: all of it) ready to run, less what `taker` takes.

    Each tensor is packed as it is read, so memory holds the packed region and one layer's tensors.
    """
    return _Loader(stored, config, region or Region.whole(stored.config), taker).program()


class _Loader:
    def __init__(self, stored: StoredModel, config: EngineConfig, region: Region, taker: Taker | None) -> None:
        self._stored = stored
        self._config = config
        self._region = region
        self._taker = taker
        self._module = blueprint(stored.config)  # for names and shapes only

    def program(self) -> Program:
        shape, region = self._stored.config, self._region
        builder = ProgramBuilder(shape)
        parts: dict[Part, list[Operation]] = {}
        first: Weights = {}
        if region.embeds:
            first = self._weights("embedding")
            parts["embedding"] = self._placed("embedding", builder.embedding(first))
            if any(isinstance(op, Embed) and op.table.is_elsewhere for op in parts["embedding"]):
                first = {}  # from now on it is on flash only
        if region.has_head:
            # A tied table is read once where both ends are here and it stays in memory.
            given = first if shape.tied else {}
            parts["head"] = self._placed("head", builder.head(given | self._weights("head", without=given)))
        # What stays comes last: while the others are packed there is room for that.
        for layer in sorted(region.layers, key=self._stays):
            parts[layer] = self._placed(layer, builder.layer(layer, layer - region.first, self._weights(layer)))
        if self._taker is not None:
            self._taker.finish()
        body = [operation for part in region.body for operation in parts[part]]
        return Program(config=shape, widths=builder.widths, body=tuple(body), head=tuple(parts.get("head", ())))

    def _stays(self, layer: int) -> bool:
        return self._taker is None or layer not in self._taker.streamed_layers

    def _placed(self, part: Part, operations: list[Operation]) -> list[Operation]:
        return operations if self._taker is None else self._taker.taken(part, operations)

    def _weights(self, part: Part, without: Weights | None = None) -> Weights:
        """The packed weights of a part; those in `without` are at hand already."""
        stored, config, given = self._stored, self._config, without or {}

        def wanted(name: str) -> bool:
            is_given = name in given or (name == "lm_head.weight" and bool(given))  # given ones are tied
            return is_wanted(name, part, stored.config) and not is_given

        weights: Weights = {}
        if reads_raw(stored, config):
            assert stored.raw is not None
            last: dict[str, RawTensor | torch.Tensor] = {}
            for matched in match(self._module, _described(stored.raw(wanted), last), str(stored.path), wanted):
                ((_, raw),) = last.items()
                last.clear()
                weights[matched.names[0]] = _as_stored(matched.names[0], raw)
        else:
            for matched in match(self._module, stored.tensors(wanted), str(stored.path), wanted):
                weights[matched.names[0]] = self._packed(matched.names[0], matched.tensor)
        return weights

    def _packed(self, name: str, tensor: torch.Tensor) -> Matrix | torch.Tensor:
        if is_vector(name, tensor):
            # A copy: a view would keep the whole mapped file in memory, as far as it was read.
            return tensor.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if self._config.quantization is not None:
            return Matrix.quantized(tensor, 8 if self._config.quantization == "int8" else 4)
        kind = {torch.bfloat16: "BF16", torch.float16: "F16"}.get(tensor.dtype)
        form, _ = packed_format(kind, self._stored, self._config)
        assert form in ("fp32", "bf16", "fp16")
        return Matrix.from_floats(tensor, form)


def _described(
    tensors: Iterator[tuple[str, RawTensor | torch.Tensor]], last: dict[str, RawTensor | torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """What `match` checks: names and shapes. The tensor that was described last is in `last`."""
    for name, tensor in tensors:
        last[name] = tensor
        yield name, torch.empty(tensor.shape, device="meta")


def _as_stored(name: str, tensor: RawTensor | torch.Tensor) -> Matrix | torch.Tensor:
    if isinstance(tensor, torch.Tensor):
        return tensor
    matrix = matrix_from_raw(tensor)
    return matrix.dense() if name == "transformer.wpe.weight" else matrix
