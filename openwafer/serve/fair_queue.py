"""The waiting requests: clients take turns, and one client's requests keep their order."""

from collections import OrderedDict, deque
from collections.abc import Iterator

from openwafer.serve.sequence import Sequence


class FairQueue:
    """A client with a thousand requests delays another's first one by at most one request."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, deque[Sequence]] = OrderedDict()  # the next to be served first
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        for waiting in self._clients.values():
            yield from waiting

    def push(self, sequence: Sequence) -> None:
        self._clients.setdefault(sequence.request.client, deque()).append(sequence)
        self._length += 1

    def push_front(self, sequence: Sequence) -> None:
        """One that already ran and had to give way comes first, whoever's turn it is."""
        client = sequence.request.client
        self._clients.setdefault(client, deque()).appendleft(sequence)
        self._clients.move_to_end(client, last=False)
        self._length += 1

    def peek(self) -> Sequence | None:
        return next(iter(self._clients.values()))[0] if self._clients else None

    def pop(self) -> Sequence:
        """The one that `peek` showed; its client goes to the end of the line."""
        client, waiting = next(iter(self._clients.items()))
        sequence = waiting.popleft()
        self._length -= 1
        if waiting:
            self._clients.move_to_end(client)
        else:
            del self._clients[client]
        return sequence

    def remove(self, sequence: Sequence) -> None:
        waiting = self._clients[sequence.request.client]
        waiting.remove(sequence)
        self._length -= 1
        if not waiting:
            del self._clients[sequence.request.client]
