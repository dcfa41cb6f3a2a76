"""Pipes and what goes through them."""

import socket
import threading

import numpy as np
import pytest

from openwafer.serve.pipeline.message import Work, decoded_result, encoded_result
from openwafer.serve.pipeline.pipe import Broken, Inbox, Pipe
from openwafer.serve.runner import Batch, Draw, Drawn


def pair() -> tuple[Pipe, Pipe]:
    ours, theirs = socket.socketpair()
    return Pipe(ours), Pipe(theirs)


def test_large_messages_arrive_whole_and_in_order() -> None:
    ours, theirs = pair()
    large = np.random.default_rng(0).integers(0, 255, 9_000_000, np.uint8)
    messages = [[b"one", b"", b"two"], [large[:5_000_001], large[5_000_001:]], [b""]]
    sender = threading.Thread(target=lambda: [ours.send(message) for message in messages])
    sender.start()
    assert bytes(theirs.receive()) == b"onetwo"
    assert bytes(theirs.receive()) == large.tobytes()
    assert bytes(theirs.receive()) == b""
    sender.join()
    ours.close()
    with pytest.raises(Broken):
        theirs.receive()
    with pytest.raises(Broken):
        theirs.send([large])
    theirs.close()


def test_an_inbox_is_filled_while_nobody_reads_and_ends_with_the_sender() -> None:
    ours, theirs = pair()
    inbox = Inbox(theirs)
    for number in range(4):  # far more than a socket holds: nobody waits
        ours.send([np.full(3_000_000, number, np.uint8)])
    ours.close()
    assert [inbox.get()[0] for _ in range(4)] == [0, 1, 2, 3]  # pyright: ignore[reportOptionalSubscript]
    assert inbox.get() is None
    assert inbox.get() is None
    theirs.close()


@pytest.mark.parametrize("has_x", [False, True])
def test_works_and_results_arrive_bit_for_bit(has_x: bool) -> None:
    rng = np.random.default_rng(1)
    batch = Batch(
        tokens=rng.integers(0, 9, 5).astype(np.int32),
        positions=np.arange(5, dtype=np.int32),
        sequences=np.zeros(5, np.int32),
        tables=rng.integers(0, 9, (2, 3)).astype(np.int32),
        logit_rows=np.array([1, 4], np.int32),
    )
    draw = Draw(temperature=0.7, top_k=None, top_p=0.9, min_p=0.1, uniform=1 / 3)
    x = rng.standard_normal((5, 7)).astype(np.float32) if has_x else None
    sent = Work(batch=batch, draws=[draw, None], x=x, busy_s=(0.5,))
    ours, theirs = pair()
    ours.send(sent.encoded())
    found = Work.decoded(theirs.receive())
    assert (list(found.draws), found.busy_s) == ([draw, None], (0.5,))
    for name in ("tokens", "positions", "sequences", "tables", "logit_rows"):
        mine, other = getattr(found.batch, name), getattr(batch, name)
        assert mine.dtype == other.dtype
        assert mine.flags.c_contiguous
        assert np.array_equal(mine, other)
    assert (found.x is None) == (x is None)
    assert x is None or found.x is None or found.x.tobytes() == x.tobytes()
    logits = rng.standard_normal((1, 11)).astype(np.float32)
    drawn = Drawn(tokens=np.array([3, 0], np.int32), tops=np.array([1.5, 0.0], np.float32), logits=logits)
    theirs.send(encoded_result(drawn, (0.5, 0.25)))
    result, busy_s = decoded_result(ours.receive())
    assert busy_s == (0.5, 0.25)
    assert result.tokens.tolist() == [3, 0]
    assert result.logits.tobytes() == logits.tobytes()
    ours.close()
    theirs.close()
