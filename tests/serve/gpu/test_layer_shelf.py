"""Streamed layers that are read from flash, with copies that come as late as they may."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from openwafer.errors import UserError
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.gpu.device_plan import DevicePlan, shelved
from openwafer.serve.gpu.layer_shelf import NUM_FLASH_BUFFERS, FlashShelf
from openwafer.serve.gpu.plan_builder import PlanBuilder
from openwafer.serve.gpu.runner import GpuRunner
from openwafer.serve.loading import load_program
from openwafer.serve.region import Region
from tests.serve.conftest import CONFIGS, stored, tiny_module
from tests.serve.gpu.late_gpu import LateGpu, watched_runner
from tests.serve.test_native import feed

DEEP = dataclasses.replace(CONFIGS["llama"], num_hidden_layers=8)
MODEL = stored(tiny_module(DEEP))
PIECES = [30, 1, 1, 13]


def runner_on(device: LateGpu, streamed: set[int], on_flash: set[int], folder: Path) -> GpuRunner:
    shelf = FlashShelf(device, folder, 150_000, len(on_flash)) if on_flash else None
    builder = PlanBuilder(device, torch.float32, 256, frozenset(streamed), frozenset(on_flash), shelf)
    return watched_runner(device, MODEL, DEEP, builder, torch.float32)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return feed(runner_on(LateGpu(), set(), set(), tmp_path_factory.mktemp("none")), PIECES)


@pytest.mark.parametrize(
    ("streamed", "on_flash"),
    [
        (set(range(8)), set(range(8))),  # twice the buffers
        (set(range(8)), {0, 3, 4, 7}),
        ({1, 2, 5}, {5}),
        ({1, 2, 5}, {1, 2}),
    ],
)
def test_layers_from_flash_give_the_same_bits(
    streamed: set[int], on_flash: set[int], tmp_path: Path, expected: np.ndarray
) -> None:
    runner = runner_on(LateGpu(), streamed, on_flash, tmp_path)
    assert len(list(tmp_path.glob("*.flash"))) == len(on_flash)
    assert feed(runner, PIECES).tobytes() == expected.tobytes()
    runner.close()
    assert not list(tmp_path.glob("*.flash"))


def test_the_host_waits_for_copies_from_flash_only(tmp_path: Path) -> None:
    device = LateGpu()
    feed(runner_on(device, set(range(8)), set(), tmp_path), PIECES)
    assert "wait" not in device.log
    device = LateGpu()
    feed(runner_on(device, set(range(8)), {0, 2, 4, 6, 7}, tmp_path), PIECES)
    # A buffer serves again when the copy before last has landed.
    num_copies = 2 + 8 * len(PIECES)
    assert device.log.count("copy") == num_copies
    assert device.log.count("wait") == num_copies * 5 // 8 - 2


def test_the_memory_that_copies_read_stays_until_they_have_landed(tmp_path: Path) -> None:
    device = LateGpu()
    shelf = FlashShelf(device, tmp_path, 150_000, 8)
    builder = PlanBuilder(device, torch.float32, 256, frozenset(range(8)), frozenset(range(8)), shelf)
    load_program(MODEL, EngineConfig(), taker=builder)
    assert device.log == ["copy", "copy"]  # ahead of the first step
    builder.stream.close()
    assert device.log == ["copy", "copy", "wait", "wait"]


def plan(streamed: int, num_layers: int = 8) -> DevicePlan:
    return DevicePlan(
        region=Region(first=0, stop=num_layers, num_layers=num_layers),
        gpu=0,
        limit=1,
        num_blocks=1,
        streamed_layers=tuple(range(streamed)),
        flash_layers=(),
        layer_bytes=1 << 20,
        resident_bytes=0,
        streamed_bytes=streamed << 20,
        num_threads=1,
    )


def test_what_the_host_has_no_room_for_is_spread() -> None:
    mib = 1 << 20
    assert shelved([plan(8)], None, None)[0].flash_layers == ()
    assert shelved([plan(8)], None, 8 * mib)[0].flash_layers == ()
    assert shelved([plan(8)], 8 * mib, 1)[0].flash_layers == ()  # what is given counts
    assert shelved([plan(8)], 6 * mib, None)[0].flash_layers == (1, 2, 3, 5, 6, 7)
    assert shelved([plan(8)], 7 * mib, None)[0].flash_layers == (1, 3, 4, 6, 7)
    assert shelved([plan(8)], NUM_FLASH_BUFFERS * mib, None)[0].flash_layers == tuple(range(8))
    two = shelved([plan(8), plan(0)], 6 * mib, None)
    assert [len(each.flash_layers) for each in two] == [6, 0]
    with pytest.raises(UserError, match=f"give at least --dram {2 * NUM_FLASH_BUFFERS * mib}"):
        shelved([plan(8), plan(4)], 7 * mib, None)
