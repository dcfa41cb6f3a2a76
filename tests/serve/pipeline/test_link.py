"""Links between hosts: messages of any size arrive whole; what a peer that dies looks like is in test_ranks.py."""

import threading
import time

import numpy as np
import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from openwafer.serve.pipeline import link
from openwafer.serve.pipeline.link import Link
from openwafer.serve.pipeline.pipe import Broken, Inbox


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """Where ends find each other."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return store


def test_messages_arrive_whole_and_in_order_while_nobody_reads(store: TCPStore) -> None:
    inbox, sender = Inbox(Link("way", side=1)), Link("way", side=0)
    large = np.random.default_rng(0).integers(0, 255, 5_000_003, np.uint8)
    frame = link._FRAME_BYTES - 8
    messages = [[b"one", b"", b"two"], [large[:9], large[9:]], [b""]]
    messages += [[large[:size]] for size in (frame - 1, frame, frame + 1)]
    for message in messages:
        sender.send(message)
    for message in messages:
        assert bytes(inbox.receive()) == b"".join(map(bytes, message))
    waiting = threading.Timer(0.05, inbox.end)
    waiting.start()
    with pytest.raises(Broken):
        inbox.receive()


def test_a_link_that_is_idle_for_longer_than_joining_may_take(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself gloo gives up waiting for a message after the time that its group was made with."""
    monkeypatch.setattr(link, "_JOIN", link._JOIN / 80)
    inbox, sender = Inbox(Link("way", side=1)), Link("way", side=0)
    sender.join()
    time.sleep(link._JOIN.total_seconds() + 0.3)
    sender.send([b"still here"])
    assert bytes(inbox.receive()) == b"still here"


def test_an_end_that_does_not_come(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_JOIN", link._JOIN / 1200)
    with pytest.raises(Broken, match=r"no connection for stage-2 within 0\.1 s .*every host must reach every other"):
        Link("openwafer/here/stage-2", side=0).send([b"anybody?"])
