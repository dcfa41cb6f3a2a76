"""A program on the CPU through the C kernels in `csrc/`, compiled on first use."""

import ctypes
import os
from collections.abc import Sequence

import numpy as np
import torch

from openwafer.errors import UserError
from openwafer.serve.decoder_library import decoder_library
from openwafer.serve.lowering import ATTEND_ROWS, PAGE, CBatch, CProgram, Lowering, Segment
from openwafer.serve.program import Embed, Program
from openwafer.serve.runner import Batch
from openwafer.serve.stream import WeightStream

__all__ = ["PAGE", "NativeRunner", "load_library"]


def load_library() -> ctypes.CDLL:
    """The kernels, from the cache if they were built before; NoCompiler where they cannot be."""
    built = decoder_library()
    built.decoder_open.restype = ctypes.c_void_p
    built.decoder_open.argtypes = [ctypes.POINTER(CProgram), ctypes.c_int]
    built.decoder_run.restype = None
    built.decoder_run.argtypes = [ctypes.c_void_p, ctypes.POINTER(CBatch), ctypes.c_int, ctypes.c_int]
    built.decoder_close.restype = None
    built.decoder_close.argtypes = [ctypes.c_void_p]
    return built


class NativeRunner:
    """Runs a program with C kernels and threads that stay; weights that are not in memory come from a stream."""

    block_size = PAGE

    def __init__(
        self,
        program: Program,
        *,
        num_blocks: int,
        max_rows: int,
        half_cache: bool,
        num_threads: int | None = None,
        stream: WeightStream | None = None,
    ) -> None:
        config = program.config
        self.num_blocks = num_blocks
        self._library = load_library()
        self._vocab_size = config.vocab_size
        self._max_rows = max_rows
        self._kept: list[object] = [program]  # memory that the C side points into
        num_threads = num_threads or len(os.sched_getaffinity(0))
        shape = (program.num_layers, 2, num_blocks, config.kv_heads, config.head_size * PAGE)
        cache = self._keep(torch.empty(shape, dtype=torch.float16 if half_cache else torch.float32))
        self._stream = stream
        lowered = Lowering(program, max_rows, {} if stream is None else stream.places)
        self._lowered = lowered
        self._has_head = bool(program.head)
        first = program.body[0]
        self._gathers_table = isinstance(first, Embed) and first.table.is_elsewhere
        operations = lowered.operations
        max_positions = min(config.max_position_embeddings, num_blocks * PAGE)
        num_queries = ATTEND_ROWS * config.num_heads // config.kv_heads
        thread_stride = config.head_size * PAGE + num_queries * (-(-max_positions // PAGE) + 1) * PAGE
        rotary_stride = 2 * max_rows * (config.head_size // 2)
        self._handle = self._library.decoder_open(
            CProgram(
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
        return self.run_stage(batch, None)

    def run_stage(self, batch: Batch, x: np.ndarray | None) -> np.ndarray:
        num_rows, num_logits = len(batch.tokens), len(batch.logit_rows)
        assert 0 < num_rows <= self._max_rows
        stream = self._lowered.buffer("x").numpy()[:num_rows]
        if x is not None:
            stream[:] = x
        logits = np.empty((num_logits if self._has_head else 0, self._vocab_size), np.float32)
        tokens = batch.tokens
        if self._gathers_table:
            assert self._stream is not None
            rows, tokens = self._stream.rows(tokens)
            self._lowered.operations[0].weights.data = rows.data_ptr()
        arrays = [tokens, batch.positions, batch.sequences, batch.tables, batch.logit_rows]
        assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in arrays)
        given = CBatch(num_rows, num_logits, batch.tables.shape[1], int(num_rows > len(batch.tables)))
        given.tokens, given.positions, given.sequences, given.tables, given.logit_rows = (a.ctypes.data for a in arrays)
        given.logits = logits.ctypes.data
        wanted = self._lowered.segments
        if not num_logits:
            wanted = [segment for segment in wanted if segment.first < self._lowered.num_body]
        self._run_segments(given, wanted)
        return logits if self._has_head else stream.copy()

    def _run_segments(self, batch: CBatch, segments: Sequence[Segment]) -> None:
        """Operations whose weights are streamed run while the next ones are read; after the last comes the first."""
        units = [segment.unit for segment in segments if segment.unit is not None]
        following = dict(zip(units, [*units[1:], *units[:1]], strict=True))
        for segment in segments:
            if segment.unit is None or self._stream is None:
                self._library.decoder_run(self._handle, batch, segment.first, segment.stop)
                continue
            start = self._stream.bring(segment.unit).data_ptr()
            for index, offset in segment.matrices:
                self._lowered.operations[index].weights.data = start + offset
            self._stream.ahead(following[segment.unit])
            self._library.decoder_run(self._handle, batch, segment.first, segment.stop)
            self._stream.done(segment.unit)

    def close(self) -> None:
        if self._handle:
            self._library.decoder_close(self._handle)
            self._handle = None
            if self._stream is not None:
                self._stream.close()

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self._kept.append(tensor)
        return tensor
