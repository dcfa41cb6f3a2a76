"""Rank 0's side of a server on several hosts: channels to the other ranks, over which they are told what to do.

Each rank sends heartbeats. Whatever goes wrong on one of them ends all, with a message that names it.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn

from openwafer.errors import UserError
from openwafer.serve.pipeline.link import Link, joined
from openwafer.serve.pipeline.members import Members
from openwafer.serve.pipeline.pipe import Inbox
from openwafer.serve.pipeline.processes import StageLost
from openwafer.serve.pipeline.spec import StageSpec
from openwafer.swarmx.channel import FAILED, LOST, Channel, Mailbox, RankLost, tell_all
from openwafer.swarmx.message import Message
from openwafer.swarmx.transfer import GroupConnection

OPEN = "open"  # load this
READY = "ready"
LEAVE = "leave"  # a rank was asked to end
STOP = "stop"  # all is well, and over
LOST_AFTER_S = 30.0  # of silence


def channel_to(members: Members, rank: int, mailbox: Mailbox) -> Channel:
    """Between rank 0 and another: `rank` is the one at the other end."""
    side, other = (0, rank) if members.rank == 0 else (1, members.rank)
    return Channel(
        GroupConnection(joined(members.link(f"control-{other}"), side), 1 - side),
        mailbox,
        rank=rank,
        name=members.names[rank],
        timeout_s=LOST_AFTER_S,
        status=dict,
    )


class Cluster:
    """A context manager: at its end all ranks are told that it is over, or what went wrong."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self._results: Inbox | None = None
        self._mailbox = Mailbox()
        self._lock = threading.Lock()
        self._is_released = False
        self._status = 1  # of this process, when it ends
        atexit.register(lambda: end_at_once(self._status))
        ranks = range(1, len(members.names))
        self._channels = {rank: channel_to(members, rank, self._mailbox) for rank in ranks}
        for rank in ranks:
            threading.Thread(target=self._hear, args=(rank,), name=f"openwafer-hear-{rank}", daemon=True).start()

    @property
    def failure(self) -> StageLost | None:
        """The first thing that went wrong on any rank."""
        error = self._mailbox.lost
        return None if error is None else StageLost(str(error))

    def open(self, specs: Sequence[StageSpec]) -> Inbox:
        """Have all other ranks load their stages; `await_ready` waits for them. Where results will come."""
        for rank, channel in self._channels.items():
            channel.send(Message(OPEN, {"spec": specs[rank].encoded().decode()}))
        # Not before: the last stage comes to this link when it is told, and planning may have taken long.
        self._results = Inbox(Link(self.members.link("results"), side=1))
        return self._results

    def own_is_ready(self) -> None:
        self._mailbox.put(0, Message(READY))

    def await_ready(self) -> None:
        """Until all stages have loaded, ours too."""
        for rank in range(len(self.members.names)):
            self._mailbox.get(rank, READY)

    def fail(self, error: UserError) -> None:
        """Of our own, unless another was first."""
        if not self._is_released:
            self._mailbox.fail(error)

    def release(self) -> None:
        """Tell all ranks to go, and why."""
        with self._lock:
            if self._is_released:
                return
            self._is_released = True
        for channel in self._channels.values():
            channel.stop()
        error = self._mailbox.lost
        message = Message(STOP)
        if isinstance(error, RankLost):
            message = Message(LOST, {"who": error.who, "why": error.why})
        elif error is not None:
            message = Message(FAILED, {"error": str(error)})
        tell_all(self._channels.values(), message)

    def _hear(self, rank: int) -> None:
        """A rank that is asked to end asks us; when something goes wrong, nobody waits for results any longer."""
        try:
            while True:
                self._mailbox.get(rank, LEAVE)
                os.kill(os.getpid(), signal.SIGTERM)  # lets answers finish
        except UserError:
            if self._results is not None:
                self._results.end()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            what = str(error) if isinstance(error, UserError) else f"rank 0 has ended: {type(error).__name__} {error}"
            self.fail(UserError(what))
        failure = self.failure
        self.release()
        if failure is None:
            self._status = 0
        elif error is None or isinstance(error, UserError):
            self._status = 2
        if error is None and failure is not None:
            raise failure


def end_at_once(status: int) -> NoReturn:
    """torch.distributed aborts a process that ends while threads wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
