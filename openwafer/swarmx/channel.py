"""Messages between two ranks over any connection, with heartbeats: a rank that dies, hangs or is cut off is noticed.

Each rank sends heartbeats, four or more per `timeout_s`. One from which nothing comes for `timeout_s` is lost, and so
is one whose connection breaks. A rank that was itself stopped for a while (Ctrl-Z, a debugger) gives the others
their time again.
"""

import collections
import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from openwafer.errors import UserError
from openwafer.swarmx.message import Message

ALIVE = "alive"
FAILED = "failed"  # a rank tells of an error of its own
LOST = "lost"  # a rank tells the others which one is gone
_BEATS = 4  # per timeout, at least
_LONGEST_PAUSE_S = 1.0  # the live view shows what heartbeats say
_TELL_S = 2.0  # for telling the other ranks why this one leaves
_START_TIMEOUT_S = 600.0  # until the first sign of life: a busy host may take long to start processes


class RankLost(UserError):
    """A rank died, hangs, or cannot be reached."""

    def __init__(self, who: str, why: str) -> None:
        super().__init__(f"{who} was lost: {why}")
        self.who = who
        self.why = why


class Connection(Protocol):
    """Bytes to and from one other rank, whole messages in order."""

    def send_bytes(self, data: bytes, /) -> None: ...

    def recv_bytes(self) -> bytes: ...

    def close(self) -> None: ...


class Mailbox:
    """Messages that came, by sender and kind, for whoever waits for them."""

    def __init__(self) -> None:
        self._messages: dict[tuple[int, str], collections.deque[Message]] = {}
        self._changed = threading.Condition()
        self.lost: BaseException | None = None  # what whoever waits is told

    def put(self, sender: int, message: Message) -> None:
        with self._changed:
            self._messages.setdefault((sender, message.kind), collections.deque()).append(message)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """From now on whoever waits is told; the first failure counts, others follow from it."""
        with self._changed:
            self.lost = self.lost or error
            self._changed.notify_all()

    def get(self, sender: int, *kinds: str) -> Message:
        """The next message of one of these kinds from `sender`; raises when a rank is lost."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost or any(self._messages.get((sender, kind)) for kind in kinds))
            if self.lost:
                raise self.lost
            kind = next(kind for kind in kinds if self._messages.get((sender, kind)))
            return self._messages[sender, kind].popleft()

    def clear(self) -> None:
        """Forget what came and was not asked for."""
        with self._changed:
            self._messages.clear()


@dataclass(eq=False)
class Peer:
    """The other end of a channel. `status` is what its last heartbeat said."""

    rank: int
    name: str  # "csx 2 (process 4711)"
    status: dict[str, Any]
    status_changed: float  # when it last said something new, by our clock


class Channel:
    """One connection, read by a thread into a mailbox; `status` gives what our heartbeats tell."""

    def __init__(
        self,
        connection: Connection,
        mailbox: Mailbox,
        *,
        rank: int,
        name: str,
        timeout_s: float,
        status: Callable[[], dict[str, Any]],
        on_lost: Callable[[RankLost], None] | None = None,
        on_quiet: Callable[[], None] | None = None,
    ) -> None:
        """`on_quiet` is called when half of `timeout_s` has passed in silence; it may take a quarter of it."""
        self.peer = Peer(rank, name, {}, time.monotonic())
        self._connection = connection
        self._mailbox = mailbox
        self._timeout_s = timeout_s
        self._status = status
        self._on_lost = on_lost
        self._on_quiet = on_quiet
        self._send_lock = threading.Lock()
        self._last_heard = time.monotonic()
        self._patience_s = max(_START_TIMEOUT_S, timeout_s)
        self._pause_s = min(timeout_s / _BEATS, _LONGEST_PAUSE_S)
        self._is_closed = threading.Event()
        for target in (self._read, self._beat, self._watch):
            threading.Thread(target=target, name=f"openwafer-{target.__name__}-{rank}", daemon=True).start()

    def send(self, message: Message) -> None:
        try:
            with self._send_lock:
                self._connection.send_bytes(message.encoded())
        except (OSError, RuntimeError, ValueError) as error:
            self._lose(f"cannot send to it ({error})")
            raise self._mailbox.lost or error from None

    def stop(self) -> None:
        """From now on the other side may go."""
        self._is_closed.set()

    def close(self) -> None:
        self.stop()
        with contextlib.suppress(OSError):
            self._connection.close()

    def _read(self) -> None:
        while not self._is_closed.is_set():
            try:
                message = Message.decoded(self._connection.recv_bytes())
            except (EOFError, OSError, RuntimeError) as error:
                return self._lose(_reason(error))
            self._last_heard, self._patience_s = time.monotonic(), self._timeout_s
            if message.kind == ALIVE:
                if message.fields != self.peer.status:
                    self.peer.status, self.peer.status_changed = message.fields, self._last_heard
            elif message.kind == FAILED:
                self._mailbox.fail(UserError(message.fields["error"]))
            elif message.kind == LOST:
                self._fail(RankLost(message.fields["who"], message.fields["why"]))
            else:
                self._mailbox.put(self.peer.rank, message)

    def _beat(self) -> None:
        """Sends heartbeats; a thread of its own, for sending to a rank that hangs may take for ever."""
        while not self._is_closed.wait(self._pause_s):
            with contextlib.suppress(UserError, OSError, RuntimeError, ValueError):
                self.send(Message(ALIVE, self._status()))

    def _watch(self) -> None:
        """Looks for heartbeats of the other side."""
        before = time.monotonic()
        looked_at = 0.0  # the silence since then was looked at
        while not self._is_closed.wait(self._pause_s):
            now = time.monotonic()
            if now - before > self._pause_s + self._timeout_s / 2:  # it was we who stood still
                self._last_heard = now
            before = now
            if now - self._last_heard > self._patience_s:
                return self._lose(f"nothing was heard of it for {self._patience_s:g} s")
            is_quiet = now - self._last_heard > self._patience_s / 2 and self._patience_s == self._timeout_s
            if is_quiet and self._on_quiet is not None and looked_at != self._last_heard:
                looked_at = self._last_heard
                self._on_quiet()

    def _lose(self, why: str) -> None:
        if not self._is_closed.is_set():
            self._fail(RankLost(self.peer.name, why))

    def _fail(self, error: RankLost) -> None:
        self._mailbox.fail(error)
        if self._on_lost is not None:
            self._on_lost(error)


def tell_all(channels: Iterable[Channel], message: Message) -> None:
    """At once and for a short time only: some may be gone."""
    threads = [threading.Thread(target=_quietly, args=(channel, message), daemon=True) for channel in channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_TELL_S)


def _quietly(channel: Channel, message: Message) -> None:
    with contextlib.suppress(UserError, OSError, RuntimeError, ValueError):  # that rank is gone too
        channel.send(message)


def _reason(error: Exception) -> str:
    """What happened to a connection, without the place in the library that noticed."""
    said = str(error)
    if isinstance(error, EOFError) or not said or "closed by peer" in said or "reset by peer" in said:
        return "its connection was closed"
    return re.sub(r"^\[[^]]*\] ", "", said.splitlines()[0])
