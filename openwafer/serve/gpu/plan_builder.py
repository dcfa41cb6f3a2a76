"""A plan made part by part while a model is loaded, so that the host never holds more of it than it must."""

import dataclasses

import torch

from openwafer.serve.gpu.device import Device
from openwafer.serve.gpu.layer_shelf import FlashShelf
from openwafer.serve.gpu.layer_stream import LayerStream
from openwafer.serve.gpu.plan import Plan, Planner, Step
from openwafer.serve.program import Linear, Operation
from openwafer.serve.region import Part, Region
from openwafer.serve.stream import without_data


class PlanBuilder:
    """Takes operations as they are loaded: weights go to the device, or to the memory that they are streamed from.

    See `loading.Taker`. Layers must come in the order of the model among those that are streamed.
    """

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        max_positions: int,
        streamed_layers: frozenset[int],
        flash_layers: frozenset[int] = frozenset(),
        shelf: FlashShelf | None = None,
    ) -> None:
        """`flash_layers` are those of the streamed ones that go to the shelf."""
        self.streamed_layers = streamed_layers
        self.stream = LayerStream(device, shelf)
        self._flash_layers = flash_layers
        self._planner = Planner(device.where, dtype, max_positions)
        self._parts: dict[Part, tuple[Step, ...]] = {}

    def taken(self, part: Part, operations: list[Operation]) -> list[Operation]:
        if not isinstance(part, int):
            # Kept as they are: a tied table comes again, and must be known for the same.
            self._parts[part] = self._planner.joined(operations)
            return operations
        steps = self._planner.joined_layer(operations)
        if part in self.streamed_layers:
            steps = (self.stream.take(steps, on_flash=part in self._flash_layers),)
        self._parts[part] = steps
        return [
            dataclasses.replace(op, matrix=without_data(op.matrix)) if isinstance(op, Linear) else op
            for op in operations
        ]

    def finish(self) -> None:
        self.stream.start()

    def plan(self, region: Region) -> Plan:
        body = tuple(step for part in region.body for step in self._parts[part])
        return Plan(body=body, head=self._parts.get("head", ()))
