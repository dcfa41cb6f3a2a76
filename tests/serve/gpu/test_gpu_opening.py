"""From a model to an engine on GPUs, with devices of host memory in their place."""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from openwafer.errors import UserError
from openwafer.models.generate import generate
from openwafer.serve.engine import LocalEngine
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.gpu import opening, runner
from openwafer.serve.gpu.device_plan import needs_of, plan_devices
from openwafer.serve.gpu.opening import open_on_gpu, open_on_gpus
from openwafer.serve.gpu.runner import GpuRunner
from openwafer.serve.inventory import take_inventory
from openwafer.serve.runner import Draw
from tests.serve.conftest import CONFIGS, Answer, Client, stored, tiny_module
from tests.serve.gpu.held_memory import HeldMemory
from tests.serve.gpu.late_gpu import LateGpus, WatchedKernels
from tests.serve.pipeline.test_pipeline import batch

PROMPT = np.random.default_rng(1).integers(0, 101, 37).tolist()
MODULE = tiny_module(dataclasses.replace(CONFIGS["llama"], num_hidden_layers=8))
STREAMED = 1_400_000  # bytes of device memory, too few for all layers
PACKED = 1_000_000  # the same for packed ones
Open = Callable[..., Client]


@pytest.fixture
def open_gpus() -> Iterator[Open]:
    opened: list[LocalEngine] = []

    def open_(gpus: LateGpus | None = None, **options) -> Client:
        chosen = {"device": "cuda", "dtype": "fp32", "max_step_tokens": 16, "max_running": 6} | options
        config = EngineConfig(**chosen)
        opened_runner = open_on_gpus(stored(MODULE), config, gpus or LateGpus())
        context = min(256, opened_runner.num_blocks * opened_runner.block_size)
        opened.append(LocalEngine(opened_runner, stored(MODULE).config, config, max_context=context))
        return Client(opened[-1])

    yield open_
    for engine in opened:
        engine.close()


def bits(answer: Answer) -> tuple[list[int], bytes]:
    values = [[entry.logprob, *(p for _, p in entry.top)] for entry in answer.logprobs]
    return answer.tokens, np.array(values).tobytes()


def test_a_model_larger_than_the_device_answers_as_one_that_fits(
    open_gpus: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """In a crowd with pieces of prompts and drawn tokens, bit for bit."""
    gpus = LateGpus()
    with caplog.at_level(logging.INFO):
        whole = open_gpus()
        assert "8 layers) are copied" not in caplog.text
        streamed = open_gpus(gpus, device_memory=STREAMED)
    assert "of 8 layers) are copied from host memory in every step" in caplog.text
    assert gpus.opened[0].allowed_bytes == STREAMED
    assert gpus.opened[0].num_held_bytes > 0
    kinds = [
        {"num_logprobs": 2},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.7, "seed": 8, "top_p": 0.8, "num_logprobs": 1},
    ]
    prompts = [PROMPT[:23], PROMPT[:9], PROMPT[:14]]
    started = [
        streamed.start(streamed.request(prompt, max_tokens=6, **kind))
        for prompt, kind in zip(prompts, kinds, strict=True)
    ]
    for prompt, kind, events in zip(prompts, kinds, started, strict=True):
        assert bits(streamed.wait(events)) == bits(whole.ask(prompt, max_tokens=6, **kind))
    assert whole.ask(prompts[0], max_tokens=6).tokens == list(generate(MODULE, prompts[0], max_tokens=6))


def test_packed_layers_are_streamed_packed(open_gpus: Open, caplog: pytest.LogCaptureFixture) -> None:
    options = {"quantization": "int4", "max_step_tokens": 8}
    whole, streamed = open_gpus(**options), open_gpus(device_memory=PACKED, **options)
    assert "of 8 layers) are copied from host memory in every step" in caplog.text
    expected = whole.ask(PROMPT[:20], max_tokens=6, num_logprobs=1)
    assert bits(streamed.ask(PROMPT[:20], max_tokens=6, num_logprobs=1)) == bits(expected)


