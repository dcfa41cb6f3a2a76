"""What a store sees of its workers: it speaks to them, casts weights to all of them and collects their gradients."""

import collections
import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from openwafer.graph import Unit
from openwafer.memoryx.store import Store
from openwafer.memoryx.tier import Key
from openwafer.swarmx.channel import Channel, Mailbox
from openwafer.swarmx.message import Message
from openwafer.swarmx.tree import Parts

_WINDOW = 2  # Units on their way at one time
Shares = list[Mapping[str, Parts]]  # of each worker: its parts of the gradient of each weight


@dataclass(eq=False)
class Traffic:
    """Bytes that went over the fabric, all workers together."""

    broadcast_bytes: int = 0
    reduced_bytes: int = 0


class Hub(ABC):
    """N workers. Weights are cast by a thread of their own, so a store updates and reduces meanwhile.

    `ready` blocks until a Unit's array may be sent, that is until its update is done.
    """

    def __init__(
        self, store: Store, mailbox: Mailbox, ready: Callable[[int], None], channels: Sequence[Channel]
    ) -> None:
        self.store = store
        self.mailbox = mailbox
        self.traffic = Traffic()
        self.channels = list(channels)  # one per worker, in order
        self._ready = ready
        self._orders: queue.Queue[Sequence[Unit] | None] = queue.Queue()
        self._caster = threading.Thread(target=self._cast_all, name="openwafer-caster", daemon=True)
        self._caster.start()

    @property
    def num_csx(self) -> int:
        return len(self.channels)

    def tell(self, csx: int, message: Message) -> None:
        self.channels[csx].send(message)

    def tell_all(self, message: Message) -> None:
        for channel in self.channels:
            channel.send(message)

    def hear(self, csx: int, kind: str) -> Message:
        """The worker's next message of this kind; raises `RankLost` if a rank is gone."""
        return self.mailbox.get(self.channels[csx].peer.rank, kind)

    def cast(self, order: Sequence[Unit]) -> None:
        """Send every worker the weights of these Units, each as soon as it is up to date. Returns at once."""
        self._orders.put(list(order))

    @abstractmethod
    def expect(self, total: int) -> None:
        """Gradients of a batch of so many micro-batches are about to be collected."""

    @abstractmethod
    def collect(self, unit: Unit) -> contextlib.AbstractContextManager[Shares]:
        """The gradients of a Unit's weights from every worker; valid inside. Units come in reverse order."""

    @abstractmethod
    def push(self, unit: Unit, flats: Mapping[Key, Tensor]) -> Callable[[], None]:
        """Start to send one Unit's arrays to all workers; gives what waits until they may change."""

    def close(self) -> None:
        self._orders.put(None)
        self._caster.join(timeout=5)

    def _cast_all(self) -> None:
        try:
            while (order := self._orders.get()) is not None:
                self._cast(order)
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits for a worker
            self.mailbox.fail(error)

    def _cast(self, order: Sequence[Unit]) -> None:
        sent: collections.deque[Callable[[], None]] = collections.deque()
        for position, unit in enumerate(order):
            for coming in order[position : position + 3]:
                self.store.prefetch(coming)
            for key in self.store.wires(unit):
                self._ready(key[0])
            with self.store.lent(unit) as flats:
                sent.append(self.push(unit, flats))
                # What stays in memory may still be on its way while the next is sent: it changes only after its
                # gradients came, and so after it arrived everywhere.
                while sent and (len(sent) > _WINDOW or not self.store.is_resident(unit)):
                    sent.popleft()()
        while sent:
            sent.popleft()()
