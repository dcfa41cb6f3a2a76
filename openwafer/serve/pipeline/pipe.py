"""Ways of bytes from a process to the next: whole messages, and a process that is gone is known.

`Pipe` joins processes of one host, over a socket without a name: a message of a decoding step is a few kilobytes and
takes tens of microseconds, without a port, a rendezvous or threads. `Link` (`link.py`) joins hosts, over
`torch.distributed`, and takes several times as long (`bench/pipeline_cpu.py` prints both). A process that dies closes
its ends, however it ended, and whoever reads from a pipe knows at once; `link.py` says when that is not so for a link.
"""

import queue
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any, Protocol

_LENGTH = struct.Struct("<Q")
_BUFFER_BYTES = 1 << 20


class Broken(Exception):
    """The process at the other end is gone."""


class Sender(Protocol):
    """One end of a pipe or a link."""

    def send(self, parts: Sequence[Any]) -> None: ...


class Receiver(Protocol):
    """The other end: waits for a whole message."""

    def receive(self) -> memoryview: ...


class Pipe:
    """One end. Sending returns when the message has left, receiving waits for a whole one."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)

    def send(self, parts: Sequence[Any]) -> None:
        """One message of several buffers, which are not joined first."""
        views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
        views.insert(0, memoryview(_LENGTH.pack(sum(view.nbytes for view in views))))
        try:
            while views:
                sent = self._socket.sendmsg(views)
                while views and sent >= views[0].nbytes:
                    sent -= views.pop(0).nbytes
                if sent:
                    views[0] = views[0][sent:]
        except OSError as error:
            raise Broken(str(error)) from None

    def receive(self) -> memoryview:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return self._exactly(length)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, count: int) -> memoryview:
        view = memoryview(bytearray(count))
        done = 0
        while done < count:
            try:
                received = self._socket.recv_into(view[done:])
            except OSError as error:
                raise Broken(str(error)) from None
            if received == 0:
                raise Broken("the other end was closed")
            done += received
        return view


class Inbox:
    """Messages of a pipe or a link, read by a thread as they come: a sender never waits for who is still computing."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._messages: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def get(self) -> memoryview | None:
        """The next message; None when no more will come."""
        message = self._messages.get()
        if message is None:
            self._messages.put(None)  # for whoever asks again
        return message

    def receive(self) -> memoryview:
        """The next message, or `Broken`."""
        message = self.get()
        if message is None:
            raise Broken("no more will come")
        return message

    def end(self) -> None:
        """Nobody who waits is to wait longer, whether the sender is there or not."""
        self._messages.put(None)

    def _read(self) -> None:
        while True:
            try:
                self._messages.put(self._receiver.receive())
            except Broken:
                self._messages.put(None)
                return
