"""A program as the C side reads it: structures as in `csrc/decoder.h`, buffers, and when to round to 8 bits."""

import ctypes
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from openwafer.serve.matrix import BLOCK, Matrix
from openwafer.serve.program import (
    Activate,
    Add,
    AddPosition,
    Attend,
    Embed,
    Linear,
    Norm,
    Operation,
    Program,
    Rotate,
    Span,
)
from openwafer.serve.stream import Place

# As in decoder.h:
PAGE = 16  # tokens in a block of the cache
TILE_ROWS = 8  # rows that a kernel takes at once at most
ATTEND_ROWS = 8  # rows of a sequence that attention takes together at most
_KINDS = {Embed: 0, AddPosition: 1, Norm: 2, Linear: 3, Attend: 4, Activate: 5, Add: 6}
_QUANTIZE = 7
_FORMATS = {"fp32": 0, "bf16": 1, "fp16": 2, "q8": 3, "q4": 4}
_ACTIVATIONS = {"gelu": 0, "gelu_tanh": 1, "silu": 2, "relu": 3}


class CMatrix(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("format", "is_wide", "num_rows", "num_columns")),
    )


class CSpan(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("stride", ctypes.c_int64), ("width", ctypes.c_int32))


class COperation(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "flags", "quantizes", "gathers")),
        *((name, CSpan) for name in ("dst", "src", "extra")),
        ("weights", CMatrix),
        ("vector", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("width", "layer", "window")),
    )


class CBatch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_rows", "num_logits", "table_width", "has_runs")),
        *((name, ctypes.c_void_p) for name in ("tokens", "positions", "sequences", "tables", "logit_rows", "logits")),
    )


class CRounded(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "scales", "sums", "totals")),
        ("num_blocks", ctypes.c_int64),
    )


class CProgram(ctypes.Structure):
    _fields_ = (
        ("operations", ctypes.POINTER(COperation)),
        *((name, ctypes.c_int32) for name in ("num_body", "num_head", "num_heads", "num_kv_heads", "head_size")),
        *((name, ctypes.c_int32) for name in ("num_rotary_tables", "cache_is_half")),
        ("num_blocks", ctypes.c_int64),
        ("cache", ctypes.c_void_p),
        ("cosines", ctypes.c_void_p),
        ("rotary_stride", ctypes.c_int64),
        ("scores", ctypes.c_void_p),
        ("thread_stride", ctypes.c_int64),
        ("runs", ctypes.c_void_p),
        ("quantized", CRounded),
    )


@dataclass(frozen=True)
class Segment:
    """Operations `first` to `stop`, which need a streamed unit (or none); (operation, offset in the unit) of each."""

    first: int
    stop: int
    unit: int | None
    matrices: tuple[tuple[int, int], ...]


