"""What the steps of a plan mean, in plain PyTorch operations: the definition, and what runs where Triton does not.

r rows, h heads, g key/value heads, d size of a head, s slots of a block.
"""

from typing import Protocol

import torch
import torch.nn.functional as F

from openwafer.models.layers import ACTIVATIONS
from openwafer.serve.gpu.packed_weight import dense
from openwafer.serve.gpu.places import Places, Run
from openwafer.serve.gpu.plan import Attention, Project
from openwafer.serve.program import Norm


class Kernels(Protocol):
    """The steps that cost; `PlainKernels` says what each must give."""

    records: bool  # whether they can be recorded in a graph: they never ask the device for a number

    def norm(self, step: Norm, src: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...

    def project(self, step: Project, src: torch.Tensor, wide: bool) -> torch.Tensor: ...

    def project_into(self, step: Project, src: torch.Tensor, dst: torch.Tensor) -> None: ...

    def rotate_and_store(
        self, step: Attention, qkv: torch.Tensor, places: Places, keys: torch.Tensor, values: torch.Tensor
    ) -> None: ...

    def attend(
        self, step: Attention, qkv: torch.Tensor, places: Places, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor: ...


class PlainKernels:
    """Every sum in fp32, every result rounded once."""

    records = False

    def norm(self, step: Norm, src: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """src [r, n * len(weight)], normed in runs of len(weight)."""
        runs = src.float().unflatten(1, (-1, step.weight.shape[0]))
        if step.centred:
            out = F.layer_norm(runs, step.weight.shape, step.weight, step.bias, step.eps)
        else:
            out = F.rms_norm(runs, step.weight.shape, step.weight, step.eps)
        return out.flatten(1).to(dtype)

    def project(self, step: Project, src: torch.Tensor, wide: bool) -> torch.Tensor:
        """src [r, inputs] to [r, num_outputs] of the weight's dtype, or fp32 if `wide`."""
        dtype = step.weight.dtype
        rows = src.to(dtype) if step.norm is None else self.norm(step.norm, src, dtype)
        out = product(rows, dense(step.weight), wide)
        if step.bias is not None:
            out = (out + step.bias).to(out.dtype)
        if not step.gated:
            return self.activate(step, out)
        assert step.activation is not None
        gate, up = out.float().chunk(2, dim=1)
        return (ACTIVATIONS[step.activation](gate) * up).to(out.dtype)

    def activate(self, step: Project, out: torch.Tensor) -> torch.Tensor:
        return out if step.activation is None else ACTIVATIONS[step.activation](out)

    def project_into(self, step: Project, src: torch.Tensor, dst: torch.Tensor) -> None:
        """dst [r, num_outputs] += the product."""
        dst += self.project(step, src, wide=False)

    def rotate_and_store(
        self, step: Attention, qkv: torch.Tensor, places: Places, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Turn q and k in place, qkv [r, (h + 2 g) d]; keys and values [blocks, g, s, d] take the rows' k and v."""
        attend, block_size = step.attend, keys.shape[2]
        if step.turns is not None:
            turned = qkv[:, : attend.q.width + attend.k.width]
            heads = turned.float().unflatten(1, (-1, 2, attend.head_size // 2))
            cos, sin = step.turns[places.positions].unsqueeze(2).unbind(1)  # each [r, 1, d / 2]
            first, second = heads.unbind(2)
            both = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=2)
            turned.copy_(both.flatten(1))
        blocks, offsets = places.slots // block_size, places.slots % block_size
        for span, cache in ((attend.k, keys), (attend.v, values)):
            part = qkv[:, span.start : span.start + span.width].unflatten(1, (-1, attend.head_size))
            cache[blocks, :, offsets] = part.to(cache.dtype)

    def attend(
        self, step: Attention, qkv: torch.Tensor, places: Places, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Attention of all rows over their sequences, [r, h d]."""
        out = qkv.new_zeros(qkv.shape[0], step.attend.q.width)  # rows that fill up a graph attend to nothing
        if len(places.singles):
            self.attend_singles(step, qkv, places, keys, values, out)
        for run in places.runs:
            attend_run(step, qkv, places.table()[run.sequence], run, keys, values, out)
        return out

    def attend_singles(
        self,
        step: Attention,
        qkv: torch.Tensor,
        places: Places,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Rows that are attended one by one, all at once."""
        attend, rows = step.attend, places.singles
        positions = places.positions[rows][:, None]  # [n, 1]
        blocks = places.table()[places.sequences[rows]]  # [n, width]
        k = keys[blocks].transpose(1, 2).flatten(2, 3)  # [n, g, width * s, d]
        v = values[blocks].transpose(1, 2).flatten(2, 3)
        at = torch.arange(k.shape[2], device=k.device)
        seen = at <= positions
        if attend.window is not None:
            seen &= at > positions - attend.window
        q = qkv[rows, attend.q.start : attend.q.start + attend.q.width].unflatten(1, (k.shape[1], -1, attend.head_size))
        scores = (q.float() @ k.float().transpose(2, 3)) * attend.scale  # [n, g, h / g, width * s]
        weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(dim=-1)
        # What was never written must not be multiplied: zero times not-a-number is not zero.
        v = torch.where(seen[:, None, :, None], v.float(), 0)
        out[rows] = (weights @ v).flatten(1).to(out.dtype)


def product(rows: torch.Tensor, weight: torch.Tensor, wide: bool) -> torch.Tensor:
    """rows [r, inputs] @ weight.T; `wide`: fp32, so that close logits do not become equal ones."""
    if rows.is_cuda and wide and weight.dtype != torch.float32:
        return torch.mm(rows, weight.t(), out_dtype=torch.float32)
    if rows.is_cuda or weight.dtype == torch.float32:
        return F.linear(rows, weight)
    # Not all CPUs multiply 16-bit numbers.
    out = F.linear(rows.float(), weight.float())
    return out if wide else out.to(weight.dtype)


def attend_run(
    step: Attention,
    qkv: torch.Tensor,
    blocks: torch.Tensor,
    run: Run,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Rows of one sequence together; `blocks` is its row of the table."""
    attend, stop = step.attend, run.start + run.count
    rows = slice(run.first, run.first + run.count)
    blocks = blocks[: -(-stop // keys.shape[2])]
    k = keys[blocks].transpose(0, 1).flatten(1, 2)[None, :, :stop]  # [1, g, stop, d]
    v = values[blocks].transpose(0, 1).flatten(1, 2)[None, :, :stop]
    q = qkv[rows, attend.q.start : attend.q.start + attend.q.width].unflatten(1, (-1, attend.head_size))
    at = torch.arange(stop, device=qkv.device)
    positions = at[run.start :, None]
    seen = at <= positions
    if attend.window is not None:
        seen &= at > positions - attend.window
    found = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k, v, attn_mask=seen, scale=attend.scale, enable_gqa=True
    )
    out[rows] = found[0].transpose(0, 1).flatten(1)
