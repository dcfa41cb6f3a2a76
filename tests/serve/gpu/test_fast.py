"""The Triton kernels, emulated on the CPU, against the plain operations; `triton_emulator.py` says what that shows."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from openwafer.serve.engine import EngineConfig, LocalEngine
from openwafer.serve.gpu.fast import TritonKernels, best_kernels, tiles_of
from openwafer.serve.gpu.places import Run
from openwafer.serve.gpu.plain import PlainKernels
from openwafer.serve.gpu.plan import Project
from openwafer.serve.gpu.runner import GpuRunner
from openwafer.serve.gpu.tuning import Tile, Tuning
from openwafer.serve.program import Norm, Span
from tests.serve.conftest import CONFIGS, Client, tiny_program
from tests.serve.gpu.triton_emulator import emulated
from tests.serve.test_native import feed

# Small tiles, so that tiny models have several of each, and some that stick out.
TUNING = Tuning(
    gemv=Tile(num_outputs=16, num_inputs=32, num_warps=4, num_stages=1),
    skinny=Tile(num_outputs=16, num_inputs=32, num_warps=4, num_stages=2),
    decode_tokens=16,
    num_programs=8,
    prompt_rows=16,
    prompt_tokens=16,
    library_attention_rows=25,
)
# Few layers, because each program is emulated by itself; Gemma's two are one with a window and one without.
SHAPES = {name: replace(CONFIGS[name], num_hidden_layers=1) for name in ("llama", "qwen2", "gpt")}
SHAPES["gemma3"] = replace(CONFIGS["gemma3"], num_hidden_layers=2, sliding_window_pattern=2)


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    with emulated():
        yield


def runner(name: str, tuning: Tuning | None, dtype: torch.dtype = torch.float32, num_blocks: int = 8) -> GpuRunner:
    """With the fast kernels, or without a tuning the plain ones."""
    return GpuRunner(
        tiny_program(SHAPES[name]),
        num_blocks=num_blocks,
        max_rows=64,
        max_sequences=8,
        device=torch.device("cpu"),
        dtype=dtype,
        kernels=TritonKernels(tuning) if tuning else PlainKernels(),
    )


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_the_plain_operations(name: str) -> None:
    """Pieces of all kinds: library attention, tiles of a prompt's middle, rows one by one, a single row."""
    expected = feed(runner(name, None), [45])
    np.testing.assert_allclose(feed(runner(name, TUNING), [25, 17, 2, 1]), expected, atol=2e-4, rtol=1e-4)


def test_logits_of_large_batches() -> None:
    """No rows are few: the library's products, with our norms and gates around them."""
    tuning = replace(TUNING, skinny_rows=0)
    expected = feed(runner("llama", None), [45])
    np.testing.assert_allclose(feed(runner("llama", tuning), [44, 1]), expected, atol=2e-4, rtol=1e-4)


def test_bf16_stays_close() -> None:
    expected = feed(runner("llama", None), [45])
    found = feed(runner("llama", TUNING, torch.bfloat16), [35, 9, 1])
    assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", None])
@pytest.mark.parametrize("gated", [False, True])
def test_every_kind_of_product(num_rows: int, kind, gated: bool) -> None:
    """Outputs and inputs that fill no tile, biases, norms; written and added."""
    if gated and kind is None:
        return
    generator = torch.Generator().manual_seed(0)
    span = Span("x", 0, 50)
    # 21 is a tile and a bit.
    weight = torch.randn(2 * 21 if gated else 21, 50, generator=generator)
    norm = Norm(dst=span, src=span, weight=torch.rand(50, generator=generator), bias=None, eps=1e-5, centred=False)
    bias = torch.randn(weight.shape[0], generator=generator)
    src = torch.randn(num_rows, 50, generator=generator)
    kernels = TritonKernels(TUNING)
    for step in (
        Project(dst=span, src=span, weight=weight, norm=norm, bias=bias, activation=kind, gated=gated),
        Project(dst=span, src=span, weight=weight, activation=kind, gated=gated),
    ):
        expected = PlainKernels().project(step, src, wide=True)
        torch.testing.assert_close(kernels.project(step, src, wide=True), expected, atol=1e-4, rtol=1e-4)
        dst = torch.ones(num_rows, 21)
        kernels.project_into(step, src, dst)
        torch.testing.assert_close(dst, expected + 1, atol=1e-4, rtol=1e-4)


def test_greedy_answers_through_the_engine() -> None:
    answers = []
    for tuning in (None, TUNING):
        engine = LocalEngine(
            runner("llama", tuning, num_blocks=16),
            SHAPES["llama"],
            EngineConfig(max_step_tokens=20, max_running=4),
            max_context=128,
        )
        client = Client(engine)
        prompts = [list(range(1, length)) for length in (3, 26, 14)]
        started = [client.start(client.request(prompt, max_tokens=3)) for prompt in prompts]
        answers.append([client.wait(events).tokens for events in started])
        engine.close()
    assert answers[0] == answers[1]


def test_tiles_cover_each_row_once() -> None:
    runs = (Run(first=3, count=37, start=5, sequence=1), Run(first=40, count=16, start=0, sequence=0))
    tiles = tiles_of(runs, 16)
    rows = {row + i: (position + i, sequence) for row, n, position, sequence in tiles.tolist() for i in range(n)}
    assert len(rows) == sum(n for _, n, _, _ in tiles.tolist()) == 53
    assert rows == {run.first + i: (run.start + i, run.sequence) for run in runs for i in range(run.count)}


def test_heads_that_the_kernels_do_not_take_run_plainly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("openwafer.serve.gpu.fast.find_spec", lambda name: object())
    assert isinstance(best_kernels(tiny_program(CONFIGS["llama"])), TritonKernels)
    assert type(best_kernels(tiny_program(CONFIGS["odd"]))) is PlainKernels
    assert "size 10" in caplog.text
    monkeypatch.setattr("openwafer.serve.gpu.fast.find_spec", lambda name: None)
    assert type(best_kernels(tiny_program(CONFIGS["llama"]))) is PlainKernels