class Lowering:
    """A program as an array of C operations, and the buffers that they work on.

    `places` says where the data of a streamed matrix is; the pointers of such operations are set before each use.
    """

    def __init__(self, program: Program, max_rows: int, places: Mapping[Matrix, Place]) -> None:
        self._max_rows = max_rows
        self._places = places
        self._kept: list[torch.Tensor] = []
        self._widths = program.widths
        self._buffers = {
            name: self._keep(torch.zeros(max_rows, width)) for name, width in program.widths.items() if name != "logits"
        }
        self._rotary: list[torch.Tensor] = []
        self._streamed: dict[int, Place] = {}  # operation → where its matrix is
        self._rounded: Span | None = None  # what the 8-bit buffer holds
        lowered: list[COperation] = []
        self._lower(program.body, lowered)
        self.num_body = len(lowered)
        self._lower(program.head, lowered)
        if program.head:
            lowered[self.num_body].gathers = 1
        self.operations = (COperation * len(lowered))(*lowered)
        self.segments = self._segments()
        self.num_rotary_tables = len(self._rotary)
        columns = max(op.matrix.num_columns for op in (*program.body, *program.head) if isinstance(op, Linear))
        self.quantized = self._round_buffers(-(-columns // BLOCK))

    def _round_buffers(self, num_blocks: int) -> CRounded:
        num_rows = -(-self._max_rows // (2 * TILE_ROWS)) * 2 * TILE_ROWS  # amx.c reads two tiles at once
        values = self._keep(torch.zeros(num_rows * num_blocks, BLOCK, dtype=torch.int8))
        scales, sums = (self._keep(torch.zeros(num_rows * num_blocks)) for _ in range(2))
        totals = self._keep(torch.zeros(num_rows * num_blocks, dtype=torch.int32))
        return CRounded(*(t.data_ptr() for t in (values, scales, sums, totals)), num_blocks)

    def buffer(self, name: str) -> torch.Tensor:
        """fp32 [max_rows, width]"""
        return self._buffers[name]

    def _segments(self) -> list[Segment]:
        """The operations cut so that a unit is held no longer than it is needed."""
        units: dict[int, list[int]] = {}
        for index, place in self._streamed.items():
            units.setdefault(place.unit, []).append(index)
        segments: list[Segment] = []
        done = 0
        for unit, indices in units.items():
            first, stop = indices[0], indices[-1] + 1
            if first > done:
                segments.append(Segment(done, first, None, ()))
            matrices = tuple((index, self._streamed[index].offset) for index in indices)
            segments.append(Segment(first, stop, unit, matrices))
            done = stop
        if done < len(self.operations):
            segments.append(Segment(done, len(self.operations), None, ()))
        return segments

    def _lower(self, operations: Sequence[Operation], lowered: list[COperation]) -> None:
        rotate: Rotate | None = None
        for before, op in itertools.pairwise((None, *operations)):
            assert op is not None
            if isinstance(op, Rotate):
                rotate = op  # done where q and k are stored
                continue
            if isinstance(op, Linear) and op.matrix.is_packed and self._rounded != op.src:
                self._round(op.src, lowered, before)
            new = COperation(kind=_KINDS[type(op)], dst=self._span(op.dst))
            self._fill(new, op, rotate)
            if isinstance(op, Linear) and op.matrix in self._places:
                self._streamed[len(lowered)] = self._places[op.matrix]
            lowered.append(new)
            if isinstance(op, Attend):
                rotate = None
            if self._rounded is not None and self._rounded.buffer == op.dst.buffer:
                self._rounded = None

    def _round(self, src: Span, lowered: list[COperation], before: Operation | None) -> None:
        """Have `src` rounded by the operation that makes it, or by one of its own."""
        makes_it = before is not None and not isinstance(before, (Linear, Rotate)) and before.dst == src
        if isinstance(before, Attend):
            # It rounds the query heads of each key/value head by themselves: they must be whole blocks.
            makes_it = makes_it and before.q.width // (before.k.width // before.head_size) % BLOCK == 0
        if makes_it:
            lowered[-1].quantizes = 1
        else:
            lowered.append(COperation(kind=_QUANTIZE, dst=self._span(src), quantizes=1))
        self._rounded = src

    def _fill(self, new: COperation, op: Operation, rotate: Rotate | None) -> None:
        match op:
            case Embed():
                new.weights, new.scale = self._matrix(op.table), op.scale
            case AddPosition():
                new.vector = self._pointer(op.table)
            case Norm():
                new.src, new.vector, new.bias = self._span(op.src), self._pointer(op.weight), self._pointer(op.bias)
                new.scale, new.width, new.flags = op.eps, op.weight.shape[0], op.centred
            case Linear():
                new.src, new.weights, new.vector = self._span(op.src), self._matrix(op.matrix), self._pointer(op.bias)
                new.flags = op.adds
                new.layer = op.dst.start if op.dst.buffer == "logits" else 0
            case Attend():
                assert (op.k.start, op.v.start) == (op.q.width, op.q.width + op.k.width)
                new.src, new.layer, new.window, new.scale = self._span(op.q), op.layer, op.window or 0, op.scale
                if rotate is not None:
                    new.vector, new.width = self._pointer(rotate.frequencies), self._rotary_table(rotate.frequencies)
            case Activate():
                new.flags = _ACTIVATIONS[op.kind]
                if op.up is not None:
                    new.extra = self._span(op.up)
            case Add():
                new.src = self._span(op.src)
            case Rotate():
                raise AssertionError("joined with the attention that follows")

    def _rotary_table(self, frequencies: torch.Tensor) -> int:
        for index, known in enumerate(self._rotary):
            if known is frequencies:
                return index
        self._rotary.append(frequencies)
        return len(self._rotary) - 1

    def _span(self, span: Span) -> CSpan:
        if span.buffer == "logits":
            return CSpan(None, self._widths["logits"], span.width)  # a new array for each batch
        buffer = self._buffers[span.buffer]
        return CSpan(buffer.data_ptr() + 4 * span.start, buffer.shape[1], span.width)

    def _matrix(self, matrix: Matrix) -> CMatrix:
        address = None if matrix.is_elsewhere else self._keep(matrix.data).data_ptr()
        form = _FORMATS[matrix.format]
        return CMatrix(address, form, matrix.wide, matrix.num_rows, matrix.num_columns)

    def _pointer(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = self._keep(tensor.detach().float().contiguous())
        return tensor.data_ptr()

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self._kept.append(tensor)
        return tensor
