"""Layers whose weights are copied in ahead of their use, on a device on which everything comes as late as it may."""

import dataclasses

import numpy as np
import pytest
import torch

from openwafer.models.config import ModelConfig
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.gpu.layer_stream import ALIGNMENT, LayerStream
from openwafer.serve.gpu.plan import Project, Streamed
from openwafer.serve.gpu.plan_builder import PlanBuilder
from openwafer.serve.gpu.runner import GpuRunner
from openwafer.serve.loading import load_program
from openwafer.serve.program import Linear
from openwafer.serve.region import Region
from tests.serve.conftest import CONFIGS, stored, tiny_module, tiny_program
from tests.serve.gpu.late_gpu import Computed, LateGpu, WatchedKernels, watched_runner
from tests.serve.test_native import feed

DEEP = dataclasses.replace(CONFIGS["llama"], num_hidden_layers=5)
PIECES = [30, 1, 14]


def runner_on(device: LateGpu, config: ModelConfig, layers: set[int], dtype: torch.dtype = torch.float32) -> GpuRunner:
    builder = PlanBuilder(device, dtype, config.max_position_embeddings, frozenset(layers))
    return watched_runner(device, stored(tiny_module(config)), config, builder, dtype)


def logits(config: ModelConfig, layers: set[int], dtype: torch.dtype = torch.float32) -> np.ndarray:
    return feed(runner_on(LateGpu(), config, layers, dtype), PIECES)


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in CONFIGS), ("qwen2", torch.bfloat16)])
def test_streamed_layers_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """Biases, norms within a layer, gates and tied tables of all families."""
    expected = logits(CONFIGS[name], set(), dtype)
    assert np.isfinite(expected).all()
    assert logits(CONFIGS[name], {0, 1}, dtype).tobytes() == expected.tobytes()


@pytest.mark.parametrize("layers", [{2}, {0, 4}, {1, 2, 3}, {0, 1, 2, 3, 4}])
def test_any_layers_may_be_streamed(layers: set[int]) -> None:
    """An odd number of them too: the last and the first are neighbours in the ring."""
    assert logits(DEEP, layers).tobytes() == logits(DEEP, set()).tobytes()


def test_a_plan_made_part_by_part_is_the_one_of_the_whole_program() -> None:
    for name in ("llama3", "gpt"):
        whole = GpuRunner(
            tiny_program(CONFIGS[name]),
            num_blocks=8,
            max_rows=64,
            max_sequences=4,
            device=torch.device("cpu"),
            dtype=torch.float32,
            kernels=WatchedKernels(LateGpu()),
        )
        assert feed(whole, PIECES).tobytes() == logits(CONFIGS[name], set()).tobytes()


def test_copies_run_ahead_of_computing() -> None:
    """When a layer is waited for, the copy of the next one has been asked for already; the host never waits."""
    device = LateGpu()
    feed(runner_on(device, DEEP, {0, 2, 4}), [30, 15])
    assert device.log == ["copy", "copy", *["use", "copy"] * 6]


def test_device_memory_is_two_buffers_whatever_is_streamed() -> None:
    device = LateGpu()
    runner = runner_on(device, DEEP, {0, 1, 2, 3})
    assert runner.num_streamed_bytes == 4 * device.num_held_bytes // 2
    matrices = 64 * (128 + 64 + 3 * 96)  # q, k, v; o; gate, up and down
    assert 4 * (matrices + 2 * 64) <= device.num_held_bytes // 2 < 4 * matrices + 8 * ALIGNMENT


def test_nothing_of_a_layer_stays_with_the_program() -> None:
    device = LateGpu()
    builder = PlanBuilder(device, torch.float32, 64, frozenset({1}))
    program = load_program(stored(tiny_module(DEEP)), EngineConfig(), taker=builder)
    linear = [op.matrix for op in program.body if isinstance(op, Linear)]
    assert all(matrix.is_elsewhere for matrix in linear)
    body = builder.plan(Region.whole(DEEP)).body
    assert sum(isinstance(step, Streamed) for step in body) == 1
    (streamed,) = (step for step in body if isinstance(step, Streamed))
    for steps in streamed.source.steps_in:  # pyright: ignore[reportAttributeAccessIssue]
        weights = [step.weight for step in steps if isinstance(step, Project)]
        assert len(weights) == 4
        assert all(weight.data_ptr() % 16 == 0 for weight in weights)  # kernels load 16 bytes at once


def test_a_layer_that_is_not_waited_for_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of these tests would show it."""
    monkeypatch.setattr(LateGpu, "use", lambda self, moment: None)
    assert np.isnan(logits(DEEP, {0, 2, 4})).any()


def test_a_buffer_that_is_taken_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateGpu, "now", lambda self: Computed(0))
    with pytest.raises(AssertionError, match="overwritten while they are read"):
        logits(DEEP, {0, 2, 4})


def test_layers_out_of_order_are_refused() -> None:
    stream = LayerStream(LateGpu())
    weight = torch.ones(16, 16)
    span = tiny_program(CONFIGS["llama"]).body[0].dst
    first, second = (stream.take([Project(dst=span, src=span, weight=weight * n)]) for n in (1, 2))
    stream.start()
    with pytest.raises(AssertionError, match="order of the model"):
        second.source.bring()
    (step,) = first.source.bring()
    assert isinstance(step, Project)
    assert torch.equal(step.weight, weight)
