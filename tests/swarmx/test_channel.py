"""Channels: a rank that falls silent is first looked at, then lost."""

import threading
import time
from multiprocessing import Pipe

from openwafer.swarmx.channel import ALIVE, Channel, Mailbox, RankLost
from openwafer.swarmx.message import Message


def test_a_silent_rank_is_looked_at_before_it_is_lost() -> None:
    ours, theirs = Pipe()
    looked: list[float] = []
    lost: list[tuple[float, RankLost]] = []
    is_lost = threading.Event()

    def note_loss(error: RankLost) -> None:
        lost.append((time.monotonic(), error))
        is_lost.set()

    channel = Channel(
        ours,
        Mailbox(),
        rank=1,
        name="rank 1",
        timeout_s=4.0,
        status=dict,
        on_lost=note_loss,
        on_quiet=lambda: looked.append(time.monotonic()),
    )
    for _ in range(4):  # alive
        theirs.send_bytes(Message(ALIVE).encoded())
        time.sleep(0.6)
    assert not looked
    assert is_lost.wait(20)
    channel.close()
    assert len(looked) == 1
    assert looked[0] <= lost[0][0] - 0.4
    assert str(lost[0][1]) == "rank 1 was lost: nothing was heard of it for 4 s"
