"""Layers that do not fit on the device: their weights are on the host, and are copied in ahead of each use.

Copies go into a ring of buffers. Every step runs the streamed layers in the same order, so what is copied after the
last layer is the first one again, for the next step. Nobody waits on the host (but for flash): a copy waits on the
device until the layer that had the buffer before is computed, and a layer until its copy has landed.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from openwafer.csx.device import Moment
from openwafer.serve.gpu.device import Device
from openwafer.serve.gpu.layer_shelf import FlashShelf, HostPiece, Piece
from openwafer.serve.gpu.plan import Attention, Step, Streamed

NUM_BUFFERS = 2  # one is computed with while the next is copied; copies wait for nothing else, so more gain nothing
ALIGNMENT = 256  # bytes; of every tensor within its layer


@dataclass(frozen=True)
class Place:
    """Of a tensor within its layer."""

    start: int  # in bytes
    dtype: torch.dtype
    shape: torch.Size

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        num_bytes = self.shape.numel() * self.dtype.itemsize
        return flat[self.start : self.start + num_bytes].view(self.dtype).view(self.shape)


class StreamedLayer:
    """A layer's weights in one piece, and its steps once for each buffer that they may be copied into."""

    def __init__(self, stream: "LayerStream", piece: Piece, num_bytes: int, steps: Sequence[Step]) -> None:
        """`steps`: with tensors of which only the shapes are looked at."""
        self.piece = piece
        self.num_bytes = num_bytes
        self.steps_in: list[tuple[Step, ...]] = []  # filled by the stream when it has its buffers
        self._stream = stream
        self._steps = steps

    def bring(self) -> tuple[Step, ...]:
        return self._stream.bring(self)

    def done(self) -> None:
        self._stream.done(self)

    def over(self, buffer: torch.Tensor) -> tuple[Step, ...]:
        """The steps with their weights in a buffer."""
        places = iter(_places(self._steps)[0])
        return tuple(_moved(step, lambda _: next(places).of(buffer)) for step in self._steps)


class LayerStream:
    def __init__(self, device: Device, shelf: FlashShelf | None = None, num_buffers: int = NUM_BUFFERS) -> None:
        """`shelf`: for layers that are not kept in host memory."""
        self._device = device
        self._shelf = shelf
        self._num_buffers = num_buffers
        self._layers: list[StreamedLayer] = []  # in the order in which steps use them
        self._buffers: list[torch.Tensor] = []
        self._landed: list[Moment] = []  # of each buffer: what it was last promised is there
        self._released: list[Moment] = []  # of each buffer: what it held before is not needed any more
        # Counted over all steps; the n-th copy goes into buffer n modulo their number.
        self._num_copies = 0
        self._num_uses = 0

    def take(self, steps: Sequence[Step], *, on_flash: bool = False) -> Streamed:
        """Move the weights of the next layer to the host."""
        places, num_bytes = _places(steps)
        if on_flash:
            assert self._shelf is not None
            with self._shelf.putting(num_bytes) as (flat, piece):
                _fill(flat, steps, places)
        else:
            flat = self._device.host_memory(num_bytes, torch.uint8)
            piece = HostPiece(flat)
            _fill(flat, steps, places)
        shapes = [_moved(step, lambda tensor: torch.empty_like(tensor, device="meta")) for step in steps]
        self._layers.append(StreamedLayer(self, piece, num_bytes, shapes))
        return Streamed(source=self._layers[-1], dst=_dst(steps[-1]))

    def close(self) -> None:
        """No step is under way any more. Copies may be: the memory that they read must stay until they have landed."""
        try:
            for landed in self._landed:
                landed.synchronize()
        finally:
            if self._shelf is not None:
                self._shelf.close()

    def start(self) -> None:
        """All layers are here: get the buffers, and have the first layers copied."""
        if not self._layers:
            return
        if self._shelf is not None:
            self._shelf.finish()
        largest = max(layer.num_bytes for layer in self._layers)
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
        target = self._buffers[at][: layer.num_bytes]
        self._landed[at] = self._device.copy_in(target, layer.piece.lend(), after=self._released[at])
        layer.piece.give_back(self._landed[at])
        self._num_copies += 1


def _places(steps: Sequence[Step]) -> tuple[list[Place], int]:
    """Of all tensors one after the other, and the bytes of all."""
    places: list[Place] = []
    num_bytes = 0
    for step in steps:
        for tensor in weights_of(step):
            places.append(Place(num_bytes, tensor.dtype, tensor.shape))
            num_bytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return places, num_bytes


def _fill(flat: torch.Tensor, steps: Sequence[Step], places: Sequence[Place]) -> None:
    tensors = [tensor for step in steps for tensor in weights_of(step)]
    for tensor, place in zip(tensors, places, strict=True):
        place.of(flat).copy_(tensor)


def weights_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a step that belong to its layer alone: not the table of rotations, which all layers share."""
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, Attention):
        for field in dataclasses.fields(value):
            yield from weights_of(getattr(value, field.name))


def _moved(value: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same with other tensors, in the order of `weights_of`."""
    if isinstance(value, torch.Tensor):
        return move(value)
    if not dataclasses.is_dataclass(value) or isinstance(value, Attention):
        return value
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    moved = {name: _moved(inner, move) for name, inner in fields.items()}
    changed = {name: inner for name, inner in moved.items() if inner is not fields[name]}
    return dataclasses.replace(cast(Any, value), **changed) if changed else value


def _dst(step: Step) -> Any:
    return step.attend.dst if isinstance(step, Attention) else step.dst
