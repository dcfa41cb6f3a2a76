"""Arrays in DRAM that are read as they were while training changes them: what is read next, and what is waited for."""

import threading

import pytest
import torch

from openwafer.memoryx.tier import DramTier, Key

NUM_UNITS = 8


@pytest.fixture
def tier() -> DramTier:
    tier = DramTier()
    for index in range(NUM_UNITS):
        tier.create((index, "m"), 4, torch.float32)
        tier.load((index, "m")).fill_(index)
    return tier


def read_next(tier: DramTier, left: list[Key]) -> Key:
    key = tier.pick(left) or left[0]
    assert tier.read_frozen(key, 0, 4).tolist() == [float(key[0])] * 4
    tier.drop_frozen(key)
    left.remove(key)
    return key


@pytest.mark.parametrize("order", [range(NUM_UNITS), range(NUM_UNITS - 1, -1, -1)], ids=["forward", "backward"])
def test_training_and_the_reader_meet_once_from_whichever_side_training_comes(tier: DramTier, order: range) -> None:
    tier.freeze()
    left: list[Key] = [(index, "m") for index in range(NUM_UNITS)]
    read_in_place = []
    for index in order:
        tier.preserve((index, "m"))  # would wait for ever for what the reader is at: there is no other thread
        tier.load((index, "m")).fill_(-1.0)
        if left:
            read_in_place.append(read_next(tier, left)[0])
    assert sorted(read_in_place) == list(range(NUM_UNITS))
    # After the first change the other half of the Units is read before training comes to it.
    far = list(order)[NUM_UNITS // 2 :]
    assert sorted(read_in_place[: NUM_UNITS // 2]) == sorted(far)


def test_what_training_waits_for_is_read_first() -> None:
    tier = DramTier(snapshot_bytes=0)
    for index in range(3):
        tier.create((index, "m"), 4, torch.float32)
        tier.load((index, "m")).fill_(index)
    tier.freeze()
    training = threading.Thread(target=tier.preserve, args=((1, "m"),))
    training.start()
    left: list[Key] = [(index, "m") for index in range(3)]
    while tier.pick(left) != (1, "m"):  # until the thread waits
        assert training.is_alive()
    read_next(tier, left)
    training.join(timeout=120)
    assert not training.is_alive()
    tier.thaw()
