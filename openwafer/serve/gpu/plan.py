"""A program's operations joined into as few steps as a GPU can do each in one go, with the weights on the device.

A norm joins the product that reads it, an activation the product that feeds it, a rotation the attention after it.
What finds no partner stays as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from openwafer.serve.gpu.packed_weight import PackedWeight, Weight
from openwafer.serve.matrix import Matrix
from openwafer.serve.program import (
    Activate,
    Activation,
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Look:
    """dst = table[token] * scale"""

    dst: Span
    table: Weight
    scale: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Project:
    """out = activation(norm(src) @ weight.T + bias); dst = out, or dst += out.

    `gated`: the weight has twice the rows, and out = activation(first half) * second half.
    """

    dst: Span
    src: Span
    weight: Weight  # [outputs, inputs]
    norm: Norm | None = None
    bias: torch.Tensor | None = None
    activation: Activation | None = None
    gated: bool = False
    adds: bool = False

    @property
    def num_outputs(self) -> int:
        return self.weight.shape[0] // (2 if self.gated else 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Attention:
    """Turn q and k by their positions (where there are `turns`), store k and v, attend."""

    attend: Attend
    turns: torch.Tensor | None  # fp32 [positions, 2, head_size / 2]: cosines and sines


class StepSource(Protocol):
    """Steps whose weights are on the device for a while only."""

    @property
    def num_bytes(self) -> int:
        """That are copied to the device each time."""
        ...

    def bring(self) -> "tuple[Step, ...]":
        """The steps, which may be run until `done`."""
        ...

    def done(self) -> None: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Streamed:
    """The steps of a layer, their weights copied in ahead; `layer_stream.py`."""

    source: StepSource
    dst: Span


Step = Look | AddPosition | Norm | Project | Attention | Activate | Add | Streamed


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`body` for all rows, `head` for those whose logits are wanted."""

    body: tuple[Step, ...]
    head: tuple[Step, ...]


def make_plan(program: Program, device: torch.device, dtype: torch.dtype, max_positions: int) -> Plan:
    """Matrices become [outputs, inputs] on the device, of `dtype` unless they are packed.

    Norms, biases and rotations stay fp32.
    """
    planner = Planner(device, dtype, max_positions)
    return Plan(body=planner.joined(program.body), head=planner.joined(program.head))


class Planner:
    """Makes steps of operations, with their weights on a device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, max_positions: int) -> None:
        self._device = device
        self._dtype = dtype
        self._max_positions = max_positions
        self._matrices: dict[Matrix, Weight] = {}  # a tied head is the embedding
        self._turns: dict[int, torch.Tensor] = {}

    def joined(self, operations: Sequence[Operation]) -> tuple[Step, ...]:
        steps: list[Step] = []
        index = 0
        while index < len(operations):
            step, count = self._step(operations[index:])
            steps.append(step)
            index += count
        return tuple(steps)

    def joined_layer(self, operations: Sequence[Operation]) -> tuple[Step, ...]:
        """As `joined`, for operations whose matrices nothing else shares: they may be dropped afterwards."""
        before = dict(self._matrices)
        steps = self.joined(operations)
        self._matrices = before
        return steps

    def _step(self, operations: Sequence[Operation]) -> tuple[Step, int]:
        """The step that these operations begin with, and how many of them are in it."""
        first = operations[0]
        second = operations[1] if len(operations) > 1 else None
        third = operations[2] if len(operations) > 2 else None
        match first:
            case Embed():
                return Look(dst=first.dst, table=self._matrix(first.table), scale=first.scale), 1
            case Norm():
                norm = replace(first, weight=self._vector(first.weight), bias=self._bias(first.bias))
                whole_rows = first.weight.shape[0] == first.src.width
                read_once = not (isinstance(third, Linear) and third.src == first.dst)
                if whole_rows and read_once and isinstance(second, Linear) and second.src == first.dst:
                    project, count = self._project(second, third)
                    return replace(project, norm=norm, src=first.src), count + 1
                return norm, 1
            case Linear():
                return self._project(first, second)
            case Rotate():
                assert isinstance(second, Attend)
                return Attention(attend=second, turns=self._turned(first.frequencies)), 2
            case Attend():
                return Attention(attend=first, turns=None), 1
            case AddPosition():
                return replace(first, table=self._vector(first.table)), 1
            case Activate() | Add():
                return first, 1

    def _project(self, linear: Linear, after: Operation | None) -> tuple[Project, int]:
        project = Project(
            dst=linear.dst,
            src=linear.src,
            weight=self._matrix(linear.matrix),
            bias=self._bias(linear.bias),
            adds=linear.adds,
        )
        if not isinstance(after, Activate) or linear.adds:
            return project, 1
        gate, up = after.dst, after.up
        if up is None and gate == linear.dst:
            return replace(project, activation=after.kind), 2
        starts_alike = (gate.buffer, gate.start) == (linear.dst.buffer, linear.dst.start)
        if up == Span(gate.buffer, gate.start + gate.width, gate.width) and starts_alike:
            return replace(project, dst=gate, activation=after.kind, gated=True), 2
        return project, 1

    def _matrix(self, matrix: Matrix) -> Weight:
        if matrix not in self._matrices:
            # Laid out anew on the device: reordering gigabytes takes the host longer than sending them.
            there = replace(matrix, data=matrix.data.to(self._device))
            is_packed = matrix.is_packed
            weight = PackedWeight.of(there, self._dtype) if is_packed else there.dense(self._dtype).contiguous()
            self._matrices[matrix] = weight
        return self._matrices[matrix]

    def _vector(self, vector: torch.Tensor) -> torch.Tensor:
        return vector.detach().to(self._device, torch.float32).contiguous()

    def _bias(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        return None if bias is None else self._vector(bias)

    def _turned(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Layers that share frequencies share the table."""
        if id(frequencies) not in self._turns:
            positions = torch.arange(self._max_positions, device=self._device, dtype=torch.float32)
            angles = positions[:, None] * self._vector(frequencies)
            self._turns[id(frequencies)] = torch.stack([angles.cos(), angles.sin()], dim=1)
        return self._turns[id(frequencies)]
