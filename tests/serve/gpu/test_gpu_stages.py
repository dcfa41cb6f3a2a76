"""Regions of a model on GPUs one after the other: the same bits as on one. The GPUs are host memory here."""

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from openwafer.models.config import ModelConfig
from openwafer.serve.engine import LocalEngine
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.gpu.device_plan import DevicePlan, plan_devices
from openwafer.serve.gpu.opening import open_on_gpu
from openwafer.serve.gpu.runner import GpuRunner
from openwafer.serve.host import Host
from openwafer.serve.pipeline.runner import PipelineRunner
from openwafer.serve.runner import DrawingStageRunner
from tests.serve.conftest import CONFIGS, Answer, Client, stored, tiny_module
from tests.serve.gpu.late_gpu import LateGpus
from tests.serve.gpu.test_device_plan import SizedGpus
from tests.serve.pipeline.conftest import ThreadStages
from tests.serve.pipeline.test_pipeline import batch, bits

PROMPT = np.random.default_rng(1).integers(0, 101, 37).tolist()
DEEP = dataclasses.replace(CONFIGS["llama"], num_hidden_layers=5)
CHOSEN = {"device": "cuda", "dtype": "fp32", "max_step_tokens": 16, "max_running": 6}


def opened(config: ModelConfig, num_stages: int, **options) -> list[GpuRunner]:
    chosen = EngineConfig(**CHOSEN | {"num_csx": num_stages} | options)
    model, gpus = stored(tiny_module(config)), LateGpus(2)
    return [open_on_gpu(model, chosen, plan, gpus) for plan in plan_devices(model, chosen, gpus)]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3", "gpt"])
def test_regions_one_after_the_other_are_the_whole(name: str, streams: bool) -> None:
    (whole,) = opened(CONFIGS[name], 1)
    model, gpus = stored(tiny_module(CONFIGS[name])), LateGpus()
    chosen = EngineConfig(**CHOSEN | {"num_csx": 2})
    plans = plan_devices(model, chosen, gpus)
    if streams:
        plans = [dataclasses.replace(plan, streamed_layers=tuple(plan.region.layers)) for plan in plans]
    first, last = (open_on_gpu(model, chosen, plan, gpus) for plan in plans)
    assert isinstance(last, DrawingStageRunner)
    assert (first.num_streamed_bytes > 0) == streams
    given = batch(PROMPT[:15])
    for _ in range(2):  # what is left in buffers must not matter
        expected = whole.run(given).tobytes()
        assert last.run_stage(given, first.run_stage(given, None)).tobytes() == expected


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_batch_invariant_kernels_have_the_same_bits_on_stages_that_stream_and_in_other_pieces() -> None:
    """The Triton kernels themselves, in Triton's interpreter."""
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    from tests.serve.gpu.test_fast import TUNING, InvariantKernels, Tile

    tile = Tile(num_outputs=16, num_inputs=32, num_warps=4, num_stages=1)
    model, gpus = stored(tiny_module(CONFIGS["llama"])), LateGpus()
    found = []
    for num_stages, pieces in ((1, [5]), (2, [2, 3])):
        chosen = EngineConfig(**CHOSEN | {"num_csx": num_stages})
        runners: list[GpuRunner] = []
        for plan in plan_devices(model, chosen, gpus):
            layers = tuple(plan.region.layers) if num_stages > 1 else ()
            runners.append(open_on_gpu(model, chosen, dataclasses.replace(plan, streamed_layers=layers), gpus))
            runners[-1]._kernels = InvariantKernels(40, TUNING, tile, num_rows=16)
        logits, start = [], 0
        for length in pieces:
            given = batch(PROMPT[start : start + length])
            given = dataclasses.replace(
                given, positions=given.positions + np.int32(start), logit_rows=np.arange(length, dtype=np.int32)
            )
            x = None
            for runner in runners:
                x = runner.run_stage(given, x)
            assert x is not None
            logits.append(x.copy())
            start += length
        found.append(np.concatenate(logits))
    assert found[0].tobytes() == found[1].tobytes()
    assert np.isfinite(found[0]).all()


