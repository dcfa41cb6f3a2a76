"""Without a GPU: a driver with a ledger of what is locked, which may forget slowly (`bench/cli_gpu.py`: a real one)."""

import gc

import pytest
import torch

from openwafer.errors import UserError
from openwafer.memoryx import pinned as module
from openwafer.memoryx.pinned import pinned


class Driver:
    """`forgets` says whether unlocked pages are forgotten at once. `error` is what the next kernel fails with."""

    def __init__(self, *, forgets: bool = True, room: int = 1 << 30) -> None:
        self.forgets, self.room = forgets, room
        self.locked: dict[int, int] = {}
        self.stale: dict[int, int] = {}
        self.error = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        for begin, size in (self.locked | self.stale).items():
            if begin < address + num_bytes and address < begin + size:
                return self.failed(712)
        if sum(self.locked.values()) + num_bytes > self.room:
            return self.failed(2)
        self.locked[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if address not in self.locked:
            return self.failed(713)
        num_bytes = self.locked.pop(address)
        if not self.forgets:
            self.stale[address] = num_bytes
        return 0

    def failed(self, error: int) -> int:
        self.error = error
        return error

    def start_a_kernel(self) -> None:
        error, self.error = self.error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(module, "_cuda", lambda: driver)
    monkeypatch.setattr(module, "_start_a_kernel", driver.start_a_kernel)
    return driver


@pytest.mark.parametrize("num_elements", [0, 1, 1000, 1 << 20])
def test_memory_is_zeroed_and_locked_until_it_goes(driver: Driver, num_elements: int) -> None:
    memory = pinned(num_elements, torch.float32)
    assert memory.shape == (num_elements,)
    assert not memory.any()
    assert list(driver.locked.values()) == [max(1, 4 * num_elements)]
    view = memory[num_elements // 2 :]
    del memory
    assert driver.locked
    del view
    gc.collect()
    assert not driver.locked


def test_pages_that_the_driver_still_holds_are_not_used_again(driver: Driver) -> None:
    driver.forgets = False
    for _ in range(10):
        pinned(1000, torch.float32)  # gives its pages back at once
        driver.start_a_kernel()  # does not get the error of the pages that could not be locked
    assert not driver.locked
    assert len(driver.stale) == 10


def test_memory_that_cannot_be_unlocked_is_told_and_fails_no_kernel(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    memory = pinned(1000, torch.float32)
    driver.locked.clear()
    del memory
    gc.collect()
    assert "did not unlock host memory (error 713)" in caplog.text
    driver.start_a_kernel()


def test_no_more_locked_memory_is_an_error_that_says_what_to_do(driver: Driver) -> None:
    driver.room = 1 << 20
    with pytest.raises(UserError, match=r"cannot lock 0.02 GiB .*CUDA error 2.*ulimit -l.*smaller DRAM budget"):
        pinned(5 << 20, torch.float32)
    assert not driver.locked
