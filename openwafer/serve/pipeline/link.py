"""One way of bytes from a process to another on any host: whole messages over torch.distributed.

A link is a process group of two (gloo, over TCP), so that nothing else is sent over it: each end is used by one thread.
It breaks only when the process at its other end is gone, and then at once, with one exception: gloo says nothing to who
has received a part of a message and waits for the rest. That, and a machine that vanishes without closing its
connections, is found by the ranks' channels (`cluster.py`), which then end the `Inbox`.
"""

import datetime
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore

from openwafer.errors import UserError
from openwafer.serve.pipeline.pipe import Broken
from openwafer.swarmx.meeting import open_store
from openwafer.swarmx.torchrun import world_size
from openwafer.swarmx.transfer import NEVER, Transfer, start_receive, start_send

_LENGTH = struct.Struct("<Q")
# A message up to this size is one transfer; a longer one needs a second, which waits for an answer to the first.
_FRAME_BYTES = 32 << 10
_JOIN = datetime.timedelta(minutes=2)  # both ends are told at the same time; a process may have to start first


def joined(name: str, side: int) -> ProcessGroupGloo:
    """The group of two called `name`, once the other side (0 or 1) is there too."""
    # A connection of its own, because one that waits keeps others from using it; and as any rank that is not the first,
    # which would open another store.
    store = open_store(1, world_size())
    try:
        return ProcessGroupGloo(PrefixStore(name, store), side, 2, _JOIN)
    except RuntimeError as error:
        raise UserError(
            f"no connection for {name.rpartition('/')[2]} within {_JOIN.total_seconds():g} s "
            f"({str(error).splitlines()[0]}): every host must reach every other; $GLOO_SOCKET_IFNAME names the network"
        ) from None


class Link:
    """One end, with the promises of a `Pipe`."""

    def __init__(self, name: str, side: int) -> None:
        self._name = name
        self._side = side
        self._lock = threading.Lock()
        self._group: ProcessGroupGloo | None = None

    def join(self) -> ProcessGroupGloo:
        """Wait for the other end, unless it is there. UserError if it does not come."""
        with self._lock:
            if self._group is None:
                self._group = joined(self._name, self._side)
            return self._group

    def send(self, parts: Sequence[Any]) -> None:
        """One message of several buffers."""
        views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
        length = sum(view.nbytes for view in views)
        message = torch.empty(max(_FRAME_BYTES, _LENGTH.size + length), dtype=torch.uint8)
        into, at = message.numpy().data, _LENGTH.size
        _LENGTH.pack_into(into, 0, length)
        for view in views:
            into[at : at + view.nbytes] = view
            at += view.nbytes
        for piece in (message[:_FRAME_BYTES], message[_FRAME_BYTES:]):
            if len(piece):
                self._transfer(start_send, piece)

    def receive(self) -> memoryview:
        message = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        self._transfer(start_receive, message)
        (length,) = _LENGTH.unpack_from(message.numpy().data)
        end = _LENGTH.size + length
        if end > _FRAME_BYTES:
            frame, message = message, torch.empty(end, dtype=torch.uint8)
            message[:_FRAME_BYTES] = frame
            self._transfer(start_receive, message[_FRAME_BYTES:])
        return message.numpy().data[_LENGTH.size : end]

    def _transfer(self, start: Callable[[Any, torch.Tensor, int, int], Transfer], piece: torch.Tensor) -> None:
        try:
            start(self.join(), piece, 1 - self._side, 0).wait(NEVER)  # there may be nothing to do for long
        except (RuntimeError, UserError) as error:
            raise Broken(str(error)) from None