def test_weights_that_the_host_cannot_hold_are_on_flash(
    open_gpus: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The least memory that is told is enough; files go with the engine."""
    options = {"device_memory": STREAMED, "flash": tmp_path / "flash"}
    with pytest.raises(UserError, match=r"dram 1000 is too small: .* of weights do not fit on the GPU") as told:
        open_gpus(dram=1000, **options)
    least = int(str(told.value).split("--dram ")[1].split(",")[0])
    streamed = open_gpus(dram=least, **options)
    assert "of them from flash) are copied from host memory in every step" in caplog.text
    files = list((tmp_path / "flash").glob("*.flash"))
    assert len(files) > 4
    expected = open_gpus().ask(PROMPT[:20], max_tokens=6, num_logprobs=1)
    assert bits(streamed.ask(PROMPT[:20], max_tokens=6, num_logprobs=1)) == bits(expected)
    streamed.engine.close()
    assert not any(file.exists() for file in files)


def test_without_a_budget_flash_is_used_where_the_host_has_no_room(
    open_gpus: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "available_bytes", lambda: 700_000)
    open_gpus(device_memory=STREAMED, flash=tmp_path)
    assert list(tmp_path.glob("*.flash"))
    monkeypatch.setattr(opening, "available_bytes", lambda: 1000)
    with pytest.raises(UserError, match="dram 800 is too small"):
        open_gpus(device_memory=STREAMED, flash=tmp_path)


def test_a_device_that_runs_out_while_loading_says_what_was_planned(
    open_gpus: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_, **__) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")

    monkeypatch.setattr(opening, "load_program", full)
    with pytest.raises(UserError, match=r"GPU 0: .* stay, .*; CUDA out of memory. Tried to allocate 2 GiB\): give a"):
        open_gpus()


def test_a_device_that_runs_out_in_a_step_ends_the_engine_with_what_to_do(
    open_gpus: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")

    client = open_gpus()
    monkeypatch.setattr(WatchedKernels, "attend", full)
    answer = client.ask(PROMPT[:9])
    assert answer.last.finish_reason == "error"
    assert "not enough memory for a step of 9 tokens (CUDA out of memory. Tried to" in (answer.last.error or "")


def test_a_device_that_runs_out_while_drawing_says_so_too(open_gpus: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")

    client = open_gpus()
    monkeypatch.setattr(runner, "draw_rows", full)
    answer = client.ask(PROMPT[:9], temperature=1.0)
    assert answer.last.finish_reason == "error"
    assert "not enough memory for a step of 9 tokens (CUDA out of memory. Tried to" in (answer.last.error or "")


def test_a_step_holds_no_more_than_was_planned_for() -> None:
    """Guesses make every row of a step one that is drawn from, with limits that need all tokens sorted."""
    shape = dataclasses.replace(CONFIGS["llama"], vocab_size=800)
    model = stored(tiny_module(shape))
    config = EngineConfig(device="cuda", dtype="fp32", max_step_tokens=48, max_running=2)
    gpus = LateGpus()
    (plan,) = plan_devices(model, config, gpus)
    tiny = open_on_gpu(model, config, plan, gpus)
    tokens = np.arange(48, dtype=np.int32)
    given = batch(tokens.tolist())
    given = dataclasses.replace(given, logit_rows=tokens)
    draws = [Draw(temperature=1e6, top_k=None, top_p=0.99, min_p=0.0, uniform=0.5)] * 48
    with HeldMemory().ignore(*tiny_tensors(tiny)) as held:
        assert len(set(tiny.run_and_draw(given, draws).tokens.tolist())) > 20
    planned = needs_of(shape, take_inventory(model, config), plan.region, config, torch.float32).activations
    assert 0.3 * planned < held.peak_bytes <= planned


def tiny_tensors(of: GpuRunner) -> Iterator[torch.Tensor]:
    """What is there before a step."""
    for value in vars(of).values():
        if isinstance(value, torch.Tensor):
            yield value


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_that_is_said() -> None:
    with pytest.raises(UserError, match="PyTorch sees no GPU here"):
        open_on_gpus(stored(MODULE), EngineConfig(device="cuda"))


def test_the_limit_of_a_model_does_not_outlive_it(open_gpus: Open) -> None:
    """CUDA keeps the limit of a process until it is given another."""
    gpus = LateGpus()
    open_gpus(gpus, device_memory=STREAMED)
    open_gpus(gpus)
    assert [device.allowed_bytes for device in gpus.opened] == [STREAMED, 4 << 20]
