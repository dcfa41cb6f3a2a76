"""How the memory of GPUs is divided, from sizes alone."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openwafer.errors import UserError
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.gpu.device_plan import DevicePlan, Needs, TooSmall, fitted, plan_devices
from openwafer.serve.gpu.gpus import Gpus
from openwafer.serve.gpu.splitting import Splitting, most_bytes
from openwafer.serve.gpu.tuning import Tuning
from openwafer.serve.lowering import PAGE
from tests.serve.conftest import CONFIGS, stored, tiny_module

DEEP = stored(tiny_module(dataclasses.replace(CONFIGS["llama"], num_hidden_layers=8)))


class SizedGpus(Gpus):
    """GPUs of which only the memory is asked."""

    def __init__(self, *free: int, total: int | None = None) -> None:
        self.context_bytes = 1000
        self._free, self._total = free, total

    def count(self) -> int:
        return len(self._free)

    def memory(self, index: int) -> tuple[int, int]:
        return self._free[index], self._total or self._free[index]


def plans(gpus: SizedGpus, **options) -> list[DevicePlan]:
    chosen = {"device": "cuda", "dtype": "fp32", "max_step_tokens": 16, "max_running": 2} | options
    return plan_devices(DEEP, EngineConfig(**chosen), gpus)


def least_of(error: pytest.ExceptionInfo[UserError]) -> int:
    return int(re.findall(r"--device_memory (\d+)", str(error.value))[0])


@given(
    limit=st.integers(1000, 10_000_000),
    ends=st.integers(0, 100_000),
    layer=st.integers(1, 1_000_000),
    num_layers=st.integers(1, 60),
    activations=st.integers(0, 100_000),
    block=st.integers(1, 10_000),
    blocks=st.one_of(st.none(), st.integers(1, 50)),
)
def test_a_plan_stays_within_its_limit(
    limit: int, ends: int, layer: int, num_layers: int, activations: int, block: int, blocks: int | None
) -> None:
    needs = Needs(ends=ends, layers=(layer,) * num_layers, activations=activations, block=block)
    try:
        num_blocks, num_streamed = fitted(limit, needs, blocks, 64)
    except TooSmall as error:
        least = error.least_bytes
        with pytest.raises(TooSmall):
            fitted(max(limit, least - 2), needs, blocks, 64)
        limit = least
        num_blocks, num_streamed = fitted(limit, needs, blocks, 64)
    kept = (num_layers - num_streamed) * layer
    buffers = 2 * layer if num_streamed else 0
    spent = ends + activations + (num_blocks + 1) * block + kept + buffers + limit // 20
    assert spent <= limit
    assert num_blocks == blocks or (blocks is None and 16 <= num_blocks <= 64)
    assert num_streamed == 0 or num_streamed > 2  # two would fit into the buffers
    # Nothing more would fit.
    assert num_streamed == 0 or spent + layer > limit
    assert num_streamed or blocks or num_blocks == 64 or spent + block > limit


def test_a_model_that_fits_stays_and_the_cache_has_the_rest() -> None:
    (plan,) = plans(SizedGpus(4 << 20))
    assert plan.streamed_layers == ()
    assert plan.num_blocks == 2 * 256 // PAGE  # no more than two requests can fill
    assert str(plan).startswith("GPU 0: ")
    assert "stay, 512 tokens have keys and values" in str(plan)


def test_packed_weights_are_counted_in_packed_bytes() -> None:
    """Of 16 bits, or 5."""
    (dense,) = plans(SizedGpus(8 << 20), dtype="bf16")
    (packed,) = plans(SizedGpus(8 << 20), dtype="bf16", quantization="int4")
    saved = dense.resident_bytes - packed.resident_bytes
    num_weights = 8 * 30_720 + 2 * 101 * 64
    assert saved == pytest.approx(num_weights * 11 / 8, rel=0.02)


def test_what_does_not_fit_is_spread_and_told() -> None:
    (plan,) = plans(SizedGpus(8 << 20), device_memory=1_400_000)
    assert 2 < len(plan.streamed_layers) < 8
    gaps = {after - before for before, after in zip(plan.streamed_layers, plan.streamed_layers[1:], strict=False)}
    assert max(gaps) - min(gaps) <= 1
    assert f"({len(plan.streamed_layers)} of 8 layers) are copied from host memory in every step" in str(plan)
    matrices = 4 * 64 * (64 * 2 + 2 * 32 + 3 * 96)
    assert plan.streamed_bytes == pytest.approx(len(plan.streamed_layers) * matrices, rel=0.1)


def test_the_least_that_is_told_is_enough() -> None:
    for options in ({}, {"kv_cache": "100kB"}):
        with pytest.raises(UserError, match="two layers, one computed with while the next is copied") as told:
            plans(SizedGpus(8 << 20), device_memory=10_000, **options)
        (plan,) = plans(SizedGpus(8 << 20), device_memory=least_of(told), **options)
        assert len(plan.streamed_layers) == 8


def test_the_least_of_several_stages_is_that_of_the_whole_gpu() -> None:
    gpus = SizedGpus(7 << 20, total=8 << 20)
    with pytest.raises(UserError, match="for the tensors of a process are too few") as told:
        plans(gpus, device_memory=(1 << 20) + 10_000, num_csx=2)
    assert all(plan.num_blocks >= 16 for plan in plans(gpus, device_memory=least_of(told), num_csx=2))


def test_what_others_use_counts() -> None:
    gpus = SizedGpus(3 << 20, total=4 << 20)
    (plan,) = plans(gpus, device_memory=3 << 20)
    assert plan.limit == 2 << 20
    assert plans(gpus)[0].limit == int(0.92 * (3 << 20))
    with pytest.raises(UserError, match="give at most 4 MiB"):
        plans(gpus, device_memory=5 << 20)
    with pytest.raises(UserError, match="CUDA and others take 1 MiB of it"):
        plans(gpus, device_memory=1 << 20)


def test_sixteen_bits_take_half() -> None:
    (wide,), (narrow,) = plans(SizedGpus(8 << 20)), plans(SizedGpus(8 << 20), dtype="auto")
    assert narrow.resident_bytes < 0.6 * wide.resident_bytes


def test_a_tied_table_counts_once() -> None:
    tied = stored(tiny_module(dataclasses.replace(DEEP.config, tie_word_embeddings=True)))
    config = EngineConfig(device="cuda", dtype="fp32", max_step_tokens=16, max_running=2)
    (plan,) = plan_devices(tied, config, SizedGpus(8 << 20))
    (untied,) = plans(SizedGpus(8 << 20))
    assert untied.resident_bytes - plan.resident_bytes == 4 * 101 * 64


@pytest.mark.parametrize("tile", [32, 64, 128])
@pytest.mark.parametrize("width", [64, 300, 1536, 4096, 28672])
def test_the_parts_of_split_products_are_never_more_than_is_planned(width: int, tile: int) -> None:
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    tuning = Tuning()
    splitting = Splitting(tuning)
    for piece, least in ((64, 4), (128, 2), (256, 2)):
        for num_inputs in (width, -(-width // 3)):
            for num_outputs in (width, -(-width // 7)):
                splits = splitting.count(-(-num_outputs // tile), -(-num_inputs // piece), least)
                assert 4 * 10 * splits * num_outputs <= most_bytes(10, width, tuning), (num_inputs, num_outputs)
