import threading
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch

from openwafer.memoryx import ready_pages
from openwafer.memoryx.ready_pages import ReadyPages
from openwafer.memoryx.tier import DramTier

NUM_ELEMENTS = (4 << 20) // 4  # large enough for pages of their own


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with many cores."""
    monkeypatch.setattr(ready_pages, "NUM_THREADS", 2)


def resident_bytes(array: torch.Tensor) -> int:
    """Of the mapping that the array is in."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        ends = line.split(" ")[0].split("-")
        if len(ends) == 2 and int(ends[0], 16) <= array.data_ptr() < int(ends[1], 16):
            return next(int(row.split()[1]) << 10 for row in lines if row.startswith("Rss:"))
    raise AssertionError("not mapped")


def test_arrays_have_their_pages_before_anybody_writes_to_them() -> None:
    pages = ReadyPages([("first", NUM_ELEMENTS, torch.float32), ("second", NUM_ELEMENTS, torch.bfloat16)])
    assert not wait(pages._futures.values(), 60).not_done
    first, second = pages.take("first"), pages.take("second")
    pages.close()
    assert first is not None
    assert second is not None
    assert first.shape == second.shape == (NUM_ELEMENTS,)
    assert (first.dtype, second.dtype) == (torch.float32, torch.bfloat16)
    assert resident_bytes(first) >= first.nbytes
    assert not first.any()


def test_what_nobody_began_or_wants_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, two_began, begun = threading.Event(), threading.Barrier(3), []

    def touched(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        begun.append(num_elements)
        if num_elements < 3:
            two_began.wait(60)
        assert go_on.wait(60)
        return torch.zeros(num_elements, dtype=dtype)

    monkeypatch.setattr(ready_pages, "_touched", touched)
    pages = ReadyPages((number, number, torch.float32) for number in range(1, 6))
    two_began.wait(60)
    pages.drop(3)
    assert pages.take(4) is None  # whoever needs it now makes it
    assert pages.take(99) is None
    go_on.set()
    taken = pages.take(1)
    assert taken is not None
    assert len(taken) == 1
    pages._futures[5].result(60)
    assert sorted(begun) == [1, 2, 5]
    pages.close()


def test_a_frozen_tier_copies_into_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def touched(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        array = torch.zeros(num_elements, dtype=dtype)
        made.append(array.data_ptr())
        return array

    monkeypatch.setattr(ready_pages, "_touched", touched)
    tier = DramTier()
    for index in range(4):
        tier.create((index, "m"), NUM_ELEMENTS, torch.float32)
        tier.load((index, "m")).fill_(index)
    for _ in range(2):
        tier.freeze()
        tier.load((0, "m"))
        assert not wait(tier._pages._futures.values(), 60).not_done
        for index in reversed(range(4)):
            tier.preserve((index, "m"))
            tier.load((index, "m")).add_(1)
            assert tier.read_frozen((index, "m"), 0, 1).data_ptr() in made[-4:]
        for index in range(4):
            assert torch.equal(tier.read_frozen((index, "m"), 0, NUM_ELEMENTS) + 1, tier.load((index, "m")))
            tier.drop_frozen((index, "m"))
        tier.thaw()


def test_a_tier_with_a_limit_takes_only_what_it_copies() -> None:
    tier = DramTier(snapshot_bytes=1 << 30)
    tier.create((0, "m"), NUM_ELEMENTS, torch.float32)
    tier.freeze()
    tier.load((0, "m"))
    assert not tier._pages._futures
    tier.preserve((0, "m"))
    assert not tier.read_frozen((0, "m"), 0, NUM_ELEMENTS).any()
    tier.close()


def test_nothing_is_taken_before_training_goes_on() -> None:
    """The last checkpoint is written while nothing changes."""
    tier = DramTier()
    tier.create((0, "m"), NUM_ELEMENTS, torch.float32)
    tier.create((1, "m"), NUM_ELEMENTS, torch.float32)
    tier.freeze()
    tier.read_frozen((0, "m"), 0, NUM_ELEMENTS)
    tier.drop_frozen((0, "m"))
    assert not tier._pages._futures
    tier.load((1, "m"))
    assert list(tier._pages._futures) == [(1, "m")]  # the other one needs no copy any more
    tier.thaw()
    tier.load((1, "m"))
    assert not tier._pages._futures
    tier.close()
