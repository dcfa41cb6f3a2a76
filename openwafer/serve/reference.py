"""The definition of a program, in PyTorch, one row at a time; it also runs where there is no C compiler.

A row is computed alone, so nothing can depend on its neighbours.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from openwafer.models.layers import ACTIVATIONS
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


class ReferenceRunner:
    """Runs a program with plain tensors; matrices are unpacked once."""

    def __init__(self, program: Program, *, num_blocks: int, block_size: int) -> None:
        config = program.config
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._program = program
        shape = (program.num_layers, 2, num_blocks * block_size, config.kv_heads, config.head_size)
        self._cache = torch.empty(shape)
        self._buffers = {name: torch.zeros(width) for name, width in program.widths.items()}
        self._linears: dict[Matrix, _DenseLinear | _PackedLinear] = {}

    def run(self, batch: Batch) -> np.ndarray:
        return self.run_stage(batch, None)

    def run_stage(self, batch: Batch, x: np.ndarray | None) -> np.ndarray:
        program = self._program
        logits = np.empty((len(batch.logit_rows), program.config.vocab_size), np.float32)
        stream = np.empty((len(batch.tokens), program.widths["x"]), np.float32)
        wanted = {int(row): index for index, row in enumerate(batch.logit_rows)}
        with torch.inference_mode():
            for row, (token, position, sequence) in enumerate(
                zip(batch.tokens.tolist(), batch.positions.tolist(), batch.sequences.tolist(), strict=True)
            ):
                slots = self._slots(batch.tables[sequence], position)
                if x is not None:
                    self._buffers["x"].copy_(torch.from_numpy(x[row]))
                self._run_row(program.body, token, position, slots)
                stream[row] = self._buffers["x"].numpy()
                if row in wanted and program.head:
                    self._run_row(program.head, token, position, slots)
                    logits[wanted[row]] = self._buffers["logits"].numpy()
        return logits if program.head else stream

    def close(self) -> None:
        pass

    def _slots(self, table: np.ndarray, position: int) -> torch.Tensor:
        """Where the keys and values of positions 0..position lie in the cache."""
        at = np.arange(position + 1)
        return torch.from_numpy(table[at // self.block_size].astype(np.int64) * self.block_size + at % self.block_size)

    def _run_row(self, operations: Sequence[Operation], token: int, position: int, slots: torch.Tensor) -> None:
        for op in operations:
            match op:
                case Embed():
                    self._view(op.dst).copy_(self._linear(op.table).row(token) * op.scale)
                case AddPosition():
                    self._view(op.dst).add_(op.table[position])
                case Norm():
                    self._norm(op)
                case Linear():
                    out = self._linear(op.matrix)(self._view(op.src))
                    out = out if op.bias is None else out + op.bias
                    self._view(op.dst).copy_(self._view(op.dst) + out if op.adds else out)
                case Rotate():
                    self._rotate(op, position)
                case Attend():
                    self._attend(op, slots)
                case Activate():
                    out = ACTIVATIONS[op.kind](self._view(op.dst))
                    self._view(op.dst).copy_(out if op.up is None else out * self._view(op.up))
                case Add():
                    self._view(op.dst).add_(self._view(op.src))

    def _view(self, span: Span) -> torch.Tensor:
        return self._buffers[span.buffer][span.start : span.start + span.width]

    def _linear(self, matrix: Matrix) -> "_DenseLinear | _PackedLinear":
        if matrix not in self._linears:
            self._linears[matrix] = _PackedLinear(matrix) if matrix.is_packed else _DenseLinear(matrix)
        return self._linears[matrix]

    def _norm(self, op: Norm) -> None:
        src = self._view(op.src).unflatten(0, (-1, op.weight.shape[0]))
        if op.centred:
            out = F.layer_norm(src, op.weight.shape, op.weight, op.bias, op.eps)
        else:
            out = F.rms_norm(src, op.weight.shape, op.weight, op.eps)
        self._view(op.dst).copy_(out.flatten())

    def _rotate(self, op: Rotate, position: int) -> None:
        heads = self._view(op.dst).unflatten(0, (-1, 2, op.frequencies.shape[0]))
        angles = position * op.frequencies
        cos, sin = angles.cos(), angles.sin()
        first, second = heads[:, 0].clone(), heads[:, 1].clone()
        heads[:, 0] = first * cos - second * sin
        heads[:, 1] = second * cos + first * sin

    def _attend(self, op: Attend, slots: torch.Tensor) -> None:
        size = self._program.config.head_size
        keys, values = self._cache[op.layer]
        keys[slots[-1]] = self._view(op.k).unflatten(0, (-1, size))
        values[slots[-1]] = self._view(op.v).unflatten(0, (-1, size))
        seen = slots if op.window is None else slots[-op.window :]
        k, v = keys[seen].transpose(0, 1), values[seen].transpose(0, 1)  # [kv_heads, s, d]
        q = self._view(op.q).unflatten(0, (k.shape[0], -1, size))  # [kv_heads, heads per kv_head, d]
        weights = ((q @ k.transpose(1, 2)) * op.scale).softmax(dim=-1)
        self._view(op.dst).copy_((weights @ v).flatten())


class _DenseLinear:
    def __init__(self, matrix: Matrix) -> None:
        self._weight = matrix.dense().contiguous()

    def row(self, index: int) -> torch.Tensor:
        return self._weight[index]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._weight @ x


class _PackedLinear:
    """Products of integers: the input is rounded to 8 bits in blocks of 32, as the weights are."""

    def __init__(self, matrix: Matrix) -> None:
        self._matrix = matrix
        self._quants, self._scales, self._offsets = matrix.quants()
        self._as_floats = self._quants.float().contiguous()  # [rows, n, 32]

    def row(self, index: int) -> torch.Tensor:
        values = self._quants[index] * self._scales[index][:, None]
        if self._offsets is not None:
            values = values + self._offsets[index][:, None]
        return values.flatten()[: self._matrix.num_columns]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = F.pad(x, (0, -x.shape[0] % BLOCK)).unflatten(0, (-1, BLOCK))
        scales = x.abs().amax(1) / 127
        quants = torch.where(scales[:, None] > 0, x / scales[:, None], 0).round()  # [n, 32]
        # At most 32 * 127 * 127 each: exact in fp32.
        products = (self._as_floats * quants).sum(2)
        total = torch.zeros(self._matrix.num_rows)
        for block in range(x.shape[0]):
            total = total + products[:, block] * (self._scales[:, block] * scales[block])
            if self._offsets is not None:
                total = total + self._offsets[:, block] * (scales[block] * quants[block].sum())
        return total
