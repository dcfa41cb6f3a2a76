"""A program on the CPU through the C kernels in `csrc/`, compiled on first use.

This file lays a program out as the C side reads it: buffers, operations, and when to round activations to 8 bits.
"""

import ctypes
import itertools
import os
from collections.abc import Sequence

import numpy as np
import torch

from openwafer.errors import UserError
from openwafer.serve.decoder_library import decoder_library
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
from openwafer.serve.runner import Batch

# As in decoder.h:
PAGE = 16  # tokens in a block of the cache
TILE_ROWS = 8  # rows that a kernel takes at once at most
ATTEND_ROWS = 8  # rows of a sequence that attention takes together at most
_KINDS = {Embed: 0, AddPosition: 1, Norm: 2, Linear: 3, Attend: 4, Activate: 5, Add: 6}
_QUANTIZE = 7
_FORMATS = {"fp32": 0, "bf16": 1, "fp16": 2, "q8": 3, "q4": 4}
_ACTIVATIONS = {"gelu": 0, "gelu_tanh": 1, "silu": 2, "relu": 3}


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("format", "is_wide", "num_rows", "num_columns")),
    )


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("stride", ctypes.c_int64), ("width", ctypes.c_int32))


class _Operation(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "flags", "quantizes", "gathers")),
        *((name, _Span) for name in ("dst", "src", "extra")),
        ("weights", _Matrix),
        ("vector", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("width", "layer", "window")),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_rows", "num_logits", "table_width", "has_runs")),
        *((name, ctypes.c_void_p) for name in ("tokens", "positions", "sequences", "tables", "logit_rows", "logits")),
    )


class _Rounded(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "scales", "sums", "totals")),
        ("num_blocks", ctypes.c_int64),
    )


class _Program(ctypes.Structure):
    _fields_ = (
        ("operations", ctypes.POINTER(_Operation)),
        *((name, ctypes.c_int32) for name in ("num_body", "num_head", "num_heads", "num_kv_heads", "head_size")),
        *((name, ctypes.c_int32) for name in ("num_rotary_tables", "cache_is_half")),
        ("num_blocks", ctypes.c_int64),
        ("cache", ctypes.c_void_p),
        ("cosines", ctypes.c_void_p),
        ("rotary_stride", ctypes.c_int64),
        ("scores", ctypes.c_void_p),
        ("thread_stride", ctypes.c_int64),
        ("runs", ctypes.c_void_p),
        ("quantized", _Rounded),
    )


def load_library() -> ctypes.CDLL:
    """The kernels, from the cache if they were built before; NoCompiler where they cannot be."""
    built = decoder_library()
    built.decoder_open.restype = ctypes.c_void_p
    built.decoder_open.argtypes = [ctypes.POINTER(_Program), ctypes.c_int]
    built.decoder_run.restype = None
    built.decoder_run.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Batch)]
    built.decoder_close.restype = None
    built.decoder_close.argtypes = [ctypes.c_void_p]
    return built


