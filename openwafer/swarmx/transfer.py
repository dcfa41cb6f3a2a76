"""Tensors and messages from rank to rank over torch.distributed, point to point."""

import datetime
import struct
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

NEVER = datetime.timedelta(days=3650)  # ranks wait for each other's work; heartbeats find those that are lost
_CHUNK_BYTES = 32 << 20  # a Unit of any size passes in pieces of this
_FRAME_BYTES = 4096
_LENGTH = struct.Struct("<q")


class Transfer:
    """Some sends or receives under way."""

    def __init__(self, works: Iterable[Any]) -> None:
        self._works = list(works)

    def wait(self, most: datetime.timedelta | None = None) -> None:
        """Until all are done; RuntimeError when the other side is gone, or each takes longer (default: the group's)."""
        for work in self._works:
            work.wait() if most is None else work.wait(most)


def start_send(group: Any, tensor: Tensor, rank: int, tag: int) -> Transfer:
    return Transfer(group.send([chunk], rank, tag) for chunk in _chunks(tensor))


def start_receive(group: Any, tensor: Tensor, rank: int, tag: int) -> Transfer:
    return Transfer(group.recv([chunk], rank, tag) for chunk in _chunks(tensor))


def _chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.reshape(-1).view(torch.uint8).split(_CHUNK_BYTES)


class GroupConnection:
    """Whole messages to and from one rank: what a `Channel` needs.

    The first frame has the length and what fits beside it, so that a short message is one transfer.
    """

    def __init__(self, group: Any, rank: int, tag: int = 0) -> None:
        self._group = group
        self._rank = rank
        self._tag = tag

    def send_bytes(self, data: bytes, /) -> None:
        frame = bytearray(_FRAME_BYTES)
        _LENGTH.pack_into(frame, 0, len(data))
        inline = data[: _FRAME_BYTES - _LENGTH.size]
        frame[_LENGTH.size : _LENGTH.size + len(inline)] = inline
        start_send(self._group, torch.frombuffer(frame, dtype=torch.uint8), self._rank, self._tag).wait()
        if len(data) > len(inline):
            rest = torch.frombuffer(bytearray(data[len(inline) :]), dtype=torch.uint8)
            start_send(self._group, rest, self._rank, self._tag).wait()

    def recv_bytes(self) -> bytes:
        frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        start_receive(self._group, frame, self._rank, self._tag).wait()
        data = frame.numpy().tobytes()
        (length,) = _LENGTH.unpack_from(data)
        inline = data[_LENGTH.size : _LENGTH.size + length]
        if len(inline) == length:
            return inline
        rest = torch.empty(length - len(inline), dtype=torch.uint8)
        start_receive(self._group, rest, self._rank, self._tag).wait()
        return inline + rest.numpy().tobytes()

    def close(self) -> None:
        pass