@contextlib.contextmanager
def engine_on(config: ModelConfig, num_stages: int, **options) -> Iterator[Client]:
    runners = opened(config, num_stages, **options)
    runner = runners[0]
    if num_stages > 1:
        runner = PipelineRunner(ThreadStages(runners), num_stages=num_stages, num_blocks=runners[0].num_blocks)
    chosen = EngineConfig(**CHOSEN | {"num_csx": num_stages} | options)
    context = min(256, runner.num_blocks * runner.block_size)
    engine = LocalEngine(runner, config, chosen, max_context=context)
    yield Client(engine)
    engine.close()


KINDS = [
    {"temperature": 1.0, "seed": 7, "num_logprobs": 2},
    {"temperature": 1.0, "seed": 8},
    {"temperature": 0.8, "seed": 9, "top_p": 0.9},
    {"temperature": 0.0, "num_logprobs": 1, "prompt_logprobs": True},
    {"temperature": 0.0},
]


def crowd(client: Client) -> list[Answer]:
    """All at once, with pieces of prompts and beginnings that are in the cache."""
    requests = [client.request(PROMPT[: 5 + 7 * n], max_tokens=6 + n, **kind) for n, kind in enumerate(KINDS)]
    return [client.wait(events) for events in [client.start(request) for request in requests]]


@pytest.mark.parametrize(("num_stages", "device_memory"), [(2, None), (3, None), (2, 800_000)])
def test_stages_answer_as_one_gpu_does(num_stages: int, device_memory: int | None) -> None:
    streamed = [runner.num_streamed_bytes for runner in opened(DEEP, num_stages, device_memory=device_memory)]
    assert any(streamed) == (device_memory is not None)
    with engine_on(DEEP, 1) as one, engine_on(DEEP, num_stages, device_memory=device_memory) as stages:
        for mine, expected in zip(crowd(stages), crowd(one), strict=True):
            assert bits(mine) == bits(expected)
            assert mine.last.finish_reason == "length"
        assert all(busy > 0 for busy in stages.engine.stats().stage_busy_s)


def plans(gpus: SizedGpus, num_stages: int, **options) -> list[DevicePlan]:
    model = stored(tiny_module(dataclasses.replace(DEEP, num_hidden_layers=9)))
    return plan_devices(model, EngineConfig(**CHOSEN | {"num_csx": num_stages} | options), gpus)


def test_stages_share_gpus_and_their_memory() -> None:
    """Three stages on two GPUs: the first and the third share one."""
    found = plans(SizedGpus(4 << 20, 3 << 20), 3, device_memory=3 << 20)
    assert [plan.gpu for plan in found] == [0, 1, 0]
    assert [plan.limit for plan in found] == [((3 << 20) - 2000) // 2, (3 << 20) - 1000, ((3 << 20) - 2000) // 2]
    assert [layer for plan in found for layer in plan.region.layers] == list(range(9))
    assert len({plan.num_blocks for plan in found}) == 1


def test_the_stage_with_least_room_decides_on_the_blocks_and_others_keep_more_layers() -> None:
    found = plans(SizedGpus(900_000, 8 << 20), 2, max_running=1)
    alone = plans(SizedGpus(8 << 20, 8 << 20), 2, max_running=1)
    assert found[0].num_blocks == found[1].num_blocks <= alone[0].num_blocks
    assert found[0].streamed_layers
    assert not found[1].streamed_layers


def test_stages_on_two_hosts_use_the_gpus_of_each() -> None:
    """One stage on the first host, three on the second, which has two GPUs; the first has least room."""
    model = stored(tiny_module(dataclasses.replace(DEEP, num_hidden_layers=9)))
    hosts = [
        Host(num_stages=1, num_cores=4, gpus=((900_000, 900_000),)),
        Host(num_stages=3, num_cores=9, gpus=((4 << 20, 5 << 20), (8 << 20, 8 << 20))),
    ]
    config = EngineConfig(**CHOSEN | {"num_csx": 4, "max_running": 1, "num_threads": None})
    found = plan_devices(model, config, SizedGpus(), hosts=hosts)
    assert [plan.gpu for plan in found] == [0, 0, 1, 0]
    assert [plan.num_threads for plan in found] == [4, 3, 3, 3]
    free = [900_000 - 1000, (4 << 20) - 2000, (8 << 20) - 1000]
    limits = [int(0.92 * each) for each in free]
    assert [plan.limit for plan in found] == [limits[0], limits[1] // 2, limits[2], limits[1] // 2]
    assert [layer for plan in found for layer in plan.region.layers] == list(range(9))
    assert len({plan.num_blocks for plan in found}) == 1
