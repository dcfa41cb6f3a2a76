"""Runs the steps of a plan on tensors, with whichever kernels it is given."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from openwafer.models.layers import ACTIVATIONS
from openwafer.serve.gpu.packed_weight import rows_of
from openwafer.serve.gpu.places import Places
from openwafer.serve.gpu.plain import Kernels
from openwafer.serve.gpu.plan import Attention, Look, Project, Step, Streamed
from openwafer.serve.program import Activate, Add, AddPosition, Norm, Span

STREAM = "x"  # the residual stream is fp32, so that 64 additions do not round 64 times to 8 bits


class Values:
    """The buffers of a program for the rows of one batch."""

    def __init__(self, widths: Mapping[str, int], dtype: torch.dtype) -> None:
        self._widths = widths
        self._dtype = dtype
        self._tensors: dict[str, torch.Tensor] = {}

    def read(self, span: Span) -> torch.Tensor:
        tensor = self._tensors[span.buffer]
        if (span.start, span.width) == (0, tensor.shape[1]):
            return tensor
        return tensor[:, span.start : span.start + span.width]

    def replace(self, buffer: str, tensor: torch.Tensor) -> None:
        self._tensors[buffer] = tensor

    def write(self, span: Span, tensor: torch.Tensor) -> None:
        """Whole buffers are replaced; a part is copied into its place."""
        width = self._widths[span.buffer]
        dtype = torch.float32 if span.buffer == STREAM else tensor.dtype
        if span.width == width:
            self._tensors[span.buffer] = tensor.to(dtype)
            return
        old = self._tensors.get(span.buffer)
        if old is None or old.shape[1] != width:
            self._tensors[span.buffer] = tensor.new_zeros(tensor.shape[0], width)
        self._tensors[span.buffer][:, span.start : span.start + span.width] = tensor

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Only these rows of the residual stream go on."""
        self._tensors = {STREAM: self._tensors[STREAM][rows]}


def run_steps(
    steps: Sequence[Step], kernels: Kernels, values: Values, places: Places, cache: torch.Tensor
) -> torch.Tensor:
    """`cache` is [layers, 2, blocks, kv_heads, block_size, head_size]; returns what the last step wrote."""
    dst = steps[-1].attend.dst if isinstance(steps[-1], Attention) else steps[-1].dst
    for step in steps:
        match step:
            case Look():
                values.write(step.dst, rows_of(step.table, places.tokens).float() * step.scale)
            case AddPosition():
                values.read(step.dst).add_(F.embedding(places.positions, step.table))
            case Norm():
                src = values.read(step.src)
                values.write(step.dst, kernels.norm(step, src, cache.dtype))
            case Project():
                _project(step, kernels, values)
            case Attention():
                _attend(step, kernels, values, places, cache)
            case Activate():
                out = ACTIVATIONS[step.kind](values.read(step.dst))
                values.write(step.dst, out if step.up is None else out * values.read(step.up))
            case Add():
                values.read(step.dst).add_(values.read(step.src))
            case Streamed():
                run_steps(step.source.bring(), kernels, values, places, cache)
                step.source.done()
    return values.read(dst)


def _project(step: Project, kernels: Kernels, values: Values) -> None:
    src = values.read(step.src)
    if step.adds:
        kernels.project_into(step, src, values.read(step.dst))
        return
    out = kernels.project(step, src, wide=step.dst.buffer == "logits")
    if step.gated:
        values.replace(step.dst.buffer, out)  # the gates and what they gate have become one
    else:
        values.write(step.dst, out)


def _attend(step: Attention, kernels: Kernels, values: Values, places: Places, cache: torch.Tensor) -> None:
    attend = step.attend
    assert (attend.q.start, attend.k.start, attend.v.start) == (0, attend.q.width, attend.q.width + attend.k.width)
    qkv = values.read(Span(attend.q.buffer, 0, attend.q.width + attend.k.width + attend.v.width))
    keys, stored = cache[attend.layer]
    kernels.rotate_and_store(step, qkv, places, keys, stored)
    values.write(attend.dst, kernels.attend(step, qkv, places, keys, stored))
