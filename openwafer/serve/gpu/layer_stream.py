"""Layers that do not fit on the device: their weights are on the host, and are copied in ahead of each use.

Copies go into a ring of buffers. Every step runs the streamed layers in the same order, so what is copied after the
last layer is the first one again, for the next step. Nobody waits on the host: a copy waits on the device until the
layer that had the buffer before is computed, and a layer until its copy has landed.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from openwafer.csx.device import Moment
from openwafer.serve.gpu.device import Device
from openwafer.serve.gpu.plan import Attention, Step, Streamed

NUM_BUFFERS = 2  # one is computed with while the next is copied; copies wait for nothing else, so more gain nothing
ALIGNMENT = 256  # bytes; of every tensor within its layer


class StreamedLayer:
    """A layer's weights on the host in one piece, and its steps once for each buffer that they may be copied into."""

    def __init__(self, stream: "LayerStream", host: torch.Tensor, steps: Sequence[Step]) -> None:
        self.host = host
        self.steps_in: list[tuple[Step, ...]] = []  # filled by the stream when it has its buffers
        self._stream = stream
        self._steps = steps  # with weights that are views of `host`

    @property
    def num_bytes(self) -> int:
        return self.host.nbytes

    def bring(self) -> tuple[Step, ...]:
        return self._stream.bring(self)

    def done(self) -> None:
        self._stream.done(self)

    def over(self, buffer: torch.Tensor) -> tuple[Step, ...]:
        """The steps with their weights in a buffer."""
        return tuple(_moved(step, lambda tensor: _same_place(tensor, self.host, buffer)) for step in self._steps)


class LayerStream:
    def __init__(self, device: Device, num_buffers: int = NUM_BUFFERS) -> None:
        self._device = device
        self._num_buffers = num_buffers
        self._layers: list[StreamedLayer] = []  # in the order in which steps use them
        self._buffers: list[torch.Tensor] = []
        self._landed: list[Moment] = []  # of each buffer: what it was last promised is there
        self._released: list[Moment] = []  # of each buffer: what it held before is not needed any more
        # Counted over all steps; the n-th copy goes into buffer n modulo their number.
        self._num_copies = 0
        self._num_uses = 0

    def take(self, steps: Sequence[Step]) -> Streamed:
        """Move the weights of the next layer to the host."""
        sizes = [_padded(tensor.nbytes) for step in steps for tensor in _weights(step)]
        host = self._device.host_memory(sum(sizes), torch.uint8)
        starts = iter([sum(sizes[:index]) for index in range(len(sizes))])

        def to_host(tensor: torch.Tensor) -> torch.Tensor:
            assert tensor.is_contiguous()
            start = next(starts)
            there = host[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            return there.copy_(tensor)

        layer = StreamedLayer(self, host, [_moved(step, to_host) for step in steps])
        self._layers.append(layer)
        return Streamed(source=layer, dst=_dst(steps[-1]))

    def start(self) -> None:
        """All layers are here: get the buffers, and have the first layers copied."""
        if not self._layers:
            return
        largest = max(layer.host.nbytes for layer in self._layers)
        self._buffers = [self._device.empty(largest, torch.uint8) for _ in range(self._num_buffers)]
        for layer in self._layers:
            layer.steps_in = [layer.over(buffer) for buffer in self._buffers]
        now = self._device.now()
        self._released = [now] * self._num_buffers
        self._landed = [now] * self._num_buffers
        for _ in self._buffers:
            self._copy_next()

    def bring(self, layer: StreamedLayer) -> tuple[Step, ...]:
        """The layer's steps, which may be run from now on until `done`."""
        assert self._layers[self._num_uses % len(self._layers)] is layer, "layers are used in the order of the model"
        at = self._num_uses % self._num_buffers
        self._device.use(self._landed[at])
        return layer.steps_in[at]

    def done(self, layer: StreamedLayer) -> None:
        assert self._layers[self._num_uses % len(self._layers)] is layer
        self._released[self._num_uses % self._num_buffers] = self._device.now()
        self._num_uses += 1
        self._copy_next()

    def _copy_next(self) -> None:
        layer = self._layers[self._num_copies % len(self._layers)]
        at = self._num_copies % self._num_buffers
        target = self._buffers[at][: layer.host.nbytes]
        self._landed[at] = self._device.copy_in(target, layer.host, after=self._released[at])
        self._num_copies += 1


def _weights(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a step that belong to its layer alone: not the table of rotations, which all layers share."""
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, Attention):
        for field in dataclasses.fields(value):
            yield from _weights(getattr(value, field.name))


def _moved(value: Any, move: Any) -> Any:
    """The same with other tensors, in the order of `_weights`."""
    if isinstance(value, torch.Tensor):
        return move(value)
    if not dataclasses.is_dataclass(value) or isinstance(value, Attention):
        return value
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    moved = {name: _moved(inner, move) for name, inner in fields.items()}
    changed = {name: inner for name, inner in moved.items() if inner is not fields[name]}
    return dataclasses.replace(cast(Any, value), **changed) if changed else value


def _same_place(tensor: torch.Tensor, whole: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """What is at the place in `buffer` that `tensor` has in `whole`."""
    start = tensor.data_ptr() - whole.data_ptr()
    return buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _dst(step: Step) -> Any:
    return step.attend.dst if isinstance(step, Attention) else step.dst
