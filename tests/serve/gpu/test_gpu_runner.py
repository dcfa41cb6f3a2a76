"""The GPU's runner with plain operations on the CPU, against the definition and through the real engine."""

import numpy as np
import pytest
import torch

from openwafer.models.generate import generate
from openwafer.serve.engine import EngineConfig, LocalEngine
from openwafer.serve.gpu.runner import BLOCK_SIZE, GpuRunner
from openwafer.serve.program import Program
from openwafer.serve.reference import ReferenceRunner
from openwafer.serve.runner import Batch, Draw, DrawingRunner
from openwafer.serve.speculation import Lookup, Speculator
from tests.serve.conftest import CONFIGS, Client, tiny_module, tiny_program
from tests.serve.test_native import TOKENS, feed

PROMPT = np.random.default_rng(1).integers(0, 101, 37).tolist()


def gpu_runner(program: Program, num_blocks: int = 8, dtype: torch.dtype = torch.float32) -> GpuRunner:
    return GpuRunner(
        program, num_blocks=num_blocks, max_rows=64, max_sequences=40, device=torch.device("cpu"), dtype=dtype
    )


@pytest.mark.parametrize("pieces", [[30, 1, 14], [45], [1] * 45, [5, 4, 20, 16]])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_definition(name: str, pieces: list[int]) -> None:
    """Short pieces are attended row by row, long ones together."""
    program = tiny_program(CONFIGS[name])
    expected = feed(ReferenceRunner(program, num_blocks=8, block_size=BLOCK_SIZE), [45])
    np.testing.assert_allclose(feed(gpu_runner(program), pieces), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt"])
def test_bf16_stays_close(name: str) -> None:
    program = tiny_program(CONFIGS[name], dtype="bf16")
    expected = feed(ReferenceRunner(program, num_blocks=8, block_size=BLOCK_SIZE), [45])
    found = feed(gpu_runner(program, dtype=torch.bfloat16), [30, 1, 14])
    assert np.linalg.norm(found - expected) < 0.03 * np.linalg.norm(expected)


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"quantization": "int4"}])
def test_packed_weights_answer_as_on_a_cpu(options: dict[str, str]) -> None:
    """The definition rounds the inputs of packed layers to 8 bits, a GPU does not."""
    program = tiny_program(CONFIGS["llama"], **options)
    expected = feed(ReferenceRunner(program, num_blocks=8, block_size=BLOCK_SIZE), [45])
    found = feed(gpu_runner(program), [45])
    assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


def test_several_sequences_of_all_lengths_in_one_batch() -> None:
    program = tiny_program(CONFIGS["mistral"])
    lengths = [1, 12, 3, 20]
    tables = np.array([[0, 1], [2, 3], [4, 5], [6, 7]], np.int32)
    batch = Batch(
        tokens=np.concatenate([TOKENS[:n] for n in lengths]),
        positions=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        sequences=np.repeat(np.arange(4, dtype=np.int32), lengths),
        tables=tables,
        logit_rows=(np.cumsum(lengths) - 1).astype(np.int32),
    )
    expected = ReferenceRunner(program, num_blocks=8, block_size=BLOCK_SIZE).run(batch)
    runner = gpu_runner(program)
    np.testing.assert_allclose(runner.run(batch), expected, atol=2e-4, rtol=1e-4)
    draw = Draw(temperature=0.0, top_k=None, top_p=1.0, min_p=0.0, uniform=0.0)
    drawn = runner.run_and_draw(batch, [draw, None, draw, None])
    assert drawn.tokens[[0, 2]].tolist() == expected.argmax(1)[[0, 2]].tolist()
    np.testing.assert_allclose(drawn.tops, expected.max(1), atol=2e-4)
    np.testing.assert_allclose(drawn.logits, expected[[1, 3]], atol=2e-4, rtol=1e-4)