class NativeRunner:
    """Runs a program with C kernels and threads that stay."""

    block_size = PAGE

    def __init__(
        self,
        program: Program,
        *,
        num_blocks: int,
        max_rows: int,
        half_cache: bool,
        num_threads: int | None = None,
    ) -> None:
        config = program.config
        self.num_blocks = num_blocks
        self._library = load_library()
        self._vocab_size = config.vocab_size
        self._max_rows = max_rows
        self._kept: list[object] = [program]  # memory that the C side points into
        num_threads = num_threads or len(os.sched_getaffinity(0))
        shape = (config.num_hidden_layers, 2, num_blocks, config.kv_heads, config.head_size * PAGE)
        cache = self._keep(torch.empty(shape, dtype=torch.float16 if half_cache else torch.float32))
        lowered = _Lowering(program, max_rows)
        self._kept.append(lowered)
        operations = lowered.operations
        max_positions = min(config.max_position_embeddings, num_blocks * PAGE)
        num_queries = ATTEND_ROWS * config.num_heads // config.kv_heads
        thread_stride = config.head_size * PAGE + num_queries * (-(-max_positions // PAGE) + 1) * PAGE
        rotary_stride = 2 * max_rows * (config.head_size // 2)
        self._handle = self._library.decoder_open(
            _Program(
                operations=operations,
                num_body=lowered.num_body,
                num_head=len(operations) - lowered.num_body,
                num_heads=config.num_heads,
                num_kv_heads=config.kv_heads,
                head_size=config.head_size,
                num_rotary_tables=lowered.num_rotary_tables,
                cache_is_half=half_cache,
                num_blocks=num_blocks,
                cache=cache.data_ptr(),
                cosines=self._keep(torch.empty(max(1, lowered.num_rotary_tables) * rotary_stride)).data_ptr(),
                rotary_stride=rotary_stride,
                scores=self._keep(torch.empty(num_threads * thread_stride)).data_ptr(),
                thread_stride=thread_stride,
                runs=self._keep(torch.empty(max_rows + 1, dtype=torch.int32)).data_ptr(),
                quantized=lowered.quantized,
            ),
            num_threads,
        )
        if not self._handle:
            raise UserError("not enough memory to start the model's threads")

    def run(self, batch: Batch) -> np.ndarray:
        num_rows, num_logits = len(batch.tokens), len(batch.logit_rows)
        assert 0 < num_rows <= self._max_rows
        logits = np.empty((num_logits, self._vocab_size), np.float32)
        arrays = [batch.tokens, batch.positions, batch.sequences, batch.tables, batch.logit_rows]
        assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in arrays)
        given = _Batch(num_rows, num_logits, batch.tables.shape[1], int(num_rows > len(batch.tables)))
        given.tokens, given.positions, given.sequences, given.tables, given.logit_rows = (a.ctypes.data for a in arrays)
        given.logits = logits.ctypes.data
        self._library.decoder_run(self._handle, given)
        return logits

    def close(self) -> None:
        if self._handle:
            self._library.decoder_close(self._handle)
            self._handle = None

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self._kept.append(tensor)
        return tensor


class _Lowering:
    """A program as an array of C operations, and the buffers that they work on."""

    def __init__(self, program: Program, max_rows: int) -> None:
        self._max_rows = max_rows
        self._kept: list[torch.Tensor] = []
        self._widths = program.widths
        self._buffers = {
            name: self._keep(torch.zeros(max_rows, width)) for name, width in program.widths.items() if name != "logits"
        }
        self._rotary: list[torch.Tensor] = []
        self._rounded: Span | None = None  # what the 8-bit buffer holds
        body = self._lowered(program.body)
        head = self._lowered(program.head)
        head[0].gathers = 1
        self.num_body = len(body)
        self.operations = (_Operation * (len(body) + len(head)))(*body, *head)
        self.num_rotary_tables = len(self._rotary)
        columns = max(op.matrix.num_columns for op in (*program.body, *program.head) if isinstance(op, Linear))
        self.quantized = self._round_buffers(-(-columns // BLOCK))

    def _round_buffers(self, num_blocks: int) -> _Rounded:
        num_rows = -(-self._max_rows // TILE_ROWS) * TILE_ROWS
        values = self._keep(torch.zeros(num_rows * num_blocks, BLOCK, dtype=torch.int8))
        scales, sums = (self._keep(torch.zeros(num_rows * num_blocks)) for _ in range(2))
        totals = self._keep(torch.zeros(num_rows * num_blocks, dtype=torch.int32))
        return _Rounded(*(t.data_ptr() for t in (values, scales, sums, totals)), num_blocks)

    def _lowered(self, operations: Sequence[Operation]) -> list[_Operation]:
        lowered: list[_Operation] = []
        rotate: Rotate | None = None
        for before, op in itertools.pairwise((None, *operations)):
            assert op is not None
            if isinstance(op, Rotate):
                rotate = op  # done where q and k are stored
                continue
            if isinstance(op, Linear) and op.matrix.is_packed and self._rounded != op.src:
                self._round(op.src, lowered, before)
            new = _Operation(kind=_KINDS[type(op)], dst=self._span(op.dst))
            self._fill(new, op, rotate)
            lowered.append(new)
            if isinstance(op, Attend):
                rotate = None
            if self._rounded is not None and self._rounded.buffer == op.dst.buffer:
                self._rounded = None
        return lowered

    def _round(self, src: Span, lowered: list[_Operation], before: Operation | None) -> None:
        """Have `src` rounded by the operation that makes it, or by one of its own."""
        makes_it = before is not None and not isinstance(before, (Linear, Rotate)) and before.dst == src
        if isinstance(before, Attend):
            # It rounds the query heads of each key/value head by themselves: they must be whole blocks.
            makes_it = makes_it and before.q.width // (before.k.width // before.head_size) % BLOCK == 0
        if makes_it:
            lowered[-1].quantizes = 1
        else:
            lowered.append(_Operation(kind=_QUANTIZE, dst=self._span(src), quantizes=1))
        self._rounded = src

    def _fill(self, new: _Operation, op: Operation, rotate: Rotate | None) -> None:
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

    def _span(self, span: Span) -> _Span:
        if span.buffer == "logits":
            return _Span(None, self._widths["logits"], span.width)  # a new array for each batch
        buffer = self._buffers[span.buffer]
        return _Span(buffer.data_ptr() + 4 * span.start, buffer.shape[1], span.width)

    def _matrix(self, matrix: Matrix) -> _Matrix:
        self._keep(matrix.data)
        form = _FORMATS[matrix.format]
        return _Matrix(matrix.data.data_ptr(), form, matrix.wide, matrix.num_rows, matrix.num_columns)

    def _pointer(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = self._keep(tensor.detach().float().contiguous())
        return tensor.data_ptr()

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self._kept.append(tensor)
        return tensor
