"""Carries events from the engine's thread to the server's event loop, many at a time.

Waking the loop costs a system call: the engine's thread does it once, and the loop then takes all events
that have come in.
"""

import asyncio
from collections import deque

from openwafer.serve.core import Event


class Inbox:
    """The events of one request, read by one task. Events of several requests may share an inbox."""

    __slots__ = ("_loop", "_ready", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready: list[tuple[int, Event]] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, index: int, event: Event) -> None:
        """In the event loop's thread only."""
        self._ready.append((index, event))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> list[tuple[int, Event]]:
        """All events that have come since the last call, at least one."""
        if not self._ready:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        ready, self._ready = self._ready, []
        return ready


class Courier:
    """One for a server. `send` may be called from any thread and does not block."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[tuple[Inbox, int, Event]] = deque()
        self._is_coming = False  # a delivery is scheduled and has not begun to take events

    def inbox(self) -> Inbox:
        return Inbox(self._loop)

    def send(self, inbox: Inbox, index: int, event: Event) -> None:
        self._events.append((inbox, index, event))
        if not self._is_coming:
            self._is_coming = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                # The loop is closed: nobody waits for this any more.
                self._events.clear()

    def _deliver(self) -> None:
        # Lowered first: an event that arrives while we take others schedules a delivery of its own.
        self._is_coming = False
        events = self._events
        while events:
            inbox, index, event = events.popleft()
            inbox.put(index, event)