@pytest.fixture
def open_gpu():
    opened: list[LocalEngine] = []

    def open_(name: str = "llama", num_blocks: int = 64, speculator: Speculator | None = None, **options) -> Client:
        program = tiny_program(CONFIGS[name])
        runner = gpu_runner(program, num_blocks)
        assert isinstance(runner, DrawingRunner)
        config = EngineConfig(**{"max_step_tokens": 32} | options)
        opened.append(LocalEngine(runner, CONFIGS[name], config, max_context=256, speculator=speculator))
        return Client(opened[-1])

    yield open_
    for engine in opened:
        engine.close()


@pytest.mark.parametrize("name", ["llama", "gpt", "gemma3", "odd"])
def test_greedy_answers_are_those_of_the_plain_loop(open_gpu, name: str) -> None:
    expected = list(generate(tiny_module(CONFIGS[name]), PROMPT, max_tokens=40))
    assert open_gpu(name).ask(PROMPT, max_tokens=40).tokens == expected


def test_a_crowd_gets_what_each_gets_alone(open_gpu) -> None:
    """Chunked prompts, shared beginnings, preemption; drawn with and without limits, with and without logprobs."""
    kinds = [
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.7, "seed": 8, "top_p": 0.8},
        {"temperature": 1.0, "seed": 9, "top_k": 5, "num_logprobs": 2},
        {"temperature": 0.0, "frequency_penalty": 0.5},
        {"temperature": 0.0, "logit_bias": {3: 2.0}, "prompt_logprobs": True},
        {"temperature": 0.0, "stop_ids": frozenset(range(50)), "min_tokens": 6},
    ]
    alone, crowd = open_gpu(), open_gpu(num_blocks=24, max_step_tokens=23)
    prompts = [PROMPT[: 5 + 3 * number] for number in range(len(kinds) * 2)]
    started = [
        crowd.start(crowd.request(prompt, max_tokens=24, **kinds[number % len(kinds)]))
        for number, prompt in enumerate(prompts)
    ]
    for number, (prompt, events) in enumerate(zip(prompts, started, strict=True)):
        mine, other = alone.ask(prompt, max_tokens=24, **kinds[number % len(kinds)]), crowd.wait(events)
        assert (mine.tokens, mine.last.finish_reason) == (other.tokens, other.last.finish_reason)
        assert len(mine.logprobs) == (len(mine.tokens) if number % len(kinds) == 2 else 0)
        assert len(mine.prompt_logprobs) == (len(prompt) if number % len(kinds) == 4 else 0)
    assert crowd.engine.num_preemptions > 0
    assert crowd.engine.stats().kv_cache_usage == 0


def test_the_host_draws_the_same_tokens(open_gpu, open_tiny) -> None:
    """The C runner draws on the host, this one beside its logits."""
    for kind in ({"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.05}, {}):
        sampling = {"temperature": 0.9, "seed": 5, "max_tokens": 24} | kind
        assert open_gpu().ask(PROMPT, **sampling).tokens == open_tiny().ask(PROMPT, **sampling).tokens


def test_guesses_change_nothing(open_gpu) -> None:
    sampling = {"max_tokens": 30, "temperature": 0.3, "seed": 3}
    expected = open_gpu().ask(PROMPT * 2, **sampling).tokens
    client = open_gpu(speculator=Lookup(in_text=True))
    events = client.start(client.request(PROMPT * 2, prediction=expected, **sampling))
    answer = client.wait(events)
    assert answer.tokens == expected
    assert answer.last.usage is not None
    assert answer.last.usage.num_accepted_prediction_tokens > 10


def test_weights_that_are_damaged_end_the_answer(open_gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    client = open_gpu()
    runner = client.engine._runner
    assert isinstance(runner, GpuRunner)
    runner._plan.head[0].weight.fill_(float("nan"))  # pyright: ignore
    answer = client.ask(PROMPT)
    assert answer.last.finish_reason == "error"
    assert "not a number" in (answer.last.error or "")
